"""The sums of dQ, float32 in memory, to which all tiles of keys add, and the gradient that is made of them."""

from __future__ import annotations

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma


@builtin
def _reduce_shared_to_global(tensor_desc, coord, src, _semantic=None):
    """Adds a block of shared memory to memory, as `tma.async_copy_shared_to_global` copies one.

    Triton's builder has it (PTX ISA, cp.reduce.async.bulk.tensor), `tma` has no function for it.
    """
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


@gluon.jit
def add(dq, sums, buffer, batch, head, row, GROUP: gl.constexpr):
    """A warp group's columns of dQ, of rows from `row` on."""
    ROWS: gl.constexpr = dq.shape[0]
    COLUMNS: gl.constexpr = dq.shape[1]
    tma.store_wait(0)  # what was there before is read
    buffer.reshape([ROWS, COLUMNS]).store(dq)
    fence_async_shared()
    _reduce_shared_to_global(sums, [batch, head, row, GROUP * COLUMNS], buffer)


@gluon.jit
def opaque_zero(x):
    """0, which the compiler cannot know. Added to the index of a buffer, it keeps what wgmma is told of the buffer from
    being computed before the loop, and kept in some sixty registers that there are not.
    """
    return gl.inline_asm_elementwise(
        "and.b32 $0, $1, 0;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["numbers"])
def scaled_sums_kernel(sums_ptr, dq_ptr, dq_strides, heads, q_len, head_dim, scale, numbers, BLOCK: tl.constexpr):  # fmt: skip
    """dq = scale · sums, which are contiguous."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numbers
    column, row = place % head_dim, place // head_dim
    head = row // q_len
    offsets = (
        head // heads * dq_strides[0]
        + head % heads * dq_strides[1]
        + row % q_len * dq_strides[2]
        + column * dq_strides[3]
    )
    found = tl.load(sums_ptr + place, mask=inside, other=0.0)
    tl.store(dq_ptr + offsets, (found * scale).to(dq_ptr.dtype.element_ty), mask=inside)
