"""Attention backward in portable Triton: streaming from the saved lse, deterministic by construction.

Three launches (FlashAttention-2, arXiv:2307.08691, algorithm 2, split in two sweeps):
- per row: delta = rowsum(dO ∘ O) - dlse, and the lse in log2 units, both padded to whole tiles;
- one program per block of keys: dK and dV, over the queries of all heads of its group, in fixed order;
- one program per block of queries: dQ, over the keys, and each row's part of the slopes' gradient;
- an additive mask's gradient is dS: written by the last sweep where the mask is broadcast to nothing; else one
  program per tile of the mask sums it, in fixed order, over all that the mask is broadcast to. A mask of few
  elements has few programs: right, not fast.
Seven matmuls instead of the five of a single sweep, but no atomics: the same bits on every run. One sweep with
dQ added up in fp32 was written and measured: no faster on the whole (README.md).

Shapes: q, dq (B, H, M, D); out, dout (B, H, M, DV); k, dk (B, H_kv, N, D); v, dv (B, H_kv, N, DV); lse, dlse
(B, H, M). Tiles of the dK/dV sweep are transposed (N, M), so that P and dS enter their second matmul as
they are. Packed sequences: the same programs on blocks that they look up, as in `forward.py`.
"""

from __future__ import annotations

from functools import partial
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.ops.attend import block_ptrs, load_tile
from torch_fdattn.ops.attention import tuning
from torch_fdattn.ops.attention.configs import (
    WHOLE_TILES,
    BackwardConfig,
    backward_config,
    device_capability,
    dot_precision,
    mask_gradient_config,
)
from torch_fdattn.ops.attention.dropout import NO_DROPOUT, Dropout
from torch_fdattn.ops.attention.dropout_tiles import kept_tile, kept_tile_transposed
from torch_fdattn.ops.launch import (
    broadcast_mask,
    contiguous_mask,
    kernel_options,
    mask_flags,
    mask_numbers,
    on_device,
    tile_dims,
    wide_rows,
)
from torch_fdattn.ops.library import launches
from torch_fdattn.ops.online_softmax import LN2, LOG2E
from torch_fdattn.ops.packed import Packed, kernel_arguments
from torch_fdattn.ops.packed_tiles import listed, packed_block, packed_span, padded_row
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.score_tiles import (
    head_options,
    key_distance,
    probabilities,
    score_tile,
)
from torch_fdattn.ops.scores import NO_SCORES, Scores, sink_gradient
from torch_fdattn.ops.tiles import (
    key_position,
    key_range,
    program_coordinates,
    query_range,
    sequence_bounds,
    tile_offsets,
    visible,
)

#: Rows of lse and delta are padded to multiples of it; every tile side divides it.
PADDING = tl.constexpr(128)
_LENGTHS = [
    "padded_len",
    "q_len",
    "kv_capacity",
    "window_left",
    "window_right",
    "kv_block",
    "kv_stride",
    "sequences",
]


@triton.jit(do_not_specialize=["q_len", "padded_len", "sequences"])
def _row_terms_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, lse2_ptr, delta_ptr, out_strides, dout_strides,
    q_len, padded_len, heads, v_dim: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
    sequences=None, cu_seqlens_q_ptr=None, cu_seqlens_k_ptr=None,
):  # fmt: skip
    PACKED: tl.constexpr = cu_seqlens_q_ptr is not None
    block, head, batch = program_coordinates(padded_len // BLOCK_M, heads)
    batch64 = batch.to(tl.int64)
    first = block * BLOCK_M
    if PACKED:
        # Rows of blocks that no sequence fills are written, too: whoever sums over all rows adds zeros.
        tokens, place = q_len, first
        _, whole, first_token, q_len, _, _ = packed_block(
            place // PADDING, cu_seqlens_q_ptr, None, sequences, tokens, 0, PADDING
        )
        first = whole * PADDING + place % PADDING
        out_ptr += first_token.to(tl.int64) * out_strides[2]
        dout_ptr += first_token.to(tl.int64) * dout_strides[2]
    rows = first + tl.arange(0, BLOCK_M)
    rows_in = rows < q_len
    inside = rows_in[:, None] & (tl.arange(0, BLOCK_DV)[None, :] < v_dim)
    out_ptr += batch64 * out_strides[0] + head.to(tl.int64) * out_strides[1]
    dout_ptr += batch64 * dout_strides[0] + head.to(tl.int64) * dout_strides[1]
    out_ptrs = block_ptrs(out_ptr, first, (out_strides[2], out_strides[3]), True, BLOCK_M, BLOCK_DV)
    dout_ptrs = block_ptrs(
        dout_ptr, first, (dout_strides[2], dout_strides[3]), True, BLOCK_M, BLOCK_DV
    )
    out = tl.load(out_ptrs, mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptrs, mask=inside, other=0.0).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    row_offset = (batch64 * heads + head) * q_len
    if PACKED:
        row_offset = head.to(tl.int64) * tokens + first_token
    lse = tl.load(lse_ptr + row_offset + rows, mask=rows_in, other=float("-inf"))
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + row_offset + rows, mask=rows_in, other=0.0)
    # Rows outside and rows that saw no key get lse = +inf, so that their probabilities are zero and
    # the sweeps need no mask for them; a loss's gradient at lse = -inf may be NaN, and 0 · NaN is NaN.
    unseen = lse == float("-inf")
    delta = tl.where(unseen, 0.0, delta)
    lse = tl.where(unseen, float("inf"), lse)
    padded_offset = (batch64 * heads + head) * padded_len
    if PACKED:
        padded_offset += place - first
    tl.store(lse2_ptr + padded_offset + rows, lse * LOG2E)
    tl.store(delta_ptr + padded_offset + rows, delta)


