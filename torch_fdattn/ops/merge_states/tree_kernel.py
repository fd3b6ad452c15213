"""Merging partial attention states in one binary tree in Triton: a program, one warp, a row of a node.

Both kernels merge by `merge_two`, whose operations round once each (`enable_fp_fusion=False`: no product is contracted with a
sum), so that a node has the same bits however many leaves a launch has and wherever they lie.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.launch.launches import launch
from torch_fdattn.launch.pdl import await_previous, pdl_trigger
from torch_fdattn.ops.launch import cdiv, padded
from torch_fdattn.ops.library import launches
from torch_fdattn.ops.online_softmax import finite_max
from torch_fdattn.ops.pdl import pdl_option, uses_pdl

#: Leaves that a program merges, all loaded at once; of more, a launch makes nodes, and the next one merges those.
MAX_LEAVES = 32
#: Rows of a program that merges pairs.
_ROWS = 4


@triton.jit
def merge_two(out, lse, other_out, other_lse):
    """States (N, D), (N,) over the keys of both: those of one where the other one is empty, zeros where both are."""
    top = finite_max(tl.maximum(lse, other_lse))
    weight, other_weight = tl.exp(lse - top), tl.exp(other_lse - top)
    total = weight + other_weight
    empty, other_empty = lse == float("-inf"), other_lse == float("-inf")
    sums = out * weight[:, None] + other_out * other_weight[:, None]
    found = tl.where(empty[:, None], other_out, sums / total[:, None])
    found = tl.where(other_empty[:, None], out, found)
    found = tl.where((empty & other_empty)[:, None], 0.0, found)
    found_lse = tl.where(empty, other_lse, top + tl.log(total))
    return found, tl.where(other_empty, lse, found_lse)


@triton.jit
def merged_leaves(row, first, parts, head_dim, LEVEL: tl.constexpr, BLOCK_D: tl.constexpr):
    """State (1, D), (1,) of a row's 2^LEVEL leaves from `first` on; row: (outs_ptr, its strides, lses_ptr, its stride)."""
    if LEVEL == 0:
        outs_ptr, part_stride, dim_stride, lses_ptr, lse_stride = row
        d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
        part = first + tl.arange(0, 1)
        lse = tl.load(lses_ptr + part * lse_stride, mask=part < parts, other=float("-inf"))
        out = tl.load(
            outs_ptr + part[:, None] * part_stride + d * dim_stride,
            mask=(part[:, None] < parts) & (d < head_dim), other=0.0,
        )  # fmt: skip
        return out, lse
    else:
        half: tl.constexpr = 1 << (LEVEL - 1)
        out, lse = merged_leaves(row, first, parts, head_dim, LEVEL - 1, BLOCK_D)
        other_out, other_lse = merged_leaves(row, first + half, parts, head_dim, LEVEL - 1, BLOCK_D)
        return merge_two(out, lse, other_out, other_lse)


@triton.jit(do_not_specialize=["parts", "length"])
def _tree_kernel(
    outs_ptr, lses_ptr, out_ptr, lse_ptr, outs_strides, lses_strides, out_stride, lse_stride, parts, heads, length, rows,
    head_dim: tl.constexpr, LEVELS: tl.constexpr, PDL: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """outs (parts, B, H, S, D) -> out (nodes, B, H, S, D), whose rows are out_stride apart; the grid is rows · nodes."""
    await_previous(PDL)
    pdl_trigger(PDL)
    row = (tl.program_id(0) % rows).to(tl.int64)
    node = (tl.program_id(0) // rows).to(tl.int64)
    s, h, b = row % length, row // length % heads, row // length // heads
    outs_ptr += b * outs_strides[1] + h * outs_strides[2] + s * outs_strides[3]
    lses_ptr += b * lses_strides[1] + h * lses_strides[2] + s * lses_strides[3]
    of_row = outs_ptr, outs_strides[0], outs_strides[4], lses_ptr, lses_strides[0]
    out, lse = merged_leaves(of_row, node << LEVELS, parts, head_dim, LEVELS, BLOCK_D)
    if LEVELS == 0:  # the same as if there were an empty one beside it
        out = tl.where((lse == float("-inf"))[:, None], 0.0, out)
    at = node * rows + row + tl.arange(0, 1)
    d = tl.arange(0, BLOCK_D)[None, :]
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, None] * out_stride + d, out, mask=d < head_dim)
    tl.store(lse_ptr + at * lse_stride, lse)


@triton.jit(do_not_specialize=["rows"])
def _pair_kernel(
    out_ptr, lse_ptr, other_out_ptr, other_lse_ptr, merged_ptr, merged_lse_ptr, rows, head_dim: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """All contiguous: outs (rows, D), lses (rows,)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    at = row[:, None] * head_dim + d[None, :]
    inside = (row < rows)[:, None] & (d < head_dim)[None, :]
    lse = tl.load(lse_ptr + row, mask=row < rows, other=0.0)
    other_lse = tl.load(other_lse_ptr + row, mask=row < rows, other=0.0)
    out = tl.load(out_ptr + at, mask=inside, other=0.0)
    other_out = tl.load(other_out_ptr + at, mask=inside, other=0.0)
    out, lse = merge_two(out, lse, other_out, other_lse)
    tl.store(merged_ptr + at, out, mask=inside)
    tl.store(merged_lse_ptr + row, lse, mask=row < rows)


def launch_tree(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor, leaves: int) -> None:
    """Writes each node of so many leaves, at most MAX_LEAVES, into out (any float dtype) and lse (fp32).

    Both are contiguous, or parts of contiguous rows.
    """
    launches["merge_tree/triton"] += 1
    parts, batch, heads, length, head_dim = outs.shape
    rows, pdl = batch * heads * length, uses_pdl(outs)
    launch(
        _tree_kernel, rows * out.shape[0],
        outs, lses, out, lse, outs.stride(), lses.stride(), out.stride(-2), lse.stride(-1), parts, heads, length, rows, head_dim,
        LEVELS=leaves.bit_length() - 1, PDL=pdl, BLOCK_D=padded(head_dim), num_warps=1, enable_fp_fusion=False,
        **pdl_option(pdl),
    )  # fmt: skip


def launch_pair(
    out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor, merged: Tensor, merged_lse: Tensor
) -> None:  # fmt: skip
    """Writes the merge of two states; all contiguous, in fp32."""
    launches["merge_pair/triton"] += 1
    rows, head_dim = lse.numel(), out.shape[-1]
    launch(
        _pair_kernel, cdiv(rows, _ROWS),
        out, lse, other_out, other_lse, merged, merged_lse, rows, head_dim,
        ROWS=_ROWS, BLOCK_D=padded(head_dim), enable_fp_fusion=False,
    )  # fmt: skip
