"""`block_sums` in Triton: a program reads one block of one row, once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.launch.launches import launch
from torch_fdattn.ops.block_sums import BLOCK
from torch_fdattn.ops.launch import cdiv


@triton.jit(do_not_specialize=["columns"])
def _block_sums_kernel(
    x_ptr, temperature_ptr, largest_ptr, at_ptr, sums_ptr, row_stride, columns, blocks, BLOCK: tl.constexpr
):  # fmt: skip
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    at = tl.arange(0, BLOCK)
    inside = block * BLOCK + at < columns
    x_ptrs = x_ptr + row.to(tl.int64) * row_stride + block * BLOCK + at
    x = tl.load(x_ptrs, mask=inside, other=float("-inf")).to(tl.float32)
    largest = tl.max(x, 0)
    first = tl.min(tl.where(x == largest, at, BLOCK - 1), 0)
    # A block of -inf alone has no NaN: -inf - -inf.
    distance = tl.where(x == float("-inf"), x, x - largest)
    weights = tl.exp(distance / tl.load(temperature_ptr + row))
    tl.store(largest_ptr + tl.program_id(0), largest)
    tl.store(at_ptr + tl.program_id(0), (block * BLOCK + first).to(tl.int64))
    tl.store(sums_ptr + tl.program_id(0), tl.sum(weights, 0))


def launch_block_sums(
    x: Tensor, temperature: Tensor, largest: Tensor, columns: Tensor, sums: Tensor
) -> None:
    """Writes `BlockSums` into the last three, contiguous (n, blocks); rows of x are contiguous."""
    blocks = cdiv(x.shape[1], BLOCK)
    launch(
        _block_sums_kernel, x.shape[0] * blocks,
        x, temperature, largest, columns, sums, x.stride(0), x.shape[1], blocks, BLOCK, num_warps=4,
    )  # fmt: skip