@triton.jit
def _dkdv_tiles(
    dk, dv, k, v, first_key, index, q_ptr, dout_ptr, lse2_ptr, delta_ptr, q_strides, dout_strides, bounds,
    q_start, q_len, keys, options, scale, heads, group, batch64, first_head64, first_row, padded_len, head_dim, v_dim,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, STRIPED: tl.constexpr, BORDERS: tl.constexpr, RAGGED: tl.constexpr,
    GROUPED: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the query tiles of a group's heads, at least one, to dk (unscaled) and dv of a key tile.

    A loop that might have no step makes ptxas serialise its wgmma (C7515): the way around it sets the accumulators.
    One loop over all heads' tiles: a loop of loops spills 500 bytes a thread more. Padded rows count from first_row.
    """
    # dP before the exponentials, so that dV and dK stand side by side: 8 to 14 % of this sweep at hd128; nothing
    # at hd64, and 8 % lost at hd256, whose registers are full.
    EARLY_DP: tl.constexpr = BLOCK_D == 128
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    d_v = tl.arange(0, dv.shape[1])
    EVEN_DV: tl.constexpr = v_dim == dv.shape[1]
    qt_offsets = tile_offsets(m[None, :], d[:, None], (q_strides[2], q_strides[3]), WIDE)
    dout_row_strides = (dout_strides[2], dout_strides[3])
    dout_offsets = tile_offsets(m[:, None], d_v[None, :], dout_row_strides, WIDE)
    tiles = tl.cdiv(bounds[3] - bounds[0], BLOCK_M)
    head64 = first_head64
    if not GROUPED:
        head = head_options(options, scale, batch64, head64)
    for step in tl.range(0, tl.maximum(group * tiles, 1)):
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
            scale * LOG2E, STRIPED, WIDE, LSE_KNOWN=True,
        )  # fmt: skip
        pt = probabilities(scores * unit - lse2[None, :], options)
        if BORDERS:  # noqa: SIM102 (decided when the kernel is compiled)
            if (start < bounds[1]) | (start >= bounds[2]):
                seen = visible(q_pos, index[:, None], keys, HAS_LEFT, HAS_RIGHT, STRIPED)
                pt = tl.where(seen, pt, 0.0)
        if not EARLY_DP:
            dout = load_tile(
                dout_ptrs, rows[:, None] < q_len, d_v[None, :] < v_dim, RAGGED, EVEN_DV
            )
        kept_pt = pt
        if options[7] is not None:
            kept = kept_tile_transposed(
                options, head, q_start + rows, index, first_key, keys, STRIPED
            )
            kept_pt = tl.where(kept, pt, 0.0)
        dv = tl.dot(kept_pt.to(dout.dtype), dout, dv, input_precision=PRECISION)
        if not EARLY_DP:
            dpt = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        if options[7] is not None:
            dpt = tl.where(kept, dpt, 0.0) * options[9]
        delta = tl.load(delta_ptr + padded_row64 + m)
        dst = (pt * (dpt - delta[None, :]) * cap_slope).to(qt.dtype)
        dk = tl.dot(dst, tl.trans(qt), dk, input_precision=PRECISION)
    if options[7] is not None:
        dv *= options[9]
    return dk, dv


@triton.jit(do_not_specialize=_LENGTHS)
def _dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dk_ptr, dv_ptr,
    kv_lens_ptr, q_start_ptr, kv_start_ptr,
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides, score_options,
    q_len, kv_capacity, window_left, window_right, kv_block, kv_stride, scale,
    padded_len, heads, group, head_dim: tl.constexpr, v_dim: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, STRIPED: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BORDERS: tl.constexpr, RAGGED: tl.constexpr, GROUPED: tl.constexpr,
    sequences=None, cu_seqlens_q_ptr=None, cu_seqlens_k_ptr=None,
):  # fmt: skip
    EVEN_D: tl.constexpr = head_dim == BLOCK_D
    first_row = 0
    kv_blocks = tl.cdiv(kv_capacity, BLOCK_N)
    if cu_seqlens_q_ptr is not None:
        kv_blocks = tl.num_programs(0) // (heads // group)
    block, kv_head, batch = program_coordinates(kv_blocks, heads // group)
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
        key_position(first_key, kv_start, kv_block, kv_stride, STRIPED),
        key_position(last_key, kv_start, kv_block, kv_stride, STRIPED),
        first_key + BLOCK_N <= kv_len, q_start, q_len, window_left, window_right,
        HAS_LEFT, HAS_RIGHT, BLOCK_M,
    )  # fmt: skip
    dk_ptr += batch64 * dk_strides[0] + kv_head64 * dk_strides[1]
    dv_ptr += batch64 * dv_strides[0] + kv_head64 * dv_strides[1]
    if (first_key >= kv_len) | (begin >= end):  # no valid key, or no query that sees one
        _store_rows(
            dk_ptr,
            dk_strides,
            first_key,
            kv_capacity,
            head_dim,
            tl.zeros([BLOCK_N, BLOCK_D], tl.float32),
            WIDE,
        )
        _store_rows(
            dv_ptr,
            dv_strides,
            first_key,
            kv_capacity,
            v_dim,
            tl.zeros([BLOCK_N, BLOCK_DV], tl.float32),
            WIDE,
        )
        return
    bounds = (begin, tl.maximum(begin, full_begin), tl.maximum(begin, full_end), end)

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    dk, dv = _dkdv_tiles(
        dk, dv, k, v, first_key, index, q_ptr + batch64 * q_strides[0], dout_ptr + batch64 * dout_strides[0],
        lse2_ptr, delta_ptr, q_strides, dout_strides, bounds, q_start, q_len, keys, score_options, scale, heads, group,
        batch64, kv_head64 * group, first_row, padded_len, head_dim, v_dim,
        HAS_LEFT, HAS_RIGHT, STRIPED, BORDERS, RAGGED, GROUPED, WIDE, BLOCK_M, BLOCK_D, EVEN_D, PRECISION,
    )  # fmt: skip

    _store_rows(dk_ptr, dk_strides, first_key, kv_capacity, head_dim, dk * scale, WIDE)
    _store_rows(dv_ptr, dv_strides, first_key, kv_capacity, v_dim, dv, WIDE)


@triton.jit
def _store_rows(ptr, strides, first, length, dim, tile, WIDE: tl.constexpr):
    """A tile's rows from `first` on, of a head's `length` at ptr."""
    ROWS: tl.constexpr = tile.shape[0]
    COLUMNS: tl.constexpr = tile.shape[1]
    ptrs = block_ptrs(ptr, first, (strides[2], strides[3]), WIDE, ROWS, COLUMNS)
    inside = (first + tl.arange(0, ROWS) < length)[:, None] & (tl.arange(0, COLUMNS) < dim)[None, :]
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dq_tiles(
    dq, dslopes, q, dout, lse2, delta, q_pos, k_ptr, v_ptr, k_strides, v_strides, dmask, bounds, queries, keys, options,
    head, scale_log2, head_dim, v_dim, SLOPES: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, STRIPED: tl.constexpr,
    BORDERS: tl.constexpr, RAGGED: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the key tiles, at least one (as in `_dkdv_tiles`), to dq (unscaled) of one query tile, and to dslopes (M,).

    dmask: (pointer to the tile's rows, strides) where the mask's gradient is dS itself, else None.
    """
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    kt_offsets = tile_offsets(n[None, :], d[:, None], k_strides, WIDE)
    d_v = tl.arange(0, dout.shape[1])
    EVEN_DV: tl.constexpr = v_dim == dout.shape[1]
    vt_offsets = tile_offsets(n[None, :], d_v[:, None], v_strides, WIDE)
    for step in tl.range(0, tl.maximum(bounds[3] - bounds[0], 1), BLOCK_N):
        start = bounds[0] + step
        index = start + n
        kt_ptrs = k_ptr + start.to(tl.int64) * k_strides[0] + kt_offsets
        vt_ptrs = v_ptr + start.to(tl.int64) * v_strides[0] + vt_offsets
        kt = load_tile(kt_ptrs, index[None, :] < keys[0], d[:, None] < head_dim, RAGGED, EVEN_D)
        vt = load_tile(vt_ptrs, index[None, :] < keys[0], d_v[:, None] < v_dim, RAGGED, EVEN_DV)
        products = tl.dot(q, kt, input_precision=PRECISION)
        dp = tl.dot(dout, vt, input_precision=PRECISION)
        scores, unit, cap_slope = score_tile(
            products, q_pos[:, None], index[None, :], start, queries, keys, options, head, scale_log2, STRIPED, WIDE,
            LSE_KNOWN=True,
        )  # fmt: skip
        p = probabilities(scores * unit - lse2[:, None], options)
        if BORDERS:  # noqa: SIM102 (decided when the kernel is compiled)
            if (start < bounds[1]) | (start >= bounds[2]):
                seen = visible(q_pos[:, None], index[None, :], keys, HAS_LEFT, HAS_RIGHT, STRIPED)
                p = tl.where(seen, p, 0.0)
        if options[7] is not None:
            kept = kept_tile(options, head, q_pos, index, start, keys, STRIPED)
            dp = tl.where(kept, dp, 0.0) * options[9]
        ds = p * (dp - delta[:, None])
        if SLOPES:
            # The select keeps the product from becoming part of an FMA with another thread's: threads that hold the
            # same row would round differently, and which of them writes last is chance.
            distance = tl.abs(key_distance(q_pos[:, None], index[None, :], keys, STRIPED))
            dslopes -= tl.sum(tl.where(distance > 0, ds * distance.to(tl.float32), 0.0), 1)
        if dmask is not None:
            _store_mask_tile(dmask, start, ds, queries[0], queries[1], WIDE)
        ds = (ds * cap_slope).to(kt.dtype)
        dq = tl.dot(ds, tl.trans(kt), dq, input_precision=PRECISION)
    return dq, dslopes


@triton.jit(do_not_specialize=_LENGTHS)
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dq_ptr, dslopes_ptr, dmask_ptr,
    kv_lens_ptr, q_start_ptr, kv_start_ptr,
    q_strides, k_strides, v_strides, dout_strides, dq_strides, dmask_strides, score_options,
    q_len, kv_capacity, window_left, window_right, kv_block, kv_stride, scale,
    padded_len, heads, group, head_dim: tl.constexpr, v_dim: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, STRIPED: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BORDERS: tl.constexpr, RAGGED: tl.constexpr,
    sequences=None, cu_seqlens_q_ptr=None, cu_seqlens_k_ptr=None,
):  # fmt: skip
    EVEN_D: tl.constexpr = head_dim == BLOCK_D
    row_blocks = tl.cdiv(q_len, BLOCK_M)
    if cu_seqlens_q_ptr is not None:
        row_blocks = tl.num_programs(0) // heads
    block, head, batch = program_coordinates(row_blocks, heads)
    if HAS_RIGHT:
        block = row_blocks - 1 - block
    if cu_seqlens_q_ptr is not None:  # as in _dkdv_kernel
        sequence, block, first_token, q_len, first_key, kv_capacity = packed_block(
            block, cu_seqlens_q_ptr, cu_seqlens_k_ptr, sequences, q_len, kv_capacity, BLOCK_M
        )
        if block * BLOCK_M >= q_len:
            return
        batch = listed(sequence, sequences)
        q_ptr += first_token.to(tl.int64) * q_strides[2]
        dout_ptr += first_token.to(tl.int64) * dout_strides[2]
        dq_ptr += first_token.to(tl.int64) * dq_strides[2]
        k_ptr += first_key.to(tl.int64) * k_strides[2]
        v_ptr += first_key.to(tl.int64) * v_strides[2]
        own_row = (
            padded_row(first_token, sequence, PADDING) - batch.to(tl.int64) * heads * padded_len
        )
        lse2_ptr += own_row
        delta_ptr += own_row
        if dslopes_ptr is not None:
            dslopes_ptr += own_row
    batch64 = batch.to(tl.int64)
    head64 = head.to(tl.int64)
    kv_head64 = (head // group).to(tl.int64)
    kv_len, q_start, kv_start = sequence_bounds(
        batch, kv_lens_ptr, q_start_ptr, kv_start_ptr, q_len, kv_capacity
    )
    keys = (kv_len, kv_start, window_left, window_right, kv_block, kv_stride)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    first_row = block * BLOCK_M
    rows = first_row + m
    rows_in = rows[:, None] < q_len
    dims_in = d[None, :] < head_dim
    q_ptr += batch64 * q_strides[0] + head64 * q_strides[1]
    dout_ptr += batch64 * dout_strides[0] + head64 * dout_strides[1]
    dout_strides = (dout_strides[2], dout_strides[3])
    q_ptrs = block_ptrs(q_ptr, first_row, (q_strides[2], q_strides[3]), WIDE, BLOCK_M, BLOCK_D)
    dout_ptrs = block_ptrs(dout_ptr, first_row, dout_strides, WIDE, BLOCK_M, BLOCK_DV)
    q = load_tile(q_ptrs, rows_in, dims_in, True, EVEN_D)
    v_dims_in = tl.arange(0, BLOCK_DV)[None, :] < v_dim
    dout = load_tile(dout_ptrs, rows_in, v_dims_in, True, v_dim == BLOCK_DV)
    row_offset = (batch64 * heads + head) * padded_len
    lse2 = tl.load(lse2_ptr + row_offset + rows)
    delta = tl.load(delta_ptr + row_offset + rows)

    last = q_start + tl.minimum(first_row + BLOCK_M, q_len) - 1
    bounds = key_range(q_start + first_row, last, keys, HAS_LEFT, HAS_RIGHT, STRIPED, BLOCK_N)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dslopes = tl.zeros([BLOCK_M], tl.float32)
    dq_ptr += batch64 * dq_strides[0] + head64 * dq_strides[1]
    dmask = None
    if dmask_ptr is not None:
        dmask_ptr += batch64 * dmask_strides[0] + head64 * dmask_strides[1]
        dmask_ptr += first_row.to(tl.int64) * dmask_strides[2]
        dmask = (dmask_ptr, dmask_strides[2], dmask_strides[3], score_options[6][4])
        hidden = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, bounds[0], BLOCK_N):
            _store_mask_tile(dmask, start, hidden, first_row, q_len, WIDE)
        for start in tl.range(tl.cdiv(bounds[3], BLOCK_N) * BLOCK_N, kv_capacity, BLOCK_N):
            _store_mask_tile(dmask, start, hidden, first_row, q_len, WIDE)
    if bounds[0] >= bounds[3]:  # no key is seen
        _store_rows(dq_ptr, dq_strides, first_row, q_len, head_dim, dq, WIDE)
        if dslopes_ptr is not None:
            tl.store(dslopes_ptr + row_offset + rows, dslopes, mask=rows < q_len)
        return
    dq, dslopes = _dq_tiles(
        dq, dslopes, q, dout, lse2, delta, q_start + rows,
        k_ptr + batch64 * k_strides[0] + kv_head64 * k_strides[1],
        v_ptr + batch64 * v_strides[0] + kv_head64 * v_strides[1],
        (k_strides[2], k_strides[3]), (v_strides[2], v_strides[3]), dmask,
        bounds, (first_row, q_len, q_start), keys, score_options,
        head_options(score_options, scale, batch64, head64), scale * LOG2E, head_dim, v_dim, dslopes_ptr is not None,
        HAS_LEFT, HAS_RIGHT, STRIPED, BORDERS, RAGGED, WIDE, BLOCK_N, BLOCK_D, EVEN_D, PRECISION,
    )  # fmt: skip

    _store_rows(dq_ptr, dq_strides, first_row, q_len, head_dim, dq * scale, WIDE)
    if dslopes_ptr is not None:
        tl.store(dslopes_ptr + row_offset + rows, dslopes, mask=rows < q_len)


