"""Attention backward in portable Triton: streaming from the saved lse, deterministic by construction.

Three launches (FlashAttention-2, arXiv:2307.08691, algorithm 2, split in two sweeps):
- delta = rowsum(dO ∘ O) - dlse;
- one program per block of keys: dK and dV, over the queries of all heads of its group, in fixed order;
- one program per block of queries: dQ, over the keys.
Seven matmuls instead of the five of a single sweep, but no atomics: the same bits on every run.

Shapes: q, out, dout, dq (B, H, M, D); k, v, dk, dv (B, H_kv, N, D); lse, dlse, delta (B, H, M). Tiles
of the dK/dV sweep are transposed (N, M), so that P and dS enter their second matmul as they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.ops.attend import load_tile, tile_ptrs
from torch_fdattn.ops.attention.configs import (
    BackwardConfig,
    backward_config,
    device_capability,
    dot_precision,
)
from torch_fdattn.ops.launch import mask_flags, mask_numbers, mask_pointers, on_device, padded
from torch_fdattn.ops.library import launches
from torch_fdattn.ops.online_softmax import LOG2E
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.tiles import (
    key_position,
    key_range,
    program_coordinates,
    query_range,
    sequence_bounds,
    visible,
)

_LENGTHS = ["q_len", "kv_capacity", "window_left", "window_right", "kv_block", "kv_stride"]


@triton.jit(do_not_specialize=["q_len"])
def _delta_kernel(
    out_ptr, dout_ptr, dlse_ptr, delta_ptr, out_strides, dout_strides, q_len, heads,
    head_dim: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    block, head, batch = program_coordinates(tl.cdiv(q_len, BLOCK_M), heads)
    batch64 = batch.to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    rows = block * BLOCK_M + m
    inside = (rows[:, None] < q_len) & (d[None, :] < head_dim)
    out_ptr += batch64 * out_strides[0] + head.to(tl.int64) * out_strides[1]
    dout_ptr += batch64 * dout_strides[0] + head.to(tl.int64) * dout_strides[1]
    first = block * BLOCK_M
    out_ptrs = tile_ptrs(out_ptr, first, d[None, :], m[:, None], (out_strides[2], out_strides[3]))
    dout_ptrs = tile_ptrs(dout_ptr, first, d[None, :], m[:, None], (dout_strides[2], dout_strides[3]))
    out = tl.load(out_ptrs, mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptrs, mask=inside, other=0.0).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    offsets = (batch64 * heads + head) * q_len + rows
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + offsets, mask=rows < q_len, other=0.0)
    tl.store(delta_ptr + offsets, delta, mask=rows < q_len)


@triton.jit
def _load_row_terms(lse_ptr, delta_ptr, rows, q_len):
    """(lse in log2 units, delta); rows outside and rows that saw no key get probability zero."""
    lse = tl.load(lse_ptr + rows, mask=rows < q_len, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    return lse * LOG2E, tl.load(delta_ptr + rows, mask=rows < q_len, other=0.0)


@triton.jit
def _dkdv_tiles(
    dk, dv, k, v, index, q_ptr, dout_ptr, lse_ptr, delta_ptr, q_strides, dout_strides, begin, end,
    q_start, q_len, keys, scale_log2, head_dim,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, STRIPED: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the query tiles begin … end of one head to dk (unscaled) and dv of one key tile."""
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    qt_ptrs = tile_ptrs(q_ptr, begin, d[:, None], m[None, :], q_strides)
    dout_ptrs = tile_ptrs(dout_ptr, begin, d[None, :], m[:, None], dout_strides)
    for start in tl.range(begin, end, BLOCK_M):
        rows = start + m
        qt = load_tile(qt_ptrs, rows[None, :] < q_len, d[:, None] < head_dim, MASKED, EVEN_D)
        lse2, delta = _load_row_terms(lse_ptr, delta_ptr, rows, q_len)
        products = tl.dot(k, qt, input_precision=PRECISION)
        pt = tl.exp2(products * scale_log2 - lse2[None, :])
        if MASKED:
            seen = visible(
                (q_start + rows)[None, :], index[:, None], keys, HAS_LEFT, HAS_RIGHT, STRIPED
            )
            pt = tl.where(seen, pt, 0.0)
        dout = load_tile(dout_ptrs, rows[:, None] < q_len, d[None, :] < head_dim, MASKED, EVEN_D)
        dv = tl.dot(pt.to(dout.dtype), dout, dv, input_precision=PRECISION)
        dpt = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        dst = (pt * (dpt - delta[None, :])).to(qt.dtype)
        dk = tl.dot(dst, tl.trans(qt), dk, input_precision=PRECISION)
        qt_ptrs += BLOCK_M * q_strides[0]
        dout_ptrs += BLOCK_M * dout_strides[0]
    return dk, dv


