"""Backward, the gradient of an additive mask that is broadcast: one program per tile of the mask sums dS, in fixed
order, over all that the mask is broadcast to. A mask of few elements has few programs: right, not fast."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_fdattn.ops.attend import block_ptrs, load_tile
from torch_fdattn.ops.attention.backward_rows import LENGTHS
from torch_fdattn.ops.attention.dropout_tiles import kept_tile
from torch_fdattn.ops.online_softmax import LOG2E
from torch_fdattn.ops.score_tiles import (
    head_options,
    probabilities,
    score_tile,
)
from torch_fdattn.ops.tiles import (
    program_coordinates,
    sequence_bounds,
    tile_offsets,
    visible,
)


@triton.jit(do_not_specialize=LENGTHS)
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
