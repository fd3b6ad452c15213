"""From global lengths and positions to those of one rank's shard."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.dist.sharding import ShardMap
from torch_fdattn.ops.positions import FAR, Mask


def local_mask(
    q: Tensor, capacity: int, mask: Mask, kv_block: int | None, rank: int, world_size: int
) -> Mask:
    """The rank's own mask from the global one; `capacity` is that of its shard."""
    # With block sharding the whole capacity is known; otherwise lengths are trusted up to FAR.
    explicit = kv_block is not None or mask.kv_start is not None
    lengths = mask.kv_lens.clamp(0, FAR if explicit else world_size * capacity).int()
    q_start = lengths - q.shape[2] if mask.q_start is None else mask.q_start
    if mask.kv_start is not None:
        # An explicit contiguous shard: this rank's keys stand at kv_start, kv_start + 1, …
        local = (lengths - mask.kv_start.clamp(-FAR, FAR).int()).clamp(0, capacity)
        return mask._replace(kv_lens=local, q_start=q_start, kv_block=0, kv_stride=0)
    shards = ShardMap(rank, world_size, kv_block or max(capacity, 1))
    return mask._replace(
        kv_lens=shards.local_lengths(lengths).clamp(max=capacity),
        q_start=q_start,
        kv_start=torch.full_like(lengths, shards.kv_start),
        kv_block=shards.kv_block,
        kv_stride=shards.kv_stride,
    )
