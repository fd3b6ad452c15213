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


@gluon.jit
def hide(scores, tile, row, block, call, LAYOUT: gl.constexpr):
    """-inf where a row, from `row` on, does not see a key of the block."""
    keys = block * call.KEYS + gl.arange(0, call.KEYS, layout=gl.SliceLayout(0, LAYOUT))
    rows = row + tile.offset + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    last = gl.full_like(rows, 0) + (tile.keys.length - 1)
    if call.HAS_RIGHT:
        last = gl.minimum(last, rows + call.right)
    seen = gl.expand_dims(keys, 0) <= gl.expand_dims(last, 1)
    if call.HAS_LEFT:
        seen = seen & (gl.expand_dims(keys, 0) >= gl.expand_dims(rows - call.left, 1))
    return gl.where(seen, scores, MINUS_INFINITY)
