"""Backward, dK and dV: one program per block of keys, over the queries of all heads of its group.

Tiles are transposed (N, M), so that P and dS enter their second matmul as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_fdattn.launch.pdl import pdl_trigger
from torch_fdattn.ops.attend import block_ptrs, load_tile
from torch_fdattn.ops.attention.backward_rows import LENGTHS, PADDING, store_rows
from torch_fdattn.ops.attention.dropout_tiles import kept_tile_transposed
from torch_fdattn.ops.online_softmax import LOG2E
from torch_fdattn.ops.packed_tiles import listed, packed_block, padded_row
from torch_fdattn.ops.score_tiles import (
    head_options,
    probabilities,
    score_tile,
)
from torch_fdattn.ops.tiles import (
    add_dot,
    block_coordinates,
    key_position,
    query_range,
    sequence_bounds,
    tile_offsets,
    visible,
)


@triton.jit
def _dkdv_tiles(
    dk, dv, k, v, first_key, index, q_ptr, dout_ptr, lse2_ptr, delta_ptr, q_strides, dout_strides, bounds,
    q_start, q_len, keys, options, scale, heads, group, batch64, first_head64, first_row, padded_len, head_dim, v_dim,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_CYCLIC: tl.constexpr, BORDERS: tl.constexpr, RAGGED: tl.constexpr,
    GROUPED: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the query tiles of a group's heads, at least one, to dk (unscaled) and dv of a key tile.

    A loop that might have no step makes ptxas serialise its wgmma (C7515): the way around it sets the accumulators.
    One loop over all heads' tiles: a loop of loops spills 500 bytes a thread more. Padded rows count from first_row.
    """
    # dP before the exponentials, so that the products of dV and dK follow each other: 8 to 14 % of this sweep at hd128; nothing
    # at hd64, and 8 % lost at hd256, whose registers are full; as fp32's are.
    EARLY_DP: tl.constexpr = BLOCK_D == 128 and k.dtype != tl.float32
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    d_v = tl.arange(0, dv.shape[1])
    EVEN_DV: tl.constexpr = v_dim == dv.shape[1]
    qt_offsets = tile_offsets(m[None, :], d[:, None], (q_strides[2], q_strides[3]), WIDE)
    dout_row_strides = (dout_strides[2], dout_strides[3])
    dout_offsets = tile_offsets(m[:, None], d_v[None, :], dout_row_strides, WIDE)
    tiles = tl.cdiv(bounds[3] - bounds[0], BLOCK_M)
    head64 = first_head64
    steps = tiles
    if GROUPED:
        steps *= group
    else:
        head = head_options(options, scale, batch64, head64)
    for step in tl.range(0, tl.maximum(steps, 1)):
        start = bounds[0] + step * BLOCK_M
        if GROUPED:
            member = step // tiles
            start -= member * tiles * BLOCK_M
            head64 = first_head64 + member
            head = head_options(options, scale, batch64, head64)
        rows = start + m
        padded_row64 = (batch64 * heads + head64) * padded_len + first_row + start
        start64 = start.to(tl.int64)
        qt_ptrs = q_ptr + head64 * q_strides[1] + start64 * q_strides[2] + qt_offsets
        qt = load_tile(qt_ptrs, rows[None, :] < q_len, d[:, None] < head_dim, RAGGED, EVEN_D)
        dout_ptrs = dout_ptr + head64 * dout_strides[1] + start64 * dout_strides[2] + dout_offsets
        lse2 = tl.load(lse2_ptr + padded_row64 + m)
        products = tl.dot(k, qt, input_precision=PRECISION)
        if EARLY_DP:
            dout = load_tile(
                dout_ptrs, rows[:, None] < q_len, d_v[None, :] < v_dim, RAGGED, EVEN_DV
            )
            dpt = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        seeing = rows
        if options[5] is not None:
            # Rows behind the last read its mask, and must not see what is hidden from it: their p is 0, NaN stays.
            seeing = tl.minimum(rows, q_len - 1)
        q_pos = (q_start + seeing)[None, :]
        scores, unit, cap_slope = score_tile(
            products, q_pos, index[:, None], first_key, (start, q_len, q_start), keys, options, head,
            scale * LOG2E, BLOCK_CYCLIC, WIDE, HAS_LSE=True,
        )  # fmt: skip
        pt = probabilities(scores * unit - lse2[None, :], options)
        if BORDERS:  # noqa: SIM102 (decided when the kernel is compiled)
            if (start < bounds[1]) | (start >= bounds[2]):
                seen = visible(q_pos, index[:, None], keys, HAS_LEFT, HAS_RIGHT, BLOCK_CYCLIC)
                pt = tl.where(seen, pt, 0.0)
        if not EARLY_DP:
            dout = load_tile(
                dout_ptrs, rows[:, None] < q_len, d_v[None, :] < v_dim, RAGGED, EVEN_DV
            )
        kept_pt = pt
        if options[7] is not None:
            kept = kept_tile_transposed(
                options, head, q_start + rows, index, first_key, keys, BLOCK_CYCLIC
            )
            kept_pt = tl.where(kept, pt, 0.0)
        dv = add_dot(dv, kept_pt.to(dout.dtype), dout, PRECISION)
        if not EARLY_DP:
            dpt = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        if options[7] is not None:
            dpt = tl.where(kept, dpt, 0.0) * options[9]
        delta = tl.load(delta_ptr + padded_row64 + m)
        dst = (pt * (dpt - delta[None, :]) * cap_slope).to(qt.dtype)
        dk = add_dot(dk, dst, tl.trans(qt), PRECISION)
    if options[7] is not None:
        dv *= options[9]
    return dk, dv


