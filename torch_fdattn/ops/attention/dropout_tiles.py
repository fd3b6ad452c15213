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
def keep_threshold(options):
    """The least draw that is kept; the drop of 1 in 2**16 is a number of the compiler's, as any 1 in a tuple."""
    return tl.cast(options[8], tl.uint32) << 16


@triton.jit
def kept_tile(options, head, q_pos, index, first_key, keys, BLOCK_CYCLIC: tl.constexpr):
    """Whether each weight of a tile is kept: (M, N) for q_pos (M,) and index (N,) from first_key on.

    head by `score_tiles.head_options`.
    """
    if BLOCK_CYCLIC or index.shape[0] < 32:
        draws = _draws_by_key(head, q_pos, index, keys, BLOCK_CYCLIC)
    else:
        # Both give the same bits; whole groups of eight keys, an eighth of the work. Tiles begin at multiples of
        # their size: where no kv_start was given, the compiler drops the other way.
        if keys[1] & 31 == 0:
            draws = _draws_by_group(head, q_pos, keys[1] + first_key, index.shape[0])
        else:
            draws = _draws_by_key(head, q_pos, index, keys, BLOCK_CYCLIC)
    return draws >= keep_threshold(options)  # of p = 1 all is kept, and its factor is 0


@triton.jit
def kept_tile_transposed(options, head, q_pos, index, first_key, keys, BLOCK_CYCLIC: tl.constexpr):
    """`kept_tile` as (N, M). Groups change threads as one byte each, which is then read eight times."""
    N: tl.constexpr = index.shape[0]
    kept = tl.zeros([N, q_pos.shape[0]], tl.int1)
    if BLOCK_CYCLIC or N < 32:
        kept = tl.trans(kept_tile(options, head, q_pos, index, first_key, keys, BLOCK_CYCLIC))
    else:
        if keys[1] & 31 == 0:
            kept = _kept_by_byte(options, head, q_pos, keys[1] + first_key, N)
        else:
            kept = tl.trans(kept_tile(options, head, q_pos, index, first_key, keys, BLOCK_CYCLIC))
    return kept


@triton.jit
def _kept_by_byte(options, head, q_pos, first, N: tl.constexpr):
    M: tl.constexpr = q_pos.shape[0]
    threshold = keep_threshold(options)
    bits = _random_bits(head, q_pos, (first >> 5) * 4 + tl.arange(0, N // 8))
    byte = tl.zeros([M, N // 8], tl.int32)
    for j in tl.static_range(4):
        byte |= (bits[j] << 16 >= threshold).to(tl.int32) << (2 * j)
        byte |= (bits[j] >= threshold).to(tl.int32) << (2 * j + 1)
    # A sum of one term, which the compiler leaves where it is: all else it would do again for every key.
    byte = tl.sum(byte[:, :, None], 2)
    byte = tl.reshape(tl.trans(byte.to(tl.uint8)), (N // 32, 1, 4, 1, M))
    byte = tl.reshape(tl.broadcast_to(byte, (N // 32, 4, 4, 2, M)), (N, M))
    n = tl.arange(0, N)
    place = (n >> 3 & 3) * 2 + (n & 1)
    return (byte.to(tl.int32) >> place[:, None] & 1) != 0


@triton.jit
def _draws_by_group(head, q_pos, first, N: tl.constexpr):
    """In the upper half of a word; the lower half of odd keys' is not cleared."""
    M: tl.constexpr = q_pos.shape[0]
    w0, w1, w2, w3 = _random_bits(head, q_pos, (first >> 5) * 4 + tl.arange(0, N // 8))
    # (M, N / 8 = 32 keys' group and pair, octet's low and high bit)
    bits = tl.join(tl.join(w0, w1), tl.join(w2, w3))
    bits = tl.reshape(tl.join(bits << 16, bits), (M, N // 32, 4, 2, 2, 2))
    return tl.reshape(tl.permute(bits, 0, 1, 4, 3, 2, 5), (M, N))


@triton.jit
def _draws_by_key(head, q_pos, index, keys, BLOCK_CYCLIC: tl.constexpr):
    position = key_position(index, keys[1], keys[4], keys[5], BLOCK_CYCLIC)
    w0, w1, w2, w3 = _random_bits(head, q_pos, (position >> 5) * 4 + (position >> 1 & 3))
    position = position[None, :]
    below = tl.where((position & 8) == 0, w0, w1)
    above = tl.where((position & 8) == 0, w2, w3)
    bits = tl.where((position & 16) == 0, below, above)
    return tl.where((position & 1) == 0, bits << 16, bits)


@triton.jit
def _random_bits(head, q_pos, groups):
    """Philox4x32, whose products are 64 bits wide: half the instructions of tl.philox, which takes their halves."""
    k0 = head[3].to(tl.uint32)
    k1 = (head[3].to(tl.uint64, bitcast=True) >> 32).to(tl.uint32)
    zero = (q_pos[:, None] * 0 + groups[None, :] * 0).to(tl.uint32)
    c0 = zero + q_pos[:, None].to(tl.uint32)
    c1 = zero + groups[None, :].to(tl.uint32)
    c2 = zero + head[6].to(tl.uint32)
    c3 = zero + head[5].to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product2 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product2 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = product2.to(tl.uint32)
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = product0.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3