@triton.jit(do_not_specialize=_LENGTHS)
def _dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    kv_lens_ptr, q_start_ptr, kv_start_ptr,
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides,
    q_len, kv_capacity, window_left, window_right, kv_block, kv_stride, scale,
    heads, group, head_dim: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, STRIPED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    EVEN_D: tl.constexpr = BLOCK_D == head_dim
    block, kv_head, batch = program_coordinates(tl.cdiv(kv_capacity, BLOCK_N), heads // group)
    batch64 = batch.to(tl.int64)
    kv_head64 = kv_head.to(tl.int64)
    kv_len, q_start, kv_start = sequence_bounds(
        batch, kv_lens_ptr, q_start_ptr, kv_start_ptr, q_len, kv_capacity
    )
    keys = (kv_len, kv_start, window_left, window_right, kv_block, kv_stride)

    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    first_key = block * BLOCK_N
    index = first_key + n
    keys_in = index[:, None] < kv_len
    dims_in = d[None, :] < head_dim
    k_ptr += batch64 * k_strides[0] + kv_head64 * k_strides[1]
    v_ptr += batch64 * v_strides[0] + kv_head64 * v_strides[1]
    k_ptrs = tile_ptrs(k_ptr, first_key, d[None, :], n[:, None], (k_strides[2], k_strides[3]))
    v_ptrs = tile_ptrs(v_ptr, first_key, d[None, :], n[:, None], (v_strides[2], v_strides[3]))
    k = load_tile(k_ptrs, keys_in, dims_in, True, EVEN_D)
    v = load_tile(v_ptrs, keys_in, dims_in, True, EVEN_D)

    last_key = tl.minimum(first_key + BLOCK_N, kv_len) - 1
    begin, full_begin, full_end, end = query_range(
        key_position(first_key, kv_start, kv_block, kv_stride, STRIPED),
        key_position(last_key, kv_start, kv_block, kv_stride, STRIPED),
        first_key + BLOCK_N <= kv_len, q_start, q_len, window_left, window_right,
        HAS_LEFT, HAS_RIGHT, BLOCK_M,
    )  # fmt: skip
    begin = tl.where(first_key < kv_len, begin, end)  # a tile with no valid key visits no query
    bounds = (begin, tl.maximum(begin, full_begin), tl.maximum(begin, full_end), end)

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for member in tl.range(0, group, num_stages=1):
        head64 = kv_head64 * group + member
        row_offset = (batch64 * heads + head64) * q_len
        for part in tl.static_range(3):
            dk, dv = _dkdv_tiles(
                dk, dv, k, v, index,
                q_ptr + batch64 * q_strides[0] + head64 * q_strides[1],
                dout_ptr + batch64 * dout_strides[0] + head64 * dout_strides[1],
                lse_ptr + row_offset, delta_ptr + row_offset,
                (q_strides[2], q_strides[3]), (dout_strides[2], dout_strides[3]),
                bounds[part], bounds[part + 1], q_start, q_len, keys, scale * LOG2E, head_dim,
                HAS_LEFT, HAS_RIGHT, STRIPED, part != 1, BLOCK_M, BLOCK_D, EVEN_D, PRECISION,
            )  # fmt: skip

    stored = (index[:, None] < kv_capacity) & dims_in
    dk_ptr += batch64 * dk_strides[0] + kv_head64 * dk_strides[1]
    dv_ptr += batch64 * dv_strides[0] + kv_head64 * dv_strides[1]
    dk_ptrs = tile_ptrs(dk_ptr, first_key, d[None, :], n[:, None], (dk_strides[2], dk_strides[3]))
    dv_ptrs = tile_ptrs(dv_ptr, first_key, d[None, :], n[:, None], (dv_strides[2], dv_strides[3]))
    tl.store(dk_ptrs, (dk * scale).to(dk_ptr.dtype.element_ty), mask=stored)
    tl.store(dv_ptrs, dv.to(dv_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _dq_tiles(
    dq, q, dout, lse2, delta, q_pos, k_ptr, v_ptr, k_strides, v_strides, begin, end, keys, scale_log2,
    head_dim, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, STRIPED: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, EVEN_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the key tiles begin … end to dq (unscaled) of one query tile."""
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    kt_ptrs = tile_ptrs(k_ptr, begin, d[:, None], n[None, :], k_strides)
    vt_ptrs = tile_ptrs(v_ptr, begin, d[:, None], n[None, :], v_strides)
    for start in tl.range(begin, end, BLOCK_N):
        index = start + n
        kt = load_tile(kt_ptrs, index[None, :] < keys[0], d[:, None] < head_dim, MASKED, EVEN_D)
        vt = load_tile(vt_ptrs, index[None, :] < keys[0], d[:, None] < head_dim, MASKED, EVEN_D)
        products = tl.dot(q, kt, input_precision=PRECISION)
        p = tl.exp2(products * scale_log2 - lse2[:, None])
        if MASKED:
            seen = visible(q_pos[:, None], index[None, :], keys, HAS_LEFT, HAS_RIGHT, STRIPED)
            p = tl.where(seen, p, 0.0)
        dp = tl.dot(dout, vt, input_precision=PRECISION)
        ds = (p * (dp - delta[:, None])).to(kt.dtype)
        dq = tl.dot(ds, tl.trans(kt), dq, input_precision=PRECISION)
        kt_ptrs += BLOCK_N * k_strides[0]
        vt_ptrs += BLOCK_N * v_strides[0]
    return dq


@triton.jit(do_not_specialize=_LENGTHS)
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, kv_lens_ptr, q_start_ptr, kv_start_ptr,
    q_strides, k_strides, v_strides, dout_strides, dq_strides,
    q_len, kv_capacity, window_left, window_right, kv_block, kv_stride, scale,
    heads, group, head_dim: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, STRIPED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    EVEN_D: tl.constexpr = BLOCK_D == head_dim
    FIRST_PART: tl.constexpr = 0 if HAS_LEFT else 1  # no left border: no masked tiles before the full ones
    row_blocks = tl.cdiv(q_len, BLOCK_M)
    block, head, batch = program_coordinates(row_blocks, heads)
    if HAS_RIGHT:
        block = row_blocks - 1 - block
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
    q_ptrs = tile_ptrs(q_ptr, first_row, d[None, :], m[:, None], (q_strides[2], q_strides[3]))
    dout_ptrs = tile_ptrs(dout_ptr, first_row, d[None, :], m[:, None], (dout_strides[2], dout_strides[3]))
    q = load_tile(q_ptrs, rows_in, dims_in, True, EVEN_D)
    dout = load_tile(dout_ptrs, rows_in, dims_in, True, EVEN_D)
    row_offset = (batch64 * heads + head) * q_len
    lse2, delta = _load_row_terms(lse_ptr + row_offset, delta_ptr + row_offset, rows, q_len)

    last = q_start + tl.minimum(first_row + BLOCK_M, q_len) - 1
    bounds = key_range(
        q_start + first_row, last, keys, HAS_LEFT, HAS_RIGHT, STRIPED, BLOCK_N
    )
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for part in tl.static_range(FIRST_PART, 3):
        dq = _dq_tiles(
            dq, q, dout, lse2, delta, q_start + rows,
            k_ptr + batch64 * k_strides[0] + kv_head64 * k_strides[1],
            v_ptr + batch64 * v_strides[0] + kv_head64 * v_strides[1],
            (k_strides[2], k_strides[3]), (v_strides[2], v_strides[3]),
            bounds[part], bounds[part + 1], keys, scale * LOG2E, head_dim,
            HAS_LEFT, HAS_RIGHT, STRIPED, part != 1, BLOCK_N, BLOCK_D, EVEN_D, PRECISION,
        )  # fmt: skip

    dq_ptr += batch64 * dq_strides[0] + head64 * dq_strides[1]
    dq_ptrs = tile_ptrs(dq_ptr, first_row, d[None, :], m[:, None], (dq_strides[2], dq_strides[3]))
    tl.store(dq_ptrs, (dq * scale).to(dq_ptr.dtype.element_ty), mask=rows_in & dims_in)


def launch_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    mask: Mask, scale: float, dq: Tensor, dk: Tensor, dv: Tensor,
    config: BackwardConfig | None = None,
) -> None:  # fmt: skip
    """Writes the gradients into dq (like q), dk and dv (like k); lse and dlse fp32, contiguous."""
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_capacity = k.shape[1:3]
    config = config or backward_config(head_dim, q.dtype, device_capability(q.device))
    launches["attention_backward/triton"] += 1
    delta = torch.empty_like(lse)
    sizes = (q_len, kv_capacity, *mask_numbers(mask), scale, heads, heads // kv_heads, head_dim)
    options = {**mask_flags(mask), "PRECISION": dot_precision(q.dtype), "BLOCK_D": padded(head_dim)}
    with on_device(q):
        if q.numel():
            block_m = config.dq.block_m
            _delta_kernel[(triton.cdiv(q_len, block_m) * heads * batch,)](
                out, dout, dlse, delta, out.stride(), dout.stride(), q_len, heads, head_dim,
                BLOCK_M=block_m, BLOCK_D=padded(head_dim),
            )  # fmt: skip
        if k.numel():
            tile = config.dkdv
            _dkdv_kernel[(triton.cdiv(kv_capacity, tile.block_n) * kv_heads * batch,)](
                q, k, v, dout, lse, delta, dk, dv, *mask_pointers(mask),
                q.stride(), k.stride(), v.stride(), dout.stride(), dk.stride(), dv.stride(),
                *sizes, **options, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
                num_warps=tile.num_warps, num_stages=tile.num_stages,
            )  # fmt: skip
        if q.numel():
            tile = config.dq
            _dq_kernel[(triton.cdiv(q_len, tile.block_m) * heads * batch,)](
                q, k, v, dout, lse, delta, dq, *mask_pointers(mask),
                q.stride(), k.stride(), v.stride(), dout.stride(), dq.stride(),
                *sizes, **options, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
                num_warps=tile.num_warps, num_stages=tile.num_stages,
            )  # fmt: skip
