"""Scores of Hopper's backward, whether queries or keys are their rows: the product, and which are hidden."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from torch_fdattn.ops.attention.hopper.rows import MINUS_INFINITY, ROWS


@gluon.jit
def product(rows, own, columns, slot):
    """A block of rows by the columns of a slot, issued: scores, or dP."""
    D: gl.constexpr = rows.shape[4]
    COLUMNS: gl.constexpr = columns.shape[3]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    left = rows.index(own).reshape([ROWS, D])
    right = columns.index(slot).reshape([COLUMNS, D]).permute((1, 0))
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, SCORES)
    return warpgroup_mma(left, right, zeros, use_acc=False, is_async=True)


@gluon.jit
def hide(scores, key, query, tile, call, RAGGED: gl.constexpr, KEYS_ARE_ROWS: gl.constexpr):
    """-inf where a query does not see a key; key, query: the first ones."""
    if call.HAS_LEFT or call.HAS_RIGHT or RAGGED:  # which packed sequences are
        KEY_DIM: gl.constexpr = 0 if KEYS_ARE_ROWS else 1
        KEYS: gl.constexpr = scores.shape[KEY_DIM]
        COUNT: gl.constexpr = scores.shape[1 - KEY_DIM]
        position = query + tile.offset
        hidden = gl.to_tensor(False)
        if RAGGED:
            hidden = key + KEYS > tile.kv_len
        if call.HAS_RIGHT:
            hidden = hidden | (key + KEYS - 1 > position + call.right)
        if call.HAS_LEFT:
            hidden = hidden | (key < position + COUNT - 1 - call.left)
        if tile.queries is not None:
            hidden = hidden | (query + COUNT > tile.queries.length)
        if hidden:
            LAYOUT: gl.constexpr = scores.type.layout
            of_keys: gl.constexpr = gl.SliceLayout(1 - KEY_DIM, LAYOUT)
            of_queries: gl.constexpr = gl.SliceLayout(KEY_DIM, LAYOUT)
            keys = gl.expand_dims(key + gl.arange(0, KEYS, layout=of_keys), 1 - KEY_DIM)
            positions = gl.expand_dims(position + gl.arange(0, COUNT, layout=of_queries), KEY_DIM)
            seen = keys < tile.kv_len
            if call.HAS_RIGHT:
                seen = seen & (keys <= positions + call.right)
            if call.HAS_LEFT:
                seen = seen & (keys >= positions - call.left)
            if tile.queries is not None:
                seen = seen & (positions < tile.queries.length + tile.offset)
            scores = gl.where(seen, scores, MINUS_INFINITY)
    return scores
