"""The sums of dQ, float32 in memory, to which all tiles of keys add, and the gradient that is made of them.

Blocks of 64 rows follow each other, padded as lse2 and delta are; in a block the columns of each warp group lie in the order in
which its threads hold them, so that a thread writes 16 bytes at a time to shared memory, without bank conflicts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

from torch_fdattn.ops.attention.backward_rows import PADDING
from torch_fdattn.ops.attention.hopper.backward.tiles import GROUPS
from torch_fdattn.ops.packed_tiles import packed_block
from torch_fdattn.ops.tiles import program_coordinates

LINE = gl.constexpr(256)  #: numbers of a row of the sums, as the copy sees them
WARPS = gl.constexpr(4)  #: of a warp group


@builtin
def _reduce_shared_to_global(tensor_desc, coord, src, _semantic=None):
    """Adds a block of shared memory to memory, as `tma.async_copy_shared_to_global` copies one.

    Triton's builder has it (PTX ISA, cp.reduce.async.bulk.tensor), `tma` has no function for it.
    """
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


@gluon.jit
def add(buffer, sums, block, GROUP: gl.constexpr):
    """Starts to add a warp group's columns of dQ to those of a block, of all heads' padded ones."""
    LINES: gl.constexpr = buffer.shape[0]
    _reduce_shared_to_global(sums, [(block * GROUPS + GROUP) * LINES, 0], buffer)


@gluon.jit
def by_threads(x):
    """An accumulator's elements in the order in which threads hold them, four of a thread side by side.

    Thread 4 r + c of warp w has rows 16 w + r and 16 w + r + 8, of every eight columns 2 c and 2 c + 1 (PTX ISA, wgmma).
    """
    COLUMNS: gl.constexpr = x.shape[1]
    parts = x.reshape([4, 2, 8, COLUMNS // 8, 4, 2])
    return parts.permute((3, 0, 2, 4, 1, 5)).reshape([x.shape[0] * COLUMNS // LINE, LINE])


@gluon.jit
def opaque_zero(x):
    """0, which the compiler cannot know. Added to the index of a buffer, it keeps what wgmma is told of the buffer from
    being computed before the loop, and kept in some sixty registers that there are not.
    """
    return gl.inline_asm_elementwise(
        "and.b32 $0, $1, 0;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def store_warp_sums(by_thread, sums, row, GROUP: gl.constexpr):
    """The sum of what each warp's threads hold, (4, 8, 4) of `thread_sum`, into a row of sums, (rows, warp groups, warps)."""
    found = gl.sum(gl.sum(by_thread, 2), 1)
    warps = gl.arange(0, WARPS, layout=found.type.layout)
    gl.store(sums + (row.to(gl.int64) * GROUPS + GROUP) * WARPS + warps, found)


@triton.jit(do_not_specialize=["heads", "q_len", "padded_len", "sequences"])
def scaled_sums_kernel(
    sums_ptr, dq_ptr, dq_strides, heads, q_len, padded_len, scale, sequences, cu_seqlens_q_ptr,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """dq = scale · sums, of a block of one head; COLUMNS are HEAD_DIM's padded."""
    block, head, batch = program_coordinates(padded_len // ROWS, heads)
    blocks_before = (batch.to(tl.int64) * heads + head) * (padded_len // ROWS) + block
    sums = tl.load(sums_ptr + blocks_before * ROWS * COLUMNS + tl.arange(0, ROWS * COLUMNS))
    # Back from the order of `by_threads`.
    parts = sums.reshape([GROUPS, COLUMNS // GROUPS // 8, 4, 8, 4, 2, 2])
    sums = parts.permute((2, 5, 3, 0, 1, 4, 6)).reshape([ROWS, COLUMNS])
    first = block * ROWS
    dq_ptr += batch.to(tl.int64) * dq_strides[0] + head.to(tl.int64) * dq_strides[1]
    if cu_seqlens_q_ptr is not None:
        _, own_block, first_token, q_len, _, _ = packed_block(
            first // PADDING, cu_seqlens_q_ptr, None, sequences, q_len, 0, PADDING
        )
        first = own_block * PADDING + first % PADDING
        dq_ptr += first_token.to(tl.int64) * dq_strides[2]
    rows, columns = first + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (rows < q_len)[:, None] & (columns < HEAD_DIM)[None, :]
    places = rows[:, None].to(tl.int64) * dq_strides[2] + columns[None, :] * dq_strides[3]
    tl.store(dq_ptr + places, (sums * scale).to(dq_ptr.dtype.element_ty), mask=inside)
