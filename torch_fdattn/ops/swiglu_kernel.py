"""``silu(gate) * up`` row by row, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.launch.launches import launch
from torch_fdattn.ops.launch import cdiv, power_of_two

#: Columns of a program at most: two loads of 16 bytes a thread for each of the tensors.
_COLUMNS = 2048


@triton.jit
def swiglu(gate, up):
    """silu(gate) * up, of fp32."""
    return gate / (1.0 + tl.exp2(gate * -1.4426950408889634)) * up


@triton.jit
def rounded_swiglu(gate, up, DTYPE: tl.constexpr):
    """swiglu of products in fp32, with all that is rounded to DTYPE where it is the result of a launch of its own."""
    return swiglu(gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)).to(DTYPE)


@triton.jit
def _silu_mul_kernel(
    gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, columns, blocks, BLOCK: tl.constexpr
):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + at, mask=inside).to(tl.float32)
    out = swiglu(gate, up)
    tl.store(out_ptr + row * columns + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def launch_silu_mul(
    gate: Tensor, up: Tensor, out: Tensor, gate_stride: int, up_stride: int
) -> None:
    """Writes into out, contiguous; rows of the others begin so many elements apart."""
    columns = gate.shape[-1]
    block = min(power_of_two(columns), _COLUMNS)
    blocks = cdiv(columns, block)
    launch(
        _silu_mul_kernel, out.numel() // columns * blocks,
        gate, up, out, gate_stride, up_stride, columns, blocks, block, num_warps=4,
    )  # fmt: skip
