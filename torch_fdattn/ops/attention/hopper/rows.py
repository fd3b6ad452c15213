"""Rows of scores in the registers of a warp group: 64 rows, whose columns a thread holds in pairs, 8 apart.

Layouts are Hopper's for accumulators (PTX ISA, wgmma): so a row's columns lie in four threads, and what is summed over
columns that are 8 apart stays within a thread.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(64)  #: of a warp group
MINUS_INFINITY = gl.constexpr(float("-inf"))


@gluon.jit
def as_column(x, like):
    """A number for each row, in the layout of the 2-D tensor `like`: no instruction."""
    layout: gl.constexpr = gl.SliceLayout(1, like.type.layout)
    return gl.expand_dims(gl.convert_layout(x, layout, assert_trivial=True), 1)


@gluon.jit
def row_max(scores, N: gl.constexpr, LAYOUT: gl.constexpr):
    """In chains within each thread, and then between the four of a row: plain `gl.max` is one chain for each row."""
    parts = gl.max(gl.max(scores.reshape([ROWS, 4, N // 32, 8]), 1), 1)
    return gl.convert_layout(gl.max(parts, 1), LAYOUT, assert_trivial=True)


@gluon.jit
def thread_sums(weights, N: gl.constexpr):
    """(64, 8): sums of what each thread holds; their own sum is needed once a tile."""
    return gl.sum(gl.sum(weights.reshape([ROWS, 4, N // 32, 8]), 1), 1)


@gluon.jit
def thread_sum(x):
    """(4, 8, 4): of each warp and thread the sum of what it holds of (64, N).

    Thread 4 r + c of warp w has rows 16 w + r and 16 w + r + 8, of every eight columns 2 c and 2 c + 1.
    """
    parts = x.reshape([4, 2, 8, x.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(gl.sum(parts, 5), 3), 1)


@gluon.jit
def split_columns(x):
    """(64, N / 8, 8): of which a thread has all eights, and two of each."""
    return x.reshape([ROWS, x.shape[1] // 8, 8])


@gluon.jit
def halves(x, N: gl.constexpr):
    """The left and the right half of the columns."""
    return x.reshape([ROWS, 2, N // 2]).permute((0, 2, 1)).split()


@gluon.jit
def joined(left, right, N: gl.constexpr):
    return gl.join(left, right).permute((0, 2, 1)).reshape([ROWS, N])


@gluon.constexpr_function
def width_of(dtype):
    """How many numbers next to each other a thread holds of a product's operand: 32 bits."""
    return 32 // dtype.primitive_bitwidth


@gluon.jit
def kept(weights, dtype: gl.constexpr, PRODUCT: gl.constexpr):
    """Weights as a loop hands them on: of 8 bits in float32, for the compiler would unpack and pack them again."""
    if dtype.primitive_bitwidth == 8:
        return weights
    else:
        LAYOUT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
        return gl.convert_layout(weights.to(dtype), LAYOUT, assert_trivial=True)


@gluon.jit
def as_operand(weights, dtype: gl.constexpr, PRODUCT: gl.constexpr):
    """Weights as a product of this layout takes them at its left, of what `kept` returns.

    Of 8 bits a thread holds four columns next to each other there, of accumulators two and two, 8 apart. So 16 columns
    8 i + 2 j + l become 4 j + 2 i + l, and the rows of the right operand must have that order too (`fp8.py`).
    """
    if dtype.primitive_bitwidth == 8:
        N: gl.constexpr = weights.shape[1]
        apart = weights.reshape([ROWS, N // 16, 2, 4, 2])
        weights = apart.permute((0, 1, 3, 2, 4)).reshape([ROWS, N])
        LAYOUT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 4)
        weights = gl.convert_layout(weights, LAYOUT, assert_trivial=True)
        return gl.inline_asm_elementwise(
            "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; mov.b32 $0, {a, b}; }",
            "=r,f,f,f,f", [weights], dtype=gl.float8e4nv, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return weights


@gluon.jit
def hide(scores, tile, block, missing, call, PAGE: gl.constexpr, LAYOUT: gl.constexpr):
    """-inf where a row, from the tile's first on, does not see a key of the block; missing: a bit for each PAGE keys that are none."""
    keys = block * call.KEYS + gl.arange(0, call.KEYS, layout=gl.SliceLayout(0, LAYOUT))
    rows = tile.row + tile.offset + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    last = gl.full_like(rows, 0) + (tile.keys.length - 1)
    if call.HAS_RIGHT:
        last = gl.minimum(last, rows + call.right)
    seen = gl.expand_dims(keys, 0) <= gl.expand_dims(last, 1)
    if call.HAS_LEFT:
        seen = seen & (gl.expand_dims(keys, 0) >= gl.expand_dims(rows - call.left, 1))
    if PAGE > 0:
        page = gl.arange(0, call.KEYS, layout=gl.SliceLayout(0, LAYOUT)) // PAGE
        seen = seen & gl.expand_dims((missing >> page) & 1 == 0, 0)
    return gl.where(seen, scores, MINUS_INFINITY)


@gluon.jit
def store_rows(results, pointer, blocks, batch, head, first, FIRST_COLUMN: gl.constexpr, seen):
    """Rows from registers to memory, `first` and those behind it, of which a mask says which are there.

    pointer, blocks: of the tensor (B, H, M, D), and its descriptor.
    """
    LAYOUT: gl.constexpr = results.type.layout
    seen = gl.convert_layout(seen, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = FIRST_COLUMN + gl.arange(0, results.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    pointer += batch.to(gl.int64) * blocks.strides[0]
    pointer += head.to(gl.int64) * blocks.strides[1] + first.to(gl.int64) * blocks.strides[2]
    offsets = gl.expand_dims(rows.to(gl.int64) * blocks.strides[2], 1) + gl.expand_dims(columns, 0)
    inside = gl.expand_dims(seen, 1) & (gl.expand_dims(columns, 0) < blocks.shape[3])
    gl.store(pointer + offsets, results, mask=inside)
