"""Backward, dQ: one program per block of queries, over the keys; with it, where they are wanted, each row's part of
the slopes' gradient, and the gradient of a mask that is broadcast to nothing."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_fdattn.launch.pdl import await_previous
from torch_fdattn.ops.attend import block_ptrs, load_tile
from torch_fdattn.ops.attention.backward_rows import LENGTHS, PADDING, store_rows
from torch_fdattn.ops.attention.dropout_tiles import kept_tile
from torch_fdattn.ops.online_softmax import LOG2E
from torch_fdattn.ops.packed_tiles import listed, packed_block, padded_row
from torch_fdattn.ops.score_tiles import (
    head_options,
    key_distance,
    mask_stride,
    plain,
    probabilities,
    score_tile,
)
from torch_fdattn.ops.tiles import (
    add_dot,
    block_coordinates,
    key_range,
    sequence_bounds,
    shown_range,
    tile_offsets,
    visible,
)


@triton.jit
def without_rounding_of_lse(sums, weights, lse2):
    """Sums of rows that are linear in their weights, for weights that add up to one.

    The saved lse is rounded, and all weights of a row are too large or too small by as much. That moves a slope's
    gradient, of which the sum over rows cancels most, by more than everything else. What is further from one than
    rounding explains is no rounding: the lse is that of more keys (`reference.py`), and those weights are right.
    """
    explained = tl.minimum(tl.abs(lse2) * 2.4e-7 + 1e-6, 1e-4)
    return sums / tl.where(tl.abs(weights - 1.0) <= explained, weights, 1.0)


@triton.jit
def _dq_tiles(
    dq, dslopes, q, dout, lse2, delta, q_pos, k_ptr, v_ptr, k_strides, v_strides, dmask, bounds, queries, keys, options,
    head, scale_log2, head_dim, v_dim, SLOPES: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_CYCLIC: tl.constexpr,
    BORDERS: tl.constexpr, RAGGED: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the key tiles, at least one (as in `backward_keys.py`), to dq (unscaled) of one query tile, and to dslopes (M,).

    dmask: as in `store_mask_tile` where the mask's gradient is dS itself, else None.
    """
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    kt_offsets = tile_offsets(n[None, :], d[:, None], k_strides, WIDE)
    d_v = tl.arange(0, dout.shape[1])
    EVEN_DV: tl.constexpr = v_dim == dout.shape[1]
    NORMALISES: tl.constexpr = SLOPES and q.dtype == tl.float32
    weights = tl.zeros_like(dslopes)
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
            products, q_pos[:, None], index[None, :], start, queries, keys, options, head, scale_log2, BLOCK_CYCLIC, WIDE,
            HAS_LSE=True,
        )  # fmt: skip
        p = probabilities(scores * unit - lse2[:, None], options)
        if BORDERS:  # noqa: SIM102 (decided when the kernel is compiled)
            if (start < bounds[1]) | (start >= bounds[2]):
                seen = visible(
                    q_pos[:, None], index[None, :], keys, HAS_LEFT, HAS_RIGHT, BLOCK_CYCLIC
                )
                p = tl.where(seen, p, 0.0)
        if options[7] is not None:
            kept = kept_tile(options, head, q_pos, index, start, keys, BLOCK_CYCLIC)
            dp = tl.where(kept, dp, 0.0) * options[9]
        ds = p * (dp - delta[:, None])
        if NORMALISES:
            weights += tl.sum(p, 1)
        if SLOPES:
            # The select keeps the product from becoming part of an FMA with another thread's: threads that hold the
            # same row would round differently, and which of them writes last is chance.
            distance = tl.abs(key_distance(q_pos[:, None], index[None, :], keys, BLOCK_CYCLIC))
            dslopes -= tl.sum(tl.where(distance > 0, ds * distance.to(tl.float32), 0.0), 1)
        if dmask is not None:
            store_mask_tile(dmask, start, ds, queries[0], WIDE)
        ds = (ds * cap_slope).to(kt.dtype)
        dq = add_dot(dq, ds, tl.trans(kt), PRECISION)
    if NORMALISES:
        if options[3] is not None:
            sink = tl.load(options[3] + head[4] * options[4]).to(tl.float32)
            weights += tl.exp2(sink * LOG2E - lse2)
        dslopes = without_rounding_of_lse(dslopes, weights, lse2)
    return dq, dslopes


