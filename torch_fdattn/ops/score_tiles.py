"""Softcap, ALiBi, explicit masks and sinks on tiles, in Triton; the torch twin, which defines them, is `ops/scores.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_fdattn.ops import scores
from torch_fdattn.ops.attention.dropout_tiles import dropout_key
from torch_fdattn.ops.online_softmax import LN2, LOG2E, finite_max
from torch_fdattn.ops.tiles import key_position, tile_offsets

MASK_LIMIT = tl.constexpr(scores.MASK_LIMIT)


@triton.jit
def tanh(x):
    """To two units in the last place: Lambert's fraction below 1, where 1 - 2 / (exp(2x) + 1) cancels."""
    square = x * x
    above = 10395.0 + square * (1260.0 + square * 21.0)
    below = 10395.0 + square * (4725.0 + square * (210.0 + square))
    far = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    return tl.where(square < 1.0, x * (above / below), far)


@triton.jit
def modify_scores(scores, distance, softcap, slopes, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Scores in natural units with the cap and the bias; slopes and distance broadcast to them."""
    if SOFTCAP:
        scores = softcap * tanh(scores / softcap)
    if ALIBI:
        scores -= slopes * tl.abs(distance).to(tl.float32)
    return scores


@triton.jit
def score_tile(
    products, q_pos, index, first_key, queries, keys, options, head, scale_log2,
    BLOCK_CYCLIC: tl.constexpr, WIDE: tl.constexpr, HAS_LSE: tl.constexpr = False,
):  # fmt: skip
    """(scores, their unit in log2, the cap's slope) of a tile of one head's q·k products.

    q_pos and index are shaped to broadcast, in either order; first_key is the tile's, queries = (the tile's
    first query, q_len, q_start), keys as in `ops/attend.py`, options by `launch.kernel_options`, head by
    `head_options`. Where nothing changes them, the products stay as they are and the scale is left to the
    softmax; keys that the explicit mask hides get -inf. With HAS_LSE only `probabilities` may follow, whose bounds
    make those of an added mask's entries needless.
    """
    scale, slope, mask_ptr = head[0], head[1], head[2]
    unit = scale_log2
    cap_slope = 1.0
    if options[0] is not None or options[1] is not None:
        products *= scale
        unit = LOG2E
    if options[0] is not None:
        products = modify_scores(products, 0, options[0], 0, True, False)
        capped = products / options[0]
        cap_slope = 1.0 - capped * capped
    if options[1] is not None:
        distance = key_distance(q_pos, index, keys, BLOCK_CYCLIC)
        products = modify_scores(products, distance, 0, slope, False, True)
    if options[5] is not None:
        first_row, q_len, q_start = queries
        if options[10] is not None:  # rows that the mask has not read its last
            q_len = tl.minimum(q_len, plain(options[10]))
            first_row = tl.minimum(first_row, q_len - 1)
        of_keys = mask_stride(options[6], 3)
        first_key = first_key // 16 * 16  # as it is: tiles begin at multiples of their size
        mask_ptr += first_key.to(tl.int64) * of_keys
        if index.shape[0] == 1:
            column = tl.arange(0, index.shape[1])[None, :]
        else:
            column = tl.arange(0, index.shape[0])[:, None]
        # All for loads of whole vectors, 5 times as fast: `index` would hide where it begins, and the mask's own
        # columns may be known to be many, keys[0] not. What lies behind keys[0] is hidden with its key, and rows
        # behind the last are nobody's: who sums over rows sees to it that these add nothing, NaN included.
        inside = first_key + column < mask_stride(options[6], 4)
        if options[6][2] is None:  # one row for all queries (padding): not read for each of them
            offsets = (column.to(tl.int64) if WIDE else column) * of_keys
            entries = tl.load(mask_ptr + offsets, mask=inside, other=0)
        else:
            of_rows = mask_stride(options[6], 2)
            mask_ptr += first_row.to(tl.int64) * of_rows
            row = tl.minimum(q_pos - q_start, q_len - 1) - first_row
            offsets = tile_offsets(row, column, (of_rows, of_keys), WIDE)
            entries = tl.load(mask_ptr + offsets, mask=inside, other=0)
        products, unit = mask_scores(products, entries, unit, HAS_LSE)
    return products, unit, cap_slope


@triton.jit
def mask_scores(scores, entries, unit, HAS_LSE: tl.constexpr = False):
    """(scores, their unit in log2) under an explicit mask's entries, boolean or added."""
    if entries.dtype == tl.int1:
        scores = tl.where(entries, scores, float("-inf"))
    else:
        entries = entries.to(tl.float32)
        scores = scores * unit + entries * LOG2E
        # The maximum is subtracted from what it was taken of: left to the softmax, the factor would become
        # part of an FMA, and the rounding of 1e38 in the maximum alone is 1e30. The minimum keeps it out.
        if not HAS_LSE:
            scores = tl.minimum(scores, MASK_LIMIT * LOG2E, propagate_nan=tl.PropagateNan.ALL)
            scores = tl.where(entries < -MASK_LIMIT, float("-inf"), scores)
        unit = 1.0
    return scores, unit


@triton.jit
def probabilities(exponents, options):
    """2 to the power of scores less their row's lse, in log2 units.

    Never above one; an lse of 1e38, where an additive mask takes a row, is rounded to 1e31.
    """
    if options[5] is not None:
        exponents = tl.minimum(exponents, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.exp2(exponents)


@triton.jit
def key_distance(q_pos, index, keys, BLOCK_CYCLIC: tl.constexpr):
    """Position of the key minus position of the query."""
    return key_position(index, keys[1], keys[4], keys[5], BLOCK_CYCLIC) - q_pos


@triton.jit
def plain(number):
    """What `mask_strides.opaque` made opaque."""
    return (number - 3) // 2


@triton.jit
def mask_stride(strides, AXIS: tl.constexpr):
    """One of `mask_strides.mask_strides`; of AXIS 4 the columns that there are."""
    if strides[AXIS] is None:
        return 1
    elif strides[5] is None:
        return strides[AXIS]
    else:
        return plain(strides[AXIS])


@triton.jit
def head_options(options, scale, batch64, head64):
    """(scale, slope, mask_ptr, dropout key, head, batch, head that dropout counts) of one head; zeros stand for what is absent."""
    slope = 0.0
    mask_ptr = 0
    if options[1] is not None:
        slope = tl.load(options[1] + batch64 * options[2][0] + head64 * options[2][1])
        slope = slope.to(tl.float32)
    if options[5] is not None:
        mask_ptr = options[5] + batch64 * mask_stride(options[6], 0)
        mask_ptr += head64 * mask_stride(options[6], 1)
    key, head, counted = 0, head64.to(tl.int32), head64.to(tl.int32)
    if options[7] is not None:
        key = dropout_key(options[7])
        if options[11] is not None:
            counted += tl.load(options[7] + 2).to(tl.int32)
    return scale, slope, mask_ptr, key, head, batch64.to(tl.int32), counted


@triton.jit
def add_sinks(out, lse, sinks):
    """(out (M, D), lse (M,)) after the rows' sinks joined the softmax, all in natural units."""
    high = finite_max(tl.maximum(lse, sinks))
    own = tl.exp2((lse - high) * LOG2E)
    total = own + tl.exp2((sinks - high) * LOG2E)
    some = tl.where(total == 0.0, 1.0, total)
    joined = tl.where(total == 0.0, float("-inf"), high + tl.log2(some) * LN2)
    return out * (own / some)[:, None], joined  # not by joined, which is rounded
