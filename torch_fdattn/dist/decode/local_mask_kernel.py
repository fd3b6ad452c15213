"""`local_mask` in one launch: bounds of a batch (B,), int32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.sharding import ShardMap
from torch_fdattn.ops.launch import contiguous_mask, on_device
from torch_fdattn.ops.positions import FAR, Mask
from torch_fdattn.ops.tiles import keys_before

_FAR = tl.constexpr(FAR)


@triton.jit(do_not_specialize=["batch", "most", "capacity", "kv_start", "kv_block", "kv_stride"])
def _local_mask_kernel(
    kv_lens_ptr, q_start_ptr, kv_start_ptr, bounds_ptr, batch, most, capacity, q_len, kv_start, kv_block, kv_stride,
    POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """bounds (3, B): local kv_lens, and with POSITIONS q_start, kv_start."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = b < batch
    lengths = tl.load(kv_lens_ptr + b, mask=inside, other=0)
    lengths = tl.minimum(tl.maximum(lengths, 0), most).to(tl.int32)
    start = kv_start
    if kv_start_ptr is not None:
        start = tl.load(kv_start_ptr + b, mask=inside, other=0)
        start = tl.minimum(tl.maximum(start, -_FAR), _FAR).to(tl.int32)
    local = keys_before(lengths, start, kv_block, kv_stride, kv_start_ptr is None)
    tl.store(bounds_ptr + b, tl.minimum(local, capacity), mask=inside)
    if POSITIONS:
        q_start = lengths - q_len
        if q_start_ptr is not None:
            q_start = tl.load(q_start_ptr + b, mask=inside, other=0)
            q_start = tl.minimum(tl.maximum(q_start, -_FAR), _FAR).to(tl.int32)
        tl.store(bounds_ptr + batch + b, q_start, mask=inside)
        tl.store(bounds_ptr + 2 * batch + b, tl.zeros_like(q_start) + start, mask=inside)


def launch_local_mask(
    q: Tensor, mask: Mask, most: int, capacity: int, shards: ShardMap, positions: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(kv_lens, q_start, kv_start) of the rank; the last two unwritten where positions are not wanted."""
    batch = q.shape[0]
    bounds = torch.empty(3, batch, dtype=torch.int32, device=q.device)
    kv_lens, q_start, kv_start = (
        x if x is None else x.resolve_neg() for x in contiguous_mask(mask)[:3]
    )
    if batch:
        with on_device(q):
            _local_mask_kernel[(triton.cdiv(batch, 256),)](
                kv_lens, q_start, kv_start, bounds, batch, most, capacity, q.shape[2], shards.kv_start,
                shards.kv_block, shards.kv_stride, positions, 256, num_warps=1,
            )  # fmt: skip
    return bounds.unbind(0)