@triton.jit(do_not_specialize=LENGTHS)
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dq_ptr, dslopes_ptr, dmask_ptr,
    kv_lens_ptr, q_start_ptr, kv_start_ptr,
    q_strides, k_strides, v_strides, dout_strides, dq_strides, dmask_strides, score_options, swizzle,
    q_len, kv_capacity, window_left, window_right, kv_block, kv_stride, scale,
    padded_len, heads, group, head_dim: tl.constexpr, v_dim: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_CYCLIC: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BORDERS: tl.constexpr, RAGGED: tl.constexpr, PDL: tl.constexpr,
    sequences=None, cu_seqlens_q_ptr=None, cu_seqlens_k_ptr=None, ranges_ptr=None,
):  # fmt: skip
    EVEN_D: tl.constexpr = head_dim == BLOCK_D
    # Programs fill the SMs that dK and dV leave idle at their end, of which they need nothing; the last one
    # waits, so that who waits for this kernel waits for both.
    if tl.program_id(0) == tl.num_programs(0) - 1:
        await_previous(PDL)
    row_blocks = tl.cdiv(q_len, BLOCK_M)
    if cu_seqlens_q_ptr is not None:
        row_blocks = tl.num_programs(0) // heads
    block, head, batch = block_coordinates(row_blocks, heads, swizzle)
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
    bounds = key_range(q_start + first_row, last, keys, HAS_LEFT, HAS_RIGHT, BLOCK_CYCLIC, BLOCK_N)
    if ranges_ptr is not None:
        ranges_ptr += batch * 3
        bounds = shown_range(bounds, tl.load(ranges_ptr), tl.load(ranges_ptr + 1), BLOCK_N)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dslopes = tl.zeros([BLOCK_M], tl.float32)
    dq_ptr += batch64 * dq_strides[0] + head64 * dq_strides[1]
    dmask = None
    if dmask_ptr is not None:
        dmask_ptr += batch64 * mask_stride(dmask_strides, 0)
        dmask_ptr += head64 * mask_stride(dmask_strides, 1)
        of_rows = mask_stride(dmask_strides, 2)
        dmask_ptr += first_row.to(tl.int64) * of_rows
        mask_rows = q_len
        if score_options[10] is not None:
            mask_rows = tl.minimum(q_len, plain(score_options[10]))
        columns = mask_stride(dmask_strides, 4)
        dmask = (dmask_ptr, of_rows, mask_stride(dmask_strides, 3), columns, mask_rows)
        hidden = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, bounds[0], BLOCK_N):
            store_mask_tile(dmask, start, hidden, first_row, WIDE)
        for start in tl.range(tl.cdiv(bounds[3], BLOCK_N) * BLOCK_N, kv_capacity, BLOCK_N):
            store_mask_tile(dmask, start, hidden, first_row, WIDE)
    if bounds[0] >= bounds[3]:  # no key is seen
        store_rows(dq_ptr, dq_strides, first_row, q_len, head_dim, dq, WIDE)
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
        HAS_LEFT, HAS_RIGHT, BLOCK_CYCLIC, BORDERS, RAGGED, WIDE, BLOCK_N, BLOCK_D, EVEN_D, PRECISION,
    )  # fmt: skip

    store_rows(dq_ptr, dq_strides, first_row, q_len, head_dim, dq * scale, WIDE)
    if dslopes_ptr is not None:
        tl.store(dslopes_ptr + row_offset + rows, dslopes, mask=rows < q_len)


@triton.jit
def store_mask_tile(dmask, start, tile, first_row, WIDE: tl.constexpr):
    """A tile of the mask's gradient: dmask = (pointer to the rows from first_row on, their strides, columns, rows)."""
    row = tl.arange(0, tile.shape[0])[:, None]
    start = start // 16 * 16  # as it is: tiles begin at multiples of their size
    column = tl.arange(0, tile.shape[1])[None, :]
    inside = (first_row + row < dmask[4]) & (start + column < dmask[3])
    ptrs = (
        dmask[0]
        + start.to(tl.int64) * dmask[2]
        + tile_offsets(row, column, (dmask[1], dmask[2]), WIDE)
    )
    tl.store(ptrs, tile.to(dmask[0].dtype.element_ty), mask=inside)
