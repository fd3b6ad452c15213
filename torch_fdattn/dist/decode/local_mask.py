"""From global lengths and positions to those of one rank's shard.

Where kernels run, one small launch does it; otherwise, and in traces, torch does, in half a dozen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.dist.groups import is_traced
from torch_fdattn.dist.sharding import ShardMap
from torch_fdattn.ops.library import use_triton
from torch_fdattn.ops.positions import FAR, Mask


def local_mask(
    q: Tensor, capacity: int, mask: Mask, kv_block: int | None, rank: int, world_size: int, alibi: bool = False
) -> Mask:  # fmt: skip
    """The rank's own mask from the global one; `capacity` is that of its shard; alibi: scores have a bias."""
    # With block sharding the whole capacity is known; otherwise lengths are trusted up to FAR.
    explicit = kv_block is not None or mask.kv_start is not None
    most = FAR if explicit else world_size * capacity
    shards = ShardMap(rank, world_size, kv_block or max(capacity, 1))
    # One query that is the last key sees all keys, wherever they stand.
    last = q.shape[2] == 1 and mask.q_start is None
    positions = alibi or mask.window_left >= 0 or (mask.window_right >= 0 and not last)
    if not positions:
        mask = mask._replace(window_right=-1)
    if use_triton(q) and not is_traced(q):
        from torch_fdattn.dist.decode.local_mask_kernel import launch_local_mask

        bounds = launch_local_mask(q, mask, most, capacity, shards, positions)
    else:
        bounds = _local_bounds(q, mask, most, capacity, shards)
    if not positions:
        return Mask(bounds[0], None, None, -1, -1, 0, 0)
    if mask.kv_start is not None:  # an explicit contiguous shard
        return mask._replace(kv_lens=bounds[0], q_start=bounds[1], kv_block=0, kv_stride=0)
    return Mask(*bounds, *mask[3:5], shards.kv_block, shards.kv_stride)


def _local_bounds(
    q: Tensor, mask: Mask, most: int, capacity: int, shards: ShardMap
) -> tuple[Tensor, Tensor, Tensor]:
    """(kv_lens, q_start, kv_start) of the rank."""
    lengths = mask.kv_lens.clamp(0, most).int()
    q_start = lengths - q.shape[2] if mask.q_start is None else mask.q_start
    if mask.kv_start is not None:
        local = (lengths - mask.kv_start.clamp(-FAR, FAR).int()).clamp(0, capacity)
        return local, q_start, mask.kv_start
    local = shards.local_lengths(lengths).clamp(max=capacity)
    return local, q_start, torch.full_like(lengths, shards.kv_start)