@triton.jit
def _store_mask_tile(dmask, start, tile, first_row, q_len, WIDE: tl.constexpr):
    """A tile of the mask's gradient: dmask = (pointer to the rows from first_row on, their strides, key columns)."""
    row = tl.arange(0, tile.shape[0])[:, None]
    start = start // 16 * 16  # as it is: tiles begin at multiples of their size
    column = tl.arange(0, tile.shape[1])[None, :]
    inside = (first_row + row < q_len) & (start + column < dmask[3])
    ptrs = (
        dmask[0]
        + start.to(tl.int64) * dmask[2]
        + tile_offsets(row, column, (dmask[1], dmask[2]), WIDE)
    )
    tl.store(ptrs, tile.to(dmask[0].dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["sequences", "tokens", "padded_len"])
def _sum_by_sequence_kernel(
    rows_ptr, sums_ptr, cu_seqlens_ptr, sequences, tokens, padded_len, heads, BLOCK: tl.constexpr
):  # fmt: skip
    """sums (B, H) of each sequence's rows in (H, padded_len), in one order."""
    head, sequence, _ = program_coordinates(heads, sequences)
    first_token, length = packed_span(cu_seqlens_ptr, sequence, sequences, tokens)
    rows_ptr += head.to(tl.int64) * padded_len + padded_row(first_token, sequence, PADDING)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, length, BLOCK):
        row = start + tl.arange(0, BLOCK)
        total += tl.load(rows_ptr + row, mask=row < length, other=0.0)
    tl.store(sums_ptr + sequence.to(tl.int64) * heads + head, tl.sum(total, 0))


