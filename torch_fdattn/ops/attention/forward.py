"""Attention forward in portable Triton: one program per block of queries, streaming over keys.

FlashAttention-2's forward (arXiv:2307.08691, algorithm 1). Masked tiles are only those that a mask
border or the ragged end crosses; tiles outside are never loaded. Causal programs start with the
longest rows, so that the short ones fill the tail of the grid.

Shapes: q (B, H, M, D); k (B, H_kv, N, D); v (B, H_kv, N, DV); out (B, H, M, DV); lse (B, H, M). Any
strides. GQA by head counts. Packed sequences (`ops/packed.py`) are the same program on a block that it looks
up: a compile-time switch, absent from plain calls, as is that for keys on pages.
Limits: head dims that are no power of two are padded to one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.launch.launches import Launch, run
from torch_fdattn.ops.attend import attend_range, block_ptrs, load_tile
from torch_fdattn.ops.attention import tuning
from torch_fdattn.ops.attention.configs import (
    TileConfig,
    device_capability,
    dot_precision,
    forward_config,
    has_borders,
    heads_per_swizzle,
    is_short_window,
)
from torch_fdattn.ops.attention.tuned_tiles import with_tuned_tiles
from torch_fdattn.ops.launch import (
    broadcast_mask,
    cdiv,
    contiguous_mask,
    kernel_options,
    mask_flags,
    mask_numbers,
    tile_dims,
    wide_rows,
)
from torch_fdattn.ops.library import launches
from torch_fdattn.ops.online_softmax import LOG2E, softmax_finish
from torch_fdattn.ops.options import AttentionOptions
from torch_fdattn.ops.packed import Packed, kernel_arguments, key_capacity
from torch_fdattn.ops.packed_tiles import listed, packed_block
from torch_fdattn.ops.row_ranges_kernel import ranges_launch
from torch_fdattn.ops.score_tiles import add_sinks, head_options
from torch_fdattn.ops.tiles import (
    block_coordinates,
    key_range,
    keys_before,
    sequence_bounds,
    shown_range,
)


@triton.jit(
    do_not_specialize=[
        "swizzle",
        "q_len",
        "kv_capacity",
        "window_left",
        "window_right",
        "kv_block",
        "kv_stride",
        "heads",
        "group",
        "sequences",
        "page_count",
        "table_stride",
    ]
)
def _attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, kv_lens_ptr, q_start_ptr, kv_start_ptr,
    q_strides, k_strides, v_strides, out_strides, score_options, swizzle,
    q_len, kv_capacity, window_left, window_right, kv_block, kv_stride, scale,
    heads, group, head_dim: tl.constexpr, v_dim: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_CYCLIC: tl.constexpr, BORDERS: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    sequences=None, cu_seqlens_q_ptr=None, cu_seqlens_k_ptr=None, page_table_ptr=None, table_stride=None, table_step=None, page_count=None,
    PAGE: tl.constexpr = 0, ranges_ptr=None,
):  # fmt: skip
    EVEN_D: tl.constexpr = head_dim == BLOCK_D
    PACKED: tl.constexpr = cu_seqlens_q_ptr is not None
    row_blocks = tl.cdiv(q_len, BLOCK_M)
    if PACKED:
        row_blocks = tl.num_programs(0) // heads
    block, head, batch = block_coordinates(row_blocks, heads, swizzle)
    if HAS_RIGHT:
        block = row_blocks - 1 - block
    if PACKED:
        tokens = q_len
        sequence, block, first_token, q_len, first_key, kv_capacity = packed_block(
            block, cu_seqlens_q_ptr, cu_seqlens_k_ptr, sequences, tokens, kv_capacity, BLOCK_M
        )
        if block * BLOCK_M >= q_len:
            return
        batch = listed(sequence, sequences)
        q_ptr += first_token.to(tl.int64) * q_strides[2]
        out_ptr += first_token.to(tl.int64) * out_strides[2]
        if PAGE == 0:
            k_ptr += first_key.to(tl.int64) * k_strides[2]
            v_ptr += first_key.to(tl.int64) * v_strides[2]
    kv_len, q_start, kv_start = sequence_bounds(
        batch, kv_lens_ptr, q_start_ptr, kv_start_ptr, q_len, kv_capacity
    )
    keys = (kv_len, kv_start, window_left, window_right, kv_block, kv_stride)

    batch64 = batch.to(tl.int64)
    head64 = head.to(tl.int64)
    kv_head64 = (head // group).to(tl.int64)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    rows_in = rows[:, None] < q_len
    dims_in = d[None, :] < head_dim
    q_ptr += batch64 * q_strides[0] + head64 * q_strides[1]
    q_ptrs = block_ptrs(
        q_ptr, block * BLOCK_M, (q_strides[2], q_strides[3]), WIDE, BLOCK_M, BLOCK_D
    )
    q = load_tile(q_ptrs, rows_in, dims_in, True, EVEN_D)

    first = q_start + block * BLOCK_M
    last = q_start + tl.minimum((block + 1) * BLOCK_M, q_len) - 1
    bounds = key_range(first, last, keys, HAS_LEFT, HAS_RIGHT, BLOCK_CYCLIC, BLOCK_N)
    unmasked = None
    if ranges_ptr is not None:
        ranges_ptr += batch * 3
        bounds = shown_range(bounds, tl.load(ranges_ptr), tl.load(ranges_ptr + 1), BLOCK_N)
        unmasked = tl.load(ranges_ptr + 2)
    pages = None
    if PAGE > 0:
        oldest = 0
        if HAS_LEFT:
            oldest = keys_before(first - window_left, kv_start, kv_block, kv_stride, BLOCK_CYCLIC)
        table_ptr = page_table_ptr + batch.to(tl.int64) * table_stride
        pages = (k_strides[0], v_strides[0], table_ptr, table_step, page_count, oldest)
    k_batch64 = batch64 if PAGE == 0 else batch64 * 0
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc, row_max, row_sum = attend_range(
        acc, row_max, row_sum, q, q_start + rows,
        k_ptr + k_batch64 * k_strides[0] + kv_head64 * k_strides[1],
        v_ptr + k_batch64 * v_strides[0] + kv_head64 * v_strides[1],
        (k_strides[2], k_strides[3]), (v_strides[2], v_strides[3]), bounds,
        (block * BLOCK_M, q_len, q_start), keys,
        score_options, head_options(score_options, scale, batch64, head64), scale * LOG2E, head_dim, v_dim,
        HAS_LEFT, HAS_RIGHT, BLOCK_CYCLIC, BORDERS, WIDE, BLOCK_N, BLOCK_D, EVEN_D, PRECISION,
        pages, PAGE, unmasked,
    )  # fmt: skip
    out, lse = softmax_finish(acc, row_max, row_sum)
    if score_options[7] is not None:
        out *= score_options[9]
    if score_options[3] is not None:
        sink = tl.load(score_options[3] + head64 * score_options[4]).to(tl.float32)
        if PACKED:
            owned = (sequence >= 0) & (sequence < sequences)
            sink = tl.where(owned, sink, float("-inf"))
        out, lse = add_sinks(out, lse, sink)

    out_ptr += batch64 * out_strides[0] + head64 * out_strides[1]
    out_strides = (out_strides[2], out_strides[3])
    out_ptrs = block_ptrs(out_ptr, block * BLOCK_M, out_strides, WIDE, BLOCK_M, BLOCK_DV)
    out_dims_in = tl.arange(0, BLOCK_DV)[None, :] < v_dim
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=rows_in & out_dims_in)
    if PACKED:
        lse_ptr += head64 * tokens + first_token - (batch64 * heads + head) * q_len
    tl.store(lse_ptr + (batch64 * heads + head) * q_len + rows, lse, mask=rows < q_len)


def launch_forward(*args, **kwargs) -> None:
    """Makes `forward_launches`."""
    run(forward_launches(*args, **kwargs))


def forward_launches(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, out: Tensor, lse: Tensor,
    config: TileConfig | None = None, packed: Packed | None = None, ranges: Tensor | None = None,
) -> Iterator[Launch]:  # fmt: skip
    """What writes attention of q, k, v into out (B, H, M, DV, any float dtype) and lse (fp32, contiguous).

    ranges: `empty_ranges`, scratch memory.

    Of packed sequences, q and out, k and v are by `packed.by_heads`, or k and v pages, and lse is (H, T).
    """
    batch, heads, q_len, head_dim = q.shape
    if q.numel() == 0:
        return
    mask, scale, scores, dropout, _ = options
    v_dim = v.shape[3]
    kv_capacity = key_capacity(k, packed)
    borders = packed is not None or has_borders(mask, kv_capacity)
    if config is None:
        config = forward_config(
            max(head_dim, v_dim), q.dtype, device_capability(q.device), borders, scores, dropout,
            is_short_window(mask, kv_capacity),
        )  # fmt: skip
        config = with_tuned_tiles("forward", config, q, v, options, kv_capacity, packed is not None)  # fmt: skip
        if tuning.state.active:
            case = tuning.TuningCase(q, k, v, options, packed)
            trial = partial(launch_forward, q, k, v, options, out, lse, packed=packed, ranges=ranges)  # fmt: skip
            config = tuning.chosen("forward", config, case, (out, lse), trial)
    op, row_blocks = "attention_forward", cdiv(q_len, config.block_m)
    if packed is not None:
        op, row_blocks = "varlen_attention_forward", packed.blocks(q_len, config.block_m)
    launches[f"{op}/triton"] += 1
    mask = contiguous_mask(mask)
    block_d, block_dv = tile_dims(k, v)
    group = heads // k.shape[1]
    head_bytes = kv_capacity * (head_dim + v_dim) * k.element_size() // group
    swizzle = heads_per_swizzle(mask, heads * batch, head_bytes, packed is not None)
    if ranges is not None:
        yield ranges_launch(ranges, scores, q, k)
    yield Launch(
        _attention_forward_kernel, row_blocks * heads * batch,
        q, k, v, out, lse, *mask[:3],
        q.stride(), k.stride(), v.stride(), out.stride(),
        kernel_options(scores, q, k, dropout, packed), swizzle,
        q_len, kv_capacity, *mask_numbers(mask), scale, heads, group, head_dim, v_dim,
        **mask_flags(mask), BORDERS=borders or ranges is not None, WIDE=wide_rows(q, k, v, out, *broadcast_mask(scores, q, k, packed)),
        PRECISION=dot_precision(q.dtype),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_D=block_d,
        BLOCK_DV=block_dv, num_warps=config.num_warps, num_stages=config.num_stages,
        also=kernel_arguments(packed, k) if ranges is None else {"ranges_ptr": ranges},
    )  # fmt: skip
