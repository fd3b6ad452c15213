"""Which scores of Hopper's backward are hidden, whether queries or keys are their rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_fdattn.ops.attention.hopper.rows import MINUS_INFINITY


@gluon.jit
def hide(scores, key, query, tile, call, RAGGED: gl.constexpr, KEYS_ARE_ROWS: gl.constexpr):
    """-inf where a query does not see a key; key, query: the first ones."""
    if call.HAS_LEFT or call.HAS_RIGHT or RAGGED:
        KEY_DIM: gl.constexpr = 0 if KEYS_ARE_ROWS else 1
        KEYS: gl.constexpr = scores.shape[KEY_DIM]
        QUERIES: gl.constexpr = scores.shape[1 - KEY_DIM]
        position = query + tile.offset
        hidden = gl.to_tensor(False)
        if RAGGED:
            hidden = key + KEYS > tile.kv_len
        if call.HAS_RIGHT:
            hidden = hidden | (key + KEYS - 1 > position + call.right)
        if call.HAS_LEFT:
            hidden = hidden | (key < position + QUERIES - 1 - call.left)
        if hidden:
            LAYOUT: gl.constexpr = scores.type.layout
            of_keys: gl.constexpr = gl.SliceLayout(1 - KEY_DIM, LAYOUT)
            of_queries: gl.constexpr = gl.SliceLayout(KEY_DIM, LAYOUT)
            keys = gl.expand_dims(key + gl.arange(0, KEYS, layout=of_keys), 1 - KEY_DIM)
            positions = gl.expand_dims(position + gl.arange(0, QUERIES, layout=of_queries), KEY_DIM)
            seen = keys < tile.kv_len
            if call.HAS_RIGHT:
                seen = seen & (keys <= positions + call.right)
            if call.HAS_LEFT:
                seen = seen & (keys >= positions - call.left)
            scores = gl.where(seen, scores, MINUS_INFINITY)
    return scores