@triton.jit(do_not_specialize=LENGTHS)
def _dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dk_ptr, dv_ptr,
    kv_lens_ptr, q_start_ptr, kv_start_ptr,
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides, score_options, swizzle,
    q_len, kv_capacity, window_left, window_right, kv_block, kv_stride, scale,
    padded_len, heads, group, head_dim: tl.constexpr, v_dim: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_CYCLIC: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BORDERS: tl.constexpr, RAGGED: tl.constexpr, GROUPED: tl.constexpr, PDL: tl.constexpr,
    sequences=None, cu_seqlens_q_ptr=None, cu_seqlens_k_ptr=None, ranges_ptr=None,
):  # fmt: skip
    EVEN_D: tl.constexpr = head_dim == BLOCK_D
    first_row = 0
    pdl_trigger(PDL)
    kv_blocks = tl.cdiv(kv_capacity, BLOCK_N)
    if cu_seqlens_q_ptr is not None:
        kv_blocks = tl.num_programs(0) // (heads // group)
    block, kv_head, batch = block_coordinates(kv_blocks, heads // group, swizzle)
    if cu_seqlens_q_ptr is not None:
        # All pointers to the sequence's first token, and the batch strides are 0: below, nothing differs.
        sequence, block, first_token, kv_capacity, first_query, q_len = packed_block(
            block, cu_seqlens_k_ptr, cu_seqlens_q_ptr, sequences, kv_capacity, q_len, BLOCK_N
        )
        if block * BLOCK_N >= kv_capacity:
            return
        batch = listed(sequence, sequences)
        q_ptr += first_query.to(tl.int64) * q_strides[2]
        dout_ptr += first_query.to(tl.int64) * dout_strides[2]
        k_ptr += first_token.to(tl.int64) * k_strides[2]
        v_ptr += first_token.to(tl.int64) * v_strides[2]
        dk_ptr += first_token.to(tl.int64) * dk_strides[2]
        dv_ptr += first_token.to(tl.int64) * dv_strides[2]
        first_row = (
            padded_row(first_query, sequence, PADDING) - batch.to(tl.int64) * heads * padded_len
        )
    batch64 = batch.to(tl.int64)
    kv_head64 = kv_head.to(tl.int64)
    kv_len, q_start, kv_start = sequence_bounds(
        batch, kv_lens_ptr, q_start_ptr, kv_start_ptr, q_len, kv_capacity
    )
    keys = (kv_len, kv_start, window_left, window_right, kv_block, kv_stride)

    n = tl.arange(0, BLOCK_N)
    first_key = block * BLOCK_N
    index = first_key + n
    keys_in = index[:, None] < kv_len
    dims_in = tl.arange(0, BLOCK_D)[None, :] < head_dim
    v_dims_in = tl.arange(0, BLOCK_DV)[None, :] < v_dim
    k_ptr += batch64 * k_strides[0] + kv_head64 * k_strides[1]
    v_ptr += batch64 * v_strides[0] + kv_head64 * v_strides[1]
    k_ptrs = block_ptrs(k_ptr, first_key, (k_strides[2], k_strides[3]), WIDE, BLOCK_N, BLOCK_D)
    v_ptrs = block_ptrs(v_ptr, first_key, (v_strides[2], v_strides[3]), WIDE, BLOCK_N, BLOCK_DV)
    k = load_tile(k_ptrs, keys_in, dims_in, True, EVEN_D)
    v = load_tile(v_ptrs, keys_in, v_dims_in, True, v_dim == BLOCK_DV)

    last_key = tl.minimum(first_key + BLOCK_N, kv_len) - 1
    begin, full_begin, full_end, end = query_range(
        key_position(first_key, kv_start, kv_block, kv_stride, BLOCK_CYCLIC),
        key_position(last_key, kv_start, kv_block, kv_stride, BLOCK_CYCLIC),
        first_key + BLOCK_N <= kv_len, q_start, q_len, window_left, window_right,
        HAS_LEFT, HAS_RIGHT, BLOCK_M,
    )  # fmt: skip
    dk_ptr += batch64 * dk_strides[0] + kv_head64 * dk_strides[1]
    dv_ptr += batch64 * dv_strides[0] + kv_head64 * dv_strides[1]
    if ranges_ptr is not None:  # no key of it that the mask shows
        ranges_ptr += batch * 3
        if (first_key + BLOCK_N <= tl.load(ranges_ptr)) | (first_key >= tl.load(ranges_ptr + 1)):
            end = begin
    if (first_key >= kv_len) | (begin >= end):  # no valid key, or no query that sees one
        no_dk, no_dv = (
            tl.zeros([BLOCK_N, BLOCK_D], tl.float32),
            tl.zeros([BLOCK_N, BLOCK_DV], tl.float32),
        )
        store_rows(dk_ptr, dk_strides, first_key, kv_capacity, head_dim, no_dk, WIDE)
        store_rows(dv_ptr, dv_strides, first_key, kv_capacity, v_dim, no_dv, WIDE)
        return
    bounds = (begin, tl.maximum(begin, full_begin), tl.maximum(begin, full_end), end)

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    dk, dv = _dkdv_tiles(
        dk, dv, k, v, first_key, index, q_ptr + batch64 * q_strides[0], dout_ptr + batch64 * dout_strides[0],
        lse2_ptr, delta_ptr, q_strides, dout_strides, bounds, q_start, q_len, keys, score_options, scale, heads, group,
        batch64, kv_head64 * group, first_row, padded_len, head_dim, v_dim,
        HAS_LEFT, HAS_RIGHT, BLOCK_CYCLIC, BORDERS, RAGGED, GROUPED, WIDE, BLOCK_M, BLOCK_D, EVEN_D, PRECISION,
    )  # fmt: skip

    store_rows(dk_ptr, dk_strides, first_key, kv_capacity, head_dim, dk * scale, WIDE)
    store_rows(dv_ptr, dv_strides, first_key, kv_capacity, v_dim, dv, WIDE)
