"""Which weights dropout keeps, on tiles, in Triton; the torch twin, which defines it, is `dropout.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_fdattn.ops.attention import dropout
from torch_fdattn.ops.tiles import key_position

ROUNDS = tl.constexpr(dropout.ROUNDS)
GOLDEN = tl.constexpr(dropout.GOLDEN)


@triton.jit
def dropout_key(seed_ptr):
    return tl.load(seed_ptr) + tl.load(seed_ptr + 1) * GOLDEN


@triton.jit
def kept_tile(options, head, q_pos, index, first_key, keys, STRIPED: tl.constexpr):
    """Whether each weight of a tile is kept: (M, N) for q_pos (M,) and index (N,) from first_key on.

    head by `score_tiles.head_options`.
    """
    if STRIPED:
        draws = _draws_by_key(head, q_pos, index, keys, STRIPED)
    else:
        # Both give the same bits; whole groups of eight keys, an eighth of the work. Tiles begin at multiples of
        # 16 keys: where no kv_start was given, the compiler drops the other way.
        if keys[1] & 7 == 0:
            draws = _draws_by_group(head, q_pos, keys[1] + first_key, index.shape[0])
        else:
            draws = _draws_by_key(head, q_pos, index, keys, STRIPED)
    return draws >= options[8]


@triton.jit
def _draws_by_group(head, q_pos, first, N: tl.constexpr):
    M: tl.constexpr = q_pos.shape[0]
    w0, w1, w2, w3 = _words(head, q_pos, (first >> 3) + tl.arange(0, N // 8))
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (M, N // 2))
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (M, N)).to(tl.int32)


@triton.jit
def _draws_by_key(head, q_pos, index, keys, STRIPED: tl.constexpr):
    position = key_position(index, keys[1], keys[4], keys[5], STRIPED)
    w0, w1, w2, w3 = _words(head, q_pos, position >> 3)
    lane = (position & 7)[None, :]
    even = tl.where(lane < 4, w0, w2)
    odd = tl.where(lane < 4, w1, w3)
    words = tl.where((lane & 2) == 0, even, odd)
    return tl.where((lane & 1) == 0, words & 0xFFFF, words >> 16).to(tl.int32)


@triton.jit
def _words(head, q_pos, groups):
    zero = q_pos[:, None] * 0 + groups[None, :] * 0
    return tl.philox(
        head[3],
        zero + q_pos[:, None],
        zero + groups[None, :],
        zero + head[4],
        zero + head[5],
        ROUNDS,
    )
