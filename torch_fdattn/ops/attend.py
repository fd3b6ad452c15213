"""The tile loop that attention's forward and decode share: a block of queries over a range of keys.

Shapes: q (M, D) in registers or shared memory, K tiles loaded transposed (D, N), V tiles (N, D),
acc (M, D) fp32. D is the head dim padded to a power of two (BLOCK_D). What speaks of the keys travels as
one tuple, keys = (kv_len, kv_start, window_left, window_right, kv_block, kv_stride).
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_fdattn.ops.online_softmax import softmax_update
from torch_fdattn.ops.tiles import visible


@triton.jit
def attend_range(
    acc, row_max, row_sum, q, q_pos, k_ptr, v_ptr, k_strides, v_strides, bounds, keys, scale_log2,
    head_dim, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, STRIPED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The running state after the key range `bounds` of `ops/tiles.py`: masked, unmasked, masked."""
    FIRST_PART: tl.constexpr = 0 if HAS_LEFT else 1  # no left border: no masked tiles before the full ones
    for part in tl.static_range(FIRST_PART, 3):
        acc, row_max, row_sum = attend_tiles(
            acc, row_max, row_sum, q, q_pos, k_ptr, v_ptr, k_strides, v_strides,
            bounds[part], bounds[part + 1], keys, scale_log2, head_dim,
            HAS_LEFT, HAS_RIGHT, STRIPED, part != 1, BLOCK_N, BLOCK_D, EVEN_D, PRECISION,
        )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit
def attend_tiles(
    acc, row_max, row_sum, q, q_pos, k_ptr, v_ptr, k_strides, v_strides, begin, end, keys, scale_log2,
    head_dim, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, STRIPED: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The running state after the tiles begin, begin + BLOCK_N, … < end.

    k_ptr and v_ptr point at the head's first key. MASKED is false only where every pair is visible.
    """
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    k_ptrs = tile_ptrs(k_ptr, begin, d[:, None], n[None, :], k_strides)
    v_ptrs = tile_ptrs(v_ptr, begin, d[None, :], n[:, None], v_strides)
    for start in tl.range(begin, end, BLOCK_N):
        index = start + n
        k = load_tile(k_ptrs, index[None, :] < keys[0], d[:, None] < head_dim, MASKED, EVEN_D)
        products = tl.dot(q, k, input_precision=PRECISION)
        if MASKED:
            seen = visible(q_pos[:, None], index[None, :], keys, HAS_LEFT, HAS_RIGHT, STRIPED)
            products = tl.where(seen, products, float("-inf"))
        p, row_max, row_sum, alpha = softmax_update(products, row_max, row_sum, scale_log2, MASKED)
        v = load_tile(v_ptrs, index[:, None] < keys[0], d[None, :] < head_dim, MASKED, EVEN_D)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        k_ptrs += BLOCK_N * k_strides[0]
        v_ptrs += BLOCK_N * v_strides[0]
    return acc, row_max, row_sum


@triton.jit
def tile_ptrs(ptr, first_row, d, rows, strides):
    """Pointers of a tile from row `first_row`; d and rows already broadcast against each other.

    64-bit, since one head of a cache can span more than 2**31 elements.
    """
    return ptr + first_row.to(tl.int64) * strides[0] + (rows.to(tl.int64) * strides[0] + d * strides[1])


@triton.jit
def load_tile(ptrs, rows_in, dims_in, MASKED: tl.constexpr, EVEN_D: tl.constexpr):
    """A tile with zeros outside, and no mask where the tile is known to be whole."""
    if MASKED and EVEN_D:
        return tl.load(ptrs, mask=rows_in, other=0.0)
    elif MASKED:
        return tl.load(ptrs, mask=rows_in & dims_in, other=0.0)
    elif EVEN_D:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=dims_in, other=0.0)