@triton.jit(do_not_specialize=_LENGTHS)
def _dmask_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dmask_ptr, kv_lens_ptr, q_start_ptr, kv_start_ptr,
    q_strides, k_strides, v_strides, dout_strides, dmask_strides, score_options,
    q_len, kv_capacity, window_left, window_right, kv_block, kv_stride, scale,
    padded_len, heads, group, head_dim: tl.constexpr, v_dim: tl.constexpr, batches, mask_sizes,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, STRIPED: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, BY_ROW: tl.constexpr, BY_KEY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """mask_sizes = (batch, heads, query tiles, key tiles) of the mask: 1 where it is broadcast."""
    EVEN_D: tl.constexpr = head_dim == BLOCK_D
    EVEN_DV: tl.constexpr = v_dim == BLOCK_DV
    key_tile, row_tile, outer = program_coordinates(mask_sizes[3], mask_sizes[2])
    own_head, own_batch = outer % mask_sizes[1], outer // mask_sizes[1]
    # How many of each there are to sum over.
    key_tiles = tl.cdiv(kv_capacity, BLOCK_N) // mask_sizes[3]
    row_tiles = tl.cdiv(q_len, BLOCK_M) // mask_sizes[2]
    head_count = heads // mask_sizes[1]
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    d_v = tl.arange(0, BLOCK_DV)
    dims_in = d[None, :] < head_dim
    v_dims_in = d_v[None, :] < v_dim
    kt_offsets = tile_offsets(n[None, :], d[:, None], (k_strides[2], k_strides[3]), WIDE)
    vt_offsets = tile_offsets(n[None, :], d_v[:, None], (v_strides[2], v_strides[3]), WIDE)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    count = batches // mask_sizes[0] * head_count * row_tiles * key_tiles
    for step in tl.range(0, tl.maximum(count, 1)):
        start = (key_tile + step % key_tiles) * BLOCK_N
        first_row = (row_tile + step // key_tiles % row_tiles) * BLOCK_M
        head = own_head + step // key_tiles // row_tiles % head_count
        batch = own_batch + step // key_tiles // row_tiles // head_count
        kv_len, q_start, kv_start = sequence_bounds(
            batch, kv_lens_ptr, q_start_ptr, kv_start_ptr, q_len, kv_capacity
        )
        keys = (kv_len, kv_start, window_left, window_right, kv_block, kv_stride)
        batch64 = batch.to(tl.int64)
        head64 = head.to(tl.int64)
        kv_head64 = (head // group).to(tl.int64)
        rows = first_row + m
        index = start + n
        rows_in = rows[:, None] < q_len
        keys_in = index[None, :] < kv_len
        q_head = q_ptr + batch64 * q_strides[0] + head64 * q_strides[1]
        dout_head = dout_ptr + batch64 * dout_strides[0] + head64 * dout_strides[1]
        q_rows = (q_strides[2], q_strides[3])
        dout_rows = (dout_strides[2], dout_strides[3])
        q_ptrs = block_ptrs(q_head, first_row, q_rows, WIDE, BLOCK_M, BLOCK_D)
        dout_ptrs = block_ptrs(dout_head, first_row, dout_rows, WIDE, BLOCK_M, BLOCK_DV)
        start64 = start.to(tl.int64)
        k_base = batch64 * k_strides[0] + kv_head64 * k_strides[1] + start64 * k_strides[2]
        v_base = batch64 * v_strides[0] + kv_head64 * v_strides[1] + start64 * v_strides[2]
        q = load_tile(q_ptrs, rows_in, dims_in, True, EVEN_D)
        kt = load_tile(k_ptr + k_base + kt_offsets, keys_in, d[:, None] < head_dim, True, EVEN_D)
        dout = load_tile(dout_ptrs, rows_in, v_dims_in, True, EVEN_DV)
        vt = load_tile(v_ptr + v_base + vt_offsets, keys_in, d_v[:, None] < v_dim, True, EVEN_DV)
        products = tl.dot(q, kt, input_precision=PRECISION)
        dp = tl.dot(dout, vt, input_precision=PRECISION)
        q_pos = (q_start + rows)[:, None]
        one_head = head_options(score_options, scale, batch64, head64)
        scores, unit, _cap_slope = score_tile(
            products, q_pos, index[None, :], start, (first_row, q_len, q_start), keys, score_options, one_head,
            scale * LOG2E, STRIPED, WIDE, LSE_KNOWN=True,
        )  # fmt: skip
        row_offset = (batch64 * heads + head) * padded_len
        lse2 = tl.load(lse2_ptr + row_offset + rows)
        p = probabilities(scores * unit - lse2[:, None], score_options)
        seen = visible(q_pos, index[None, :], keys, HAS_LEFT, HAS_RIGHT, STRIPED)
        if (
            not BY_ROW
        ):  # rows behind the last are summed too: p is 0 there, or NaN that the last does not see
            seen = seen & rows_in
        p = tl.where(seen, p, 0.0)
        if score_options[7] is not None:
            kept = kept_tile(score_options, one_head, q_start + rows, index, start, keys, STRIPED)
            dp = tl.where(kept, dp, 0.0) * score_options[9]
        total += p * (dp - tl.load(delta_ptr + row_offset + rows)[:, None])

    row = (row_tile * BLOCK_M + m)[:, None]
    key = (key_tile * BLOCK_N + n)[None, :]
    inside = (row < q_len) & (key < kv_capacity)
    if not BY_ROW:
        total = tl.sum(total, 0, keep_dims=True)
        row = tl.zeros([1, 1], tl.int32)
        inside = key < kv_capacity
    if not BY_KEY:
        total = tl.sum(total, 1, keep_dims=True)
        inside = row < q_len
        key = tl.zeros([1, 1], tl.int32)
    dmask_ptr += (
        own_batch.to(tl.int64) * dmask_strides[0] + own_head.to(tl.int64) * dmask_strides[1]
    )
    ptrs = dmask_ptr + row.to(tl.int64) * dmask_strides[2] + key.to(tl.int64) * dmask_strides[3]
    tl.store(ptrs, total.to(dmask_ptr.dtype.element_ty), mask=inside)


def launch_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    mask: Mask, scale: float, dq: Tensor, dk: Tensor, dv: Tensor, scores: Scores = NO_SCORES,
    wanted: Scores = NO_SCORES, dropout: Dropout = NO_DROPOUT, config: BackwardConfig | None = None,
    packed: Packed | None = None,
) -> None:  # fmt: skip
    """Writes the gradients into dq (like q), dk and dv (like k and v); lse and dlse fp32, contiguous.

    `wanted` holds the tensors for the gradients of `scores`, None where none is wanted. Of packed sequences all are
    by `packed.by_heads`, and lse and dlse (H, T).
    """
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_capacity = k.shape[1:3]
    v_dim = v.shape[3]
    if config is None:
        config = backward_config(
            max(head_dim, v_dim), q.dtype, device_capability(q.device), scores, dropout
        )
        if tuning.state.active:
            call = tuning.Call(q, k, v, mask, scores, dropout, packed)
            again = partial(
                launch_backward, dout, dlse, q, k, v, out, lse, mask, scale, dq, dk, dv, scores, wanted, dropout,
                packed=packed,
            )  # fmt: skip
            config = tuning.chosen("backward", config, call, (dq, dk, dv), again)
    mask = contiguous_mask(mask)
    op, row_blocks = "attention_backward", partial(triton.cdiv, q_len)
    kv_blocks = partial(triton.cdiv, kv_capacity)
    if packed is not None:
        op, row_blocks = "varlen_attention_backward", partial(packed.blocks, q_len)
        kv_blocks = partial(packed.blocks, kv_capacity)
    launches[f"{op}/triton"] += 1
    padded_len = row_blocks(PADDING.value) * PADDING.value
    lse2 = torch.empty((batch, heads, padded_len), dtype=torch.float32, device=q.device)
    delta = torch.empty_like(lse2)
    slope_rows = None if wanted.alibi_slopes is None else torch.empty_like(lse2)
    sizes = (
        q_len,
        kv_capacity,
        *mask_numbers(mask),
        scale,
        padded_len,
        heads,
        heads // kv_heads,
        head_dim,
        v_dim,
    )
    switches = {**mask_flags(mask), "PRECISION": dot_precision(q.dtype)}
    block_d, block_dv = tile_dims(head_dim, v_dim)
    switches |= {"BLOCK_D": block_d, "BLOCK_DV": block_dv}
    ragged_q = packed is not None or q_len % WHOLE_TILES != 0
    ragged_kv = packed is not None or mask.kv_lens is not None or kv_capacity % WHOLE_TILES != 0
    borders = not mask.hides_nothing or ragged_q or ragged_kv
    switches["WIDE"] = wide_rows(q, k, v, dout, dq, dk, dv, *broadcast_mask(scores, q, k))
    options = kernel_options(scores, q, k, dropout, packed)
    found_in = kernel_arguments(packed, k)
    with on_device(q):
        if q.numel():
            block_m = 64 if v_dim <= 256 else 16
            _row_terms_kernel[(padded_len // block_m * heads * batch,)](
                out, dout, lse, dlse, lse2, delta, out.stride(), dout.stride(), q_len, padded_len,
                heads, v_dim, BLOCK_M=block_m, BLOCK_DV=block_dv, **found_in,
            )  # fmt: skip
        if k.numel():
            tile = config.dkdv
            _dkdv_kernel[(kv_blocks(tile.block_n) * kv_heads * batch,)](
                q, k, v, dout, lse2, delta, dk, dv, *mask[:3],
                q.stride(), k.stride(), v.stride(), dout.stride(), dk.stride(), dv.stride(), options,
                *sizes, **switches, BORDERS=borders, RAGGED=ragged_q, GROUPED=heads != kv_heads,
                BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
                num_warps=tile.num_warps, num_stages=tile.num_stages, **found_in,
            )  # fmt: skip
        dmask = wanted.attn_mask
        in_dq = None  # where the sweep itself writes it
        if dmask is not None and dmask.numel() == q.shape[:3].numel() * kv_capacity:
            in_dq = dmask.view(*q.shape[:3], kv_capacity)
        if q.numel():
            tile = config.dq
            _dq_kernel[(row_blocks(tile.block_m) * heads * batch,)](
                q, k, v, dout, lse2, delta, dq, slope_rows, in_dq, *mask[:3],
                q.stride(), k.stride(), v.stride(), dout.stride(), dq.stride(),
                None if in_dq is None else in_dq.stride(), options,
                *sizes, **switches, BORDERS=borders, RAGGED=ragged_kv, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
                num_warps=tile.num_warps, num_stages=tile.num_stages, **found_in,
            )  # fmt: skip
        if dmask is not None and in_dq is None:
            dmask.zero_()
            tile = mask_gradient_config(max(head_dim, v_dim), q.dtype, device_capability(q.device))
            tile = tuning.forced("dmask", tile)
            sizes_of = (1,) * (4 - dmask.dim()) + tuple(dmask.shape)
            by_row, by_key = (x > 1 for x in sizes_of[2:])
            mask_sizes = (
                *sizes_of[:2], triton.cdiv(sizes_of[2], tile.block_m), triton.cdiv(sizes_of[3], tile.block_n)
            )  # fmt: skip
            if q.numel() and k.numel():
                _dmask_kernel[(prod(mask_sizes),)](
                    q, k, v, dout, lse2, delta, dmask, *mask[:3],
                    q.stride(), k.stride(), v.stride(), dout.stride(),
                    dmask.expand(*q.shape[:3], kv_capacity).stride(), options,
                    *sizes, batch, mask_sizes, **switches, BY_ROW=by_row, BY_KEY=by_key,
                    BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
                    num_warps=tile.num_warps, num_stages=tile.num_stages,
                )  # fmt: skip
    if wanted.alibi_slopes is not None:
        over = (0, 2) if wanted.alibi_slopes.dim() == 1 else 2
        rows = slope_rows[:, :, :q_len]
        if packed is not None:
            rows = _sum_by_sequence(slope_rows, packed, q_len)
        wanted.alibi_slopes.copy_(rows.sum(over))
    if wanted.sinks is not None:
        if packed is not None:  # in padded rows, as delta is; those of no sequence are +inf
            lse, q_len = lse2 * LN2.value, padded_len
        wanted.sinks.copy_(sink_gradient(scores.sinks, lse, delta[:, :, :q_len]))


def _sum_by_sequence(rows: Tensor, packed: Packed, tokens: int) -> Tensor:
    """(B, H, 1) from rows (1, H, padded_len)."""
    heads, padded_len = rows.shape[1:]
    sums = rows.new_empty(packed.sequences, heads, 1)
    with on_device(rows):
        _sum_by_sequence_kernel[(packed.sequences * heads,)](
            rows, sums, packed.cu_seqlens_q.contiguous(), packed.sequences, tokens, padded_len, heads,
            BLOCK=PADDING.value,
        )  # fmt: skip
    return sums
