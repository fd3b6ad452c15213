"""Split-KV decode in portable Triton: a few query tokens against a long, strided cache.

Flash-Decoding: programs share a sequence's keys, each leaves (out, lse) of its share in fp32, and
`merge_states`' kernel combines them. The query heads of one KV head and the T query tokens are packed
into the rows of one tile (row = head_in_group · T + token), so that K and V are read once per group.

Shapes: q, out (B, H, T, D); k, v (B, H_kv, N, D) any strides; partial outs (splits, B, H, T, D) and
lses (splits, B, H, T) fp32. The grid depends on shapes only: lengths stay on the device.
Limit: memory-bound by design; more than 64 rows a KV head are tiled and read the cache again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.ops.attend import attend_range
from torch_fdattn.ops.attention.configs import TileConfig, dot_precision
from torch_fdattn.ops.decode.schedule import num_splits, processors
from torch_fdattn.ops.launch import (
    contiguous_mask,
    mask_flags,
    mask_numbers,
    on_device,
    padded,
    wide_rows,
)
from torch_fdattn.ops.library import INTERPRET, launches
from torch_fdattn.ops.merge_states.kernel import launch_merge
from torch_fdattn.ops.online_softmax import LOG2E, softmax_finish
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.tiles import key_range, program_coordinates, sequence_bounds

MAX_ROWS = 64


@triton.jit(
    do_not_specialize=[
        "splits",
        "kv_capacity",
        "window_left",
        "window_right",
        "kv_block",
        "kv_stride",
    ]
)
def _decode_split_kernel(
    q_ptr, k_ptr, v_ptr, outs_ptr, lses_ptr, kv_lens_ptr, q_start_ptr, kv_start_ptr,
    q_strides, k_strides, v_strides, outs_strides, lses_strides,
    q_len, kv_capacity, window_left, window_right, kv_block, kv_stride, scale,
    splits, kv_heads, group, head_dim: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, STRIPED: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    EVEN_D: tl.constexpr = head_dim == BLOCK_D
    row_blocks = tl.cdiv(group * q_len, BLOCK_M)
    split, head_block, batch = program_coordinates(splits, kv_heads * row_blocks)
    row_block = head_block // kv_heads
    kv_head = head_block % kv_heads
    kv_len, q_start, kv_start = sequence_bounds(
        batch, kv_lens_ptr, q_start_ptr, kv_start_ptr, q_len, kv_capacity
    )
    keys = (kv_len, kv_start, window_left, window_right, kv_block, kv_stride)

    batch64 = batch.to(tl.int64)
    kv_head64 = kv_head.to(tl.int64)
    row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    head64 = kv_head64 * group + row // q_len
    token = (row % q_len).to(tl.int64)
    rows_in = row < group * q_len
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    inside = rows_in[:, None] & (d[None, :] < head_dim)
    q_rows = batch64 * q_strides[0] + head64 * q_strides[1] + token * q_strides[2]
    q = tl.load(q_ptr + q_rows[:, None] + d[None, :] * q_strides[3], mask=inside, other=0.0)

    # Every program computes the whole range, then takes its share of it in whole tiles.
    begin, full_begin, full_end, end = key_range(
        q_start, q_start + q_len - 1, keys, HAS_LEFT, HAS_RIGHT, STRIPED, BLOCK_N
    )
    share = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), splits) * BLOCK_N
    low = tl.minimum(begin + split * share, end)
    high = tl.minimum(low + share, end)
    bounds = (
        low,
        tl.minimum(tl.maximum(full_begin, low), high),
        tl.minimum(tl.maximum(full_end, low), high),
        high,
    )

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc, row_max, row_sum = attend_range(
        acc, row_max, row_sum, q, q_start + row % q_len,
        k_ptr + batch64 * k_strides[0] + kv_head64 * k_strides[1],
        v_ptr + batch64 * v_strides[0] + kv_head64 * v_strides[1],
        (k_strides[2], k_strides[3]), (v_strides[2], v_strides[3]), bounds, keys, scale * LOG2E, head_dim,
        HAS_LEFT, HAS_RIGHT, STRIPED, True, WIDE, BLOCK_N, BLOCK_D, EVEN_D, PRECISION,
    )  # fmt: skip
    out, lse = softmax_finish(acc, row_max, row_sum)

    out_rows = (
        split.to(tl.int64) * outs_strides[0] + batch64 * outs_strides[1]
        + head64 * outs_strides[2] + token * outs_strides[3]
    )  # fmt: skip
    lse_rows = (
        split.to(tl.int64) * lses_strides[0] + batch64 * lses_strides[1]
        + head64 * lses_strides[2] + token * lses_strides[3]
    )  # fmt: skip
    out = out.to(outs_ptr.dtype.element_ty)
    tl.store(outs_ptr + out_rows[:, None] + d[None, :] * outs_strides[4], out, mask=inside)
    tl.store(lses_ptr + lse_rows, lse, mask=rows_in)


def decode_config(head_dim: int, dtype: torch.dtype, rows: int) -> TileConfig:
    """Tiles of the split kernel; rows is the number of packed query rows of one KV head."""
    block_m = padded(min(rows, MAX_ROWS))
    if INTERPRET:
        return TileConfig(block_m, 16, 1, 1)
    if dtype == torch.float32:
        # FMA dots keep whole operand rows in registers: wider tiles spill kilobytes a thread.
        if block_m == 16 and head_dim <= 128:
            return TileConfig(16, 32, 8, 2)
        return TileConfig(min(block_m, 32), 16, 4 if block_m == 16 else 8, 2)
    if head_dim > 128:
        return TileConfig(block_m, 32, 4, 2)
    # 64 keys of 128 dims are 16 KiB a load: three stages keep enough bytes in flight. With 64 rows they
    # would take 72 KiB of the 64 KiB of shared memory that gfx942 has.
    return TileConfig(block_m, 64, 4, 3 if block_m <= 32 else 2)


def launch_decode(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, out: Tensor, lse: Tensor,
    config: TileConfig | None = None, splits: int | None = None,
) -> None:  # fmt: skip
    """Writes attention of q over the cache into out (like q, any float dtype) and lse (fp32)."""
    batch, heads, q_len, head_dim = q.shape
    if q.numel() == 0:
        return
    kv_heads, kv_capacity = k.shape[1:3]
    rows = heads // kv_heads * q_len
    config = config or decode_config(head_dim, q.dtype, rows)
    row_blocks = triton.cdiv(rows, config.block_m)
    programs = batch * kv_heads * row_blocks
    splits = splits or num_splits(programs, kv_capacity, config.block_n, processors(q.device))
    launches["decode_forward/triton"] += 1
    mask = contiguous_mask(mask)
    if splits == 1:
        outs, lses = out[None], lse[None]
    else:
        outs = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
        lses = torch.empty((splits, *lse.shape), dtype=torch.float32, device=q.device)
    with on_device(q):
        _decode_split_kernel[(splits * kv_heads * row_blocks * batch,)](
            q, k, v, outs, lses, *mask[:3],
            q.stride(), k.stride(), v.stride(), outs.stride(), lses.stride(),
            q_len, kv_capacity, *mask_numbers(mask), scale, splits, kv_heads, heads // kv_heads, head_dim,
            **mask_flags(mask), WIDE=wide_rows(k, v), PRECISION=dot_precision(q.dtype),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_D=padded(head_dim),
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    if splits > 1:
        launch_merge(outs, lses, out, lse)
