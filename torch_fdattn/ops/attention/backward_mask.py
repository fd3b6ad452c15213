"""Backward, the gradient of an additive mask that is broadcast: one program per tile of the mask sums dS, in fixed
order, over all that the mask is broadcast to. A mask of few elements has few programs: right, not fast."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_fdattn.ops.attend import block_ptrs, load_tile
from torch_fdattn.ops.attention.backward_rows import LENGTHS, PADDING
from torch_fdattn.ops.attention.dropout_tiles import kept_tile
from torch_fdattn.ops.online_softmax import LOG2E
from torch_fdattn.ops.packed_tiles import packed_span, padded_row
from torch_fdattn.ops.score_tiles import (
    head_options,
    mask_stride,
    plain,
    probabilities,
    score_tile,
)
from torch_fdattn.ops.tiles import (
    program_coordinates,
    sequence_bounds,
    tile_offsets,
    visible,
)


@triton.jit
def _ds_tile(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, kv_lens_ptr, q_start_ptr, kv_start_ptr, q_strides, k_strides,
    v_strides, dout_strides, options, q_len, kv_capacity, window, scale, group, head_dim: tl.constexpr,
    v_dim: tl.constexpr, batch, head, first_row, start, row_offset, EVERY_ROW: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, BLOCK_CYCLIC: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """dS (M, N) of one head: queries from first_row, keys from start on; lse and delta begin at row_offset.

    EVERY_ROW: rows behind the last may be anything.
    """
    EVEN_D: tl.constexpr = head_dim == BLOCK_D
    EVEN_DV: tl.constexpr = v_dim == BLOCK_DV
    kv_len, q_start, kv_start = sequence_bounds(
        batch, kv_lens_ptr, q_start_ptr, kv_start_ptr, q_len, kv_capacity
    )
    keys = (kv_len, kv_start, window[0], window[1], window[2], window[3])
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    d_v = tl.arange(0, BLOCK_DV)
    rows = first_row + tl.arange(0, BLOCK_M)
    index = start + n
    rows_in = rows[:, None] < q_len
    keys_in = index[None, :] < kv_len
    batch64 = batch.to(tl.int64)
    head64 = head.to(tl.int64)
    kv_head64 = (head // group).to(tl.int64)
    start64 = start.to(tl.int64)
    q_ptr += batch64 * q_strides[0] + head64 * q_strides[1]
    dout_ptr += batch64 * dout_strides[0] + head64 * dout_strides[1]
    k_ptr += batch64 * k_strides[0] + kv_head64 * k_strides[1] + start64 * k_strides[2]
    v_ptr += batch64 * v_strides[0] + kv_head64 * v_strides[1] + start64 * v_strides[2]
    q_rows = (q_strides[2], q_strides[3])
    dout_rows = (dout_strides[2], dout_strides[3])
    q_ptrs = block_ptrs(q_ptr, first_row, q_rows, WIDE, BLOCK_M, BLOCK_D)
    dout_ptrs = block_ptrs(dout_ptr, first_row, dout_rows, WIDE, BLOCK_M, BLOCK_DV)
    kt_offsets = tile_offsets(n[None, :], d[:, None], (k_strides[2], k_strides[3]), WIDE)
    vt_offsets = tile_offsets(n[None, :], d_v[:, None], (v_strides[2], v_strides[3]), WIDE)
    q = load_tile(q_ptrs, rows_in, d[None, :] < head_dim, True, EVEN_D)
    kt = load_tile(k_ptr + kt_offsets, keys_in, d[:, None] < head_dim, True, EVEN_D)
    dout = load_tile(dout_ptrs, rows_in, d_v[None, :] < v_dim, True, EVEN_DV)
    vt = load_tile(v_ptr + vt_offsets, keys_in, d_v[:, None] < v_dim, True, EVEN_DV)
    products = tl.dot(q, kt, input_precision=PRECISION)
    dp = tl.dot(dout, vt, input_precision=PRECISION)
    q_pos = (q_start + rows)[:, None]
    one_head = head_options(options, scale, batch64, head64)
    scores, unit, _cap_slope = score_tile(
        products, q_pos, index[None, :], start, (first_row, q_len, q_start), keys, options, one_head,
        scale * LOG2E, BLOCK_CYCLIC, WIDE, HAS_LSE=True,
    )  # fmt: skip
    lse2 = tl.load(lse2_ptr + row_offset + rows)
    p = probabilities(scores * unit - lse2[:, None], options)
    seen = visible(q_pos, index[None, :], keys, HAS_LEFT, HAS_RIGHT, BLOCK_CYCLIC)
    if not EVERY_ROW:  # p is 0 in rows behind the last, or NaN that the last does not see
        seen = seen & rows_in
    p = tl.where(seen, p, 0.0)
    if options[7] is not None:
        kept = kept_tile(options, one_head, q_start + rows, index, start, keys, BLOCK_CYCLIC)
        dp = tl.where(kept, dp, 0.0) * options[9]
    return p * (dp - tl.load(delta_ptr + row_offset + rows)[:, None])


@triton.jit(do_not_specialize=[*LENGTHS, "batches"])
def _dmask_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dmask_ptr, kv_lens_ptr, q_start_ptr, kv_start_ptr,
    q_strides, k_strides, v_strides, dout_strides, dmask_strides, score_options,
    q_len, kv_capacity, window_left, window_right, kv_block, kv_stride, scale,
    padded_len, heads, group, head_dim: tl.constexpr, v_dim: tl.constexpr, batches, mask_sizes,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_CYCLIC: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, BY_ROW: tl.constexpr, BY_KEY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    sequences=None, cu_seqlens_q_ptr=None, cu_seqlens_k_ptr=None,
):  # fmt: skip
    """mask_sizes = (batch, heads, query tiles, key tiles) of the mask: 1 where it is broadcast; `opaque` as its strides."""
    mask_heads, mask_row_tiles, mask_key_tiles = (
        plain(mask_sizes[1]),
        plain(mask_sizes[2]),
        plain(mask_sizes[3]),
    )
    key_tile, row_tile, outer = program_coordinates(mask_key_tiles, mask_row_tiles)
    own_head, own_batch = outer % mask_heads, outer // mask_heads
    # How many of each there are to sum over.
    head_count = heads // mask_heads
    batch_count = batches // plain(mask_sizes[0])
    window = (window_left, window_right, kv_block, kv_stride)
    mask_rows, mask_columns = q_len, kv_capacity
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if cu_seqlens_q_ptr is None:
        key_tiles = tl.cdiv(kv_capacity, BLOCK_N) // mask_key_tiles
        row_tiles = tl.cdiv(q_len, BLOCK_M) // mask_row_tiles
        for step in tl.range(0, tl.maximum(batch_count * head_count * row_tiles * key_tiles, 1)):
            start = (key_tile + step % key_tiles) * BLOCK_N
            first_row = (row_tile + step // key_tiles % row_tiles) * BLOCK_M
            head = own_head + step // key_tiles // row_tiles % head_count
            batch = own_batch + step // key_tiles // row_tiles // head_count
            row_offset = (batch.to(tl.int64) * heads + head) * padded_len
            total += _ds_tile(
                q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, kv_lens_ptr, q_start_ptr, kv_start_ptr, q_strides,
                k_strides, v_strides, dout_strides, score_options, q_len, kv_capacity, window, scale, group, head_dim,
                v_dim, batch, head, first_row, start, row_offset, BY_ROW, HAS_LEFT, HAS_RIGHT, BLOCK_CYCLIC, WIDE,
                PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
            )  # fmt: skip
    else:
        if BY_ROW:
            mask_rows = plain(score_options[10])
        mask_columns = mask_stride(score_options[6], 4)
        for i in tl.range(0, batch_count):
            batch = own_batch + i
            first_token, rows = packed_span(cu_seqlens_q_ptr, batch, sequences, q_len)
            first_key, columns = packed_span(cu_seqlens_k_ptr, batch, sequences, kv_capacity)
            row_tiles = tl.cdiv(rows, BLOCK_M)
            key_tiles = tl.cdiv(columns, BLOCK_N)
            if BY_ROW:
                row_tiles = (row_tile < row_tiles).to(tl.int32)
            if BY_KEY:
                key_tiles = (key_tile < key_tiles).to(tl.int32)
            own_rows = padded_row(first_token, batch, PADDING)
            own_q = q_ptr + first_token.to(tl.int64) * q_strides[2]
            own_dout = dout_ptr + first_token.to(tl.int64) * dout_strides[2]
            own_k = k_ptr + first_key.to(tl.int64) * k_strides[2]
            own_v = v_ptr + first_key.to(tl.int64) * v_strides[2]
            for step in tl.range(0, head_count * row_tiles * key_tiles):
                start = (key_tile + step % key_tiles) * BLOCK_N
                first_row = (row_tile + step // key_tiles % row_tiles) * BLOCK_M
                head = own_head + step // key_tiles // row_tiles
                row_offset = head.to(tl.int64) * padded_len + own_rows
                total += _ds_tile(
                    own_q, own_k, own_v, own_dout, lse2_ptr, delta_ptr, kv_lens_ptr, q_start_ptr, kv_start_ptr,
                    q_strides, k_strides, v_strides, dout_strides, score_options, rows, columns, window, scale, group,
                    head_dim, v_dim, batch, head, first_row, start, row_offset, False, HAS_LEFT, HAS_RIGHT, BLOCK_CYCLIC,
                    WIDE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV,
                )  # fmt: skip

    row = (row_tile * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    key = (key_tile * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    inside = (row < mask_rows) & (key < mask_columns)
    if not BY_ROW:
        total = tl.sum(total, 0, keep_dims=True)
        row = tl.zeros([1, 1], tl.int32)
        inside = key < mask_columns
    if not BY_KEY:
        total = tl.sum(total, 1, keep_dims=True)
        inside = row < mask_rows
        key = tl.zeros([1, 1], tl.int32)
    dmask_ptr += own_batch.to(tl.int64) * plain(dmask_strides[0])
    dmask_ptr += own_head.to(tl.int64) * plain(dmask_strides[1])
    ptrs = dmask_ptr + row.to(tl.int64) * plain(dmask_strides[2])
    ptrs += key.to(tl.int64) * plain(dmask_strides[3])
    tl.store(ptrs, total.to(dmask_ptr.dtype.element_ty), mask=inside)
