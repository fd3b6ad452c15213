"""The tile loop of attention's forward: a block of queries over a range of keys.

Shapes: q (M, D) in registers or shared memory, K tiles loaded transposed (D, N), V tiles (N, DV),
acc (M, DV) fp32. D and DV are the head dims padded to powers of two (BLOCK_D, BLOCK_DV). What speaks of the
keys travels as one tuple, keys = (kv_len, kv_start, window_left, window_right, kv_block, kv_stride); what
happens to their scores, as the queries, options and head of `score_tiles.score_tile`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_fdattn.ops.attention.dropout_tiles import kept_tile
from torch_fdattn.ops.online_softmax import softmax_update
from torch_fdattn.ops.packed_tiles import page_rows
from torch_fdattn.ops.score_tiles import score_tile
from torch_fdattn.ops.tiles import add_dot, tile_offsets, tile_start, tile_steps, visible


@triton.jit
def attend_range(
    acc, row_max, row_sum, q, q_pos, k_ptr, v_ptr, k_strides, v_strides, bounds, queries, keys, options,
    head, scale_log2, head_dim, v_dim, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_CYCLIC: tl.constexpr,
    BORDERS: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EVEN_D: tl.constexpr, PRECISION: tl.constexpr, pages=None, PAGE: tl.constexpr = 0, unmasked=None,
):  # fmt: skip
    """The running state after the key range `bounds` of `ops/tiles.py`: its borders, then its interior.

    whole: a number, not 0 where the explicit mask hides nothing of the interior, and is not read there.

    In this order: with the interior first, ptxas serialises the wgmma of both loops (its remark C7515),
    which cost 20 % of the rate on Hopper. A range known to have no BORDERS is compiled without them:
    their loop costs registers even where it has no step.
    """
    for interior in tl.static_range(0 if BORDERS else 1, 2 if unmasked is None else 3):
        within, given = bounds, options
        if unmasked is not None and interior > 0:
            read_from = tl.where(unmasked != 0, bounds[2], bounds[1])
            if interior == 1:
                within = (bounds[0], bounds[1], read_from, bounds[3])
                given = (  # in place: triton 3.6 has no function return None within a tuple
                    options[0], options[1], options[2], options[3], options[4], None, None, options[7], options[8],
                    options[9], None, options[11],
                )  # fmt: skip
            else:
                within = (bounds[0], read_from, bounds[2], bounds[3])
        acc, row_max, row_sum = attend_tiles(
            acc, row_max, row_sum, q, q_pos, k_ptr, v_ptr, k_strides, v_strides, within, queries, keys,
            given, head, scale_log2, head_dim, v_dim, HAS_LEFT, HAS_RIGHT, BLOCK_CYCLIC, interior == 0, WIDE, BLOCK_N, BLOCK_D,
            EVEN_D, PRECISION, pages, PAGE,
        )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit
def attend_tiles(
    acc, row_max, row_sum, q, q_pos, k_ptr, v_ptr, k_strides, v_strides, bounds, queries, keys, options,
    head, scale_log2, head_dim, v_dim, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_CYCLIC: tl.constexpr,
    MASKED: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EVEN_D: tl.constexpr, PRECISION: tl.constexpr, pages=None, PAGE: tl.constexpr = 0,
):  # fmt: skip
    """The running state after the border tiles (MASKED) or the interior tiles of a key range.

    k_ptr and v_ptr point at the head's first key, or, where keys lie on pages of PAGE, at page 0; pages =
    (K's and V's stride of pages, and those of `packed_tiles.page_rows`).
    """
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, acc.shape[1])
    EVEN_DV: tl.constexpr = v_dim == acc.shape[1]
    k_offsets = tile_offsets(n[None, :], d[:, None], k_strides, WIDE)
    v_offsets = tile_offsets(n[:, None], dv[None, :], v_strides, WIDE)
    first, last = tile_steps(bounds, MASKED)
    for step in tl.range(first, last, BLOCK_N):
        start = tile_start(step, bounds, MASKED)
        index = start + n
        if PAGE > 0:
            held, page, slot = page_rows(index, keys[0], pages[2:], PAGE)
            k_rows = page * pages[0] + slot * k_strides[0]
            k_ptrs = k_ptr + k_rows[None, :] + d[:, None].to(tl.int64) * k_strides[1]
            k = load_tile(k_ptrs, held[None, :], d[:, None] < head_dim, True, EVEN_D)
        else:
            k_ptrs = k_ptr + start.to(tl.int64) * k_strides[0] + k_offsets
            k = load_tile(k_ptrs, index[None, :] < keys[0], d[:, None] < head_dim, MASKED, EVEN_D)
        products = tl.dot(q, k, input_precision=PRECISION)
        scores, unit, _ = score_tile(
            products, q_pos[:, None], index[None, :], start, queries, keys, options, head, scale_log2, BLOCK_CYCLIC, WIDE,
        )  # fmt: skip
        if MASKED:
            seen = visible(q_pos[:, None], index[None, :], keys, HAS_LEFT, HAS_RIGHT, BLOCK_CYCLIC)
            scores = tl.where(seen, scores, float("-inf"))
        if PAGE > 0:
            scores = tl.where(held[None, :], scores, float("-inf"))
        p, row_max, row_sum, alpha = softmax_update(
            scores, row_max, row_sum, unit, MASKED or options[5] is not None or PAGE > 0
        )
        if options[7] is not None:  # the sum of a row is that of all its weights
            p = tl.where(kept_tile(options, head, q_pos, index, start, keys, BLOCK_CYCLIC), p, 0.0)
        if PAGE > 0:
            v_rows = page * pages[1] + slot * v_strides[0]
            v_ptrs = v_ptr + v_rows[:, None] + dv[None, :].to(tl.int64) * v_strides[1]
            v = load_tile(v_ptrs, held[:, None], dv[None, :] < v_dim, True, EVEN_DV)
        else:
            v_ptrs = v_ptr + start.to(tl.int64) * v_strides[0] + v_offsets
            v = load_tile(v_ptrs, index[:, None] < keys[0], dv[None, :] < v_dim, MASKED, EVEN_DV)
        acc = add_dot(acc * alpha[:, None], p.to(v.dtype), v, PRECISION)
    return acc, row_max, row_sum


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


@triton.jit
def block_ptrs(
    ptr, first_row, strides, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Pointers (ROWS, BLOCK_D) of the block from row `first_row` of one head."""
    rows = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    return ptr + first_row.to(tl.int64) * strides[0] + tile_offsets(rows, d, strides, WIDE)
