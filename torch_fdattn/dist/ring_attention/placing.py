"""Writes a rank's keys and values to where they belong among those of all positions."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.ring_attention.sequence_shards import Run
from torch_fdattn.launch.launches import launch
from torch_fdattn.ops.launch import cdiv, power_of_two

#: Tokens of one head that a program moves.
_BLOCK = 64


@triton.jit
def _move(x_ptr, strides, there_ptr, batch, head, tokens, dims, inside, begin, to):
    of = batch * strides[0] + head * strides[1] + (begin + tokens) * strides[2] + dims * strides[3]
    tl.store(there_ptr + to, tl.load(x_ptr + of, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["begin", "start", "length"])
def _place_kernel(
    k_ptr, v_ptr, k_there_ptr, v_there_ptr, begin, start, length, k_strides, v_strides, heads, row,
    DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """k, v (B, K, N, D) from token `begin` on -> k_there, v_there (total, B, K, D) from position `start` on, `row` apart."""
    tokens = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    batch, head = tl.program_id(0).to(tl.int64) // heads, tl.program_id(0).to(tl.int64) % heads
    inside = (tokens < length) & (dims < DIM)
    to = (start + tokens) * row + tl.program_id(0) * DIM + dims
    _move(k_ptr, k_strides, k_there_ptr, batch, head, tokens, dims, inside, begin, to)
    _move(v_ptr, v_strides, v_there_ptr, batch, head, tokens, dims, inside, begin, to)


def place(k: Tensor, v: Tensor, there: Tensor, begin: int, run: Run) -> None:
    """Writes the run's keys k and values v (B, K, N, D), which lie there from token `begin` on, to their positions in `there`
    (total, 2, B, K, D), contiguous.

    One launch: PyTorch's copies take two, and a strided one moves a third of what the memory can.
    """
    batch, heads, _, dim = k.shape
    if not (run.length and batch * heads * dim):
        return
    # Heads before tokens: of the second dimension a grid has at most 65,535.
    grid = batch * heads, cdiv(run.length, _BLOCK), 1
    launch(
        _place_kernel, grid,
        k, v, *there.unbind(1), begin, run.start, run.length, k.stride(), v.stride(), heads,
        there.stride(0), dim, _BLOCK, power_of_two(dim), num_warps=4,
    )  # fmt: skip
