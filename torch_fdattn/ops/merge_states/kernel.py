"""Merging partial attention states in Triton: one program per row, parts in fixed order.

Shapes: outs (N, B, H, S, D), lses (N, B, H, S), any strides; out (B, H, S, D), any strides; lse
(B, H, S) contiguous. Decode's splits and the parts of a sharded cache go through the same kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.launch.launches import Launch, launch, run
from torch_fdattn.ops.launch import padded
from torch_fdattn.ops.library import launches
from torch_fdattn.ops.online_softmax import LOG2E, finite_max, merge_finish, merge_update


@triton.jit
def _row_coordinates(row, heads, length):
    """Row of (B, H, S) to 64-bit (b, h, s)."""
    s = row % length
    h = row // length % heads
    b = row // length // heads
    return b, h, s


@triton.jit(do_not_specialize=["parts", "length"])
def _merge_kernel(
    outs_ptr, lses_ptr, out_ptr, lse_ptr, outs_strides, lses_strides, out_strides,
    parts, heads, length, head_dim: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b, h, s = _row_coordinates(row, heads, length)
    n = tl.arange(0, BLOCK_PARTS)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    outs_ptr += b * outs_strides[1] + h * outs_strides[2] + s * outs_strides[3]
    lses_ptr += b * lses_strides[1] + h * lses_strides[2] + s * lses_strides[3]
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    for start in tl.range(0, parts, BLOCK_PARTS):
        part = (start + n).to(tl.int64)
        lses = tl.load(lses_ptr + part * lses_strides[0], mask=part < parts, other=float("-inf"))
        outs = tl.load(
            outs_ptr + part[:, None] * outs_strides[0] + d[None, :] * outs_strides[4],
            mask=(part[:, None] < parts) & (d[None, :] < head_dim), other=0.0,
        )  # fmt: skip
        acc, row_max, row_sum = merge_update(
            acc, row_max, row_sum, outs.to(tl.float32)[:, None, :], lses.to(tl.float32)[:, None]
        )
    out, lse = merge_finish(acc, row_max, row_sum)
    out_ptr += b * out_strides[0] + h * out_strides[1] + s * out_strides[2]
    out_ptrs = out_ptr + d[None, :] * out_strides[3]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=d[None, :] < head_dim)
    tl.store(lse_ptr + row + tl.arange(0, 1), lse)


@triton.jit(do_not_specialize=["length", "rows"])
def _merge_backward_kernel(
    dout_ptr, dlse_ptr, outs_ptr, lses_ptr, out_ptr, lse_ptr, douts_ptr, dlses_ptr,
    dout_strides, outs_strides, lses_strides, out_strides, douts_strides,
    heads, length, rows, head_dim: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) % rows).to(tl.int64)
    part = (tl.program_id(0) // rows).to(tl.int64)
    b, h, s = _row_coordinates(row, heads, length)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    inside = d < head_dim
    dout_ptr += b * dout_strides[0] + h * dout_strides[1] + s * dout_strides[2]
    out_ptr += b * out_strides[0] + h * out_strides[1] + s * out_strides[2]
    outs_ptr += (
        part * outs_strides[0] + b * outs_strides[1] + h * outs_strides[2] + s * outs_strides[3]
    )
    lses_ptr += (
        part * lses_strides[0] + b * lses_strides[1] + h * lses_strides[2] + s * lses_strides[3]
    )
    douts_ptr += (
        part * douts_strides[0] + b * douts_strides[1] + h * douts_strides[2] + s * douts_strides[3]
    )
    part_lse = tl.load(lses_ptr).to(tl.float32)
    weight = tl.exp2((part_lse - finite_max(tl.load(lse_ptr + row))) * LOG2E)
    dout = tl.load(dout_ptr + d * dout_strides[3], mask=inside, other=0.0).to(tl.float32)
    part_out = tl.load(outs_ptr + d * outs_strides[4], mask=inside, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + d * out_strides[3], mask=inside, other=0.0).to(tl.float32)
    part_out = tl.where(part_lse == float("-inf"), 0.0, part_out)
    inner = tl.sum(dout * (part_out - out), 0)
    if dlse_ptr is not None:
        inner += tl.load(dlse_ptr + row)
    douts = (weight * dout).to(douts_ptr.dtype.element_ty)
    tl.store(douts_ptr + d * douts_strides[4], douts, mask=inside)
    # Where no part saw a key, a loss's gradient at lse = -inf may be NaN; a weightless part has none.
    tl.store(dlses_ptr + part * rows + row, tl.where(weight == 0.0, 0.0, weight * inner))


def merge_launch(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> Launch:
    """What writes the merge of the stacks into out (any float dtype) and lse (fp32, contiguous), which are not empty."""
    parts, batch, heads, length, head_dim = outs.shape
    block_parts = min(32, 1 << max(parts - 1, 0).bit_length())
    return Launch(
        _merge_kernel, batch * heads * length,
        outs, lses, out, lse, outs.stride(), lses.stride(), out.stride(),
        parts, heads, length, head_dim, BLOCK_PARTS=block_parts, BLOCK_D=padded(head_dim),
    )  # fmt: skip


def launch_merge(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Makes `merge_launch`."""
    run((merge_launch(outs, lses, out, lse),))


def launch_merge_backward(
    dout: Tensor, dlse: Tensor | None, outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor,
    douts: Tensor, dlses: Tensor,
) -> None:  # fmt: skip
    """Writes the gradients of the stacks into douts and dlses (contiguous)."""
    parts, batch, heads, length, head_dim = outs.shape
    rows = batch * heads * length
    if rows * parts == 0:
        return
    launches["merge_states_backward/triton"] += 1
    launch(
        _merge_backward_kernel, rows * parts,
        dout, dlse, outs, lses, out, lse, douts, dlses,
        dout.stride(), outs.stride(), lses.stride(), out.stride(), douts.stride(),
        heads, length, rows, head_dim, BLOCK_D=padded(head_dim),
    )  # fmt: skip
