"""From global lengths and positions to those of one rank's shard.

The decode kernels cut global lengths themselves (`kernel_mask`); in traces, for the CPU reference, and for more
query tokens than decode takes, torch does it before the call (`local_mask`), in half a dozen launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.dist.kv_cache.shard_map import ShardMap
from torch_fdattn.ops.decode.inputs import GlobalLengths
from torch_fdattn.ops.positions import FAR, Mask


def _map_of(
    capacity: int, mask: Mask, kv_block: int | None, rank: int, world_size: int
) -> tuple[ShardMap, int]:
    """(where the rank's keys stand unless kv_start says it, keys of a sequence at most)."""
    # With block sharding the whole capacity is known; otherwise lengths are trusted up to FAR.
    explicit = kv_block is not None or mask.kv_start is not None
    most = FAR if explicit else world_size * capacity
    return ShardMap(rank, world_size, kv_block or max(capacity, 1)), most


def kernel_mask(
    q: Tensor, capacity: int, mask: Mask, kv_block: int | None, rank: int, world_size: int, alibi: bool
) -> tuple[Mask, GlobalLengths]:  # fmt: skip
    """The global mask as the decode kernels take it for this rank's shard; alibi: scores have a bias."""
    shards, most = _map_of(capacity, mask, kv_block, rank, world_size)
    whole = GlobalLengths(shards.kv_start, shards.kv_block, shards.kv_stride, most)
    # One query that is the last key sees all keys, wherever they stand.
    last = q.shape[2] == 1 and mask.q_start is None
    if not alibi and mask.window_left < 0 and (mask.window_right < 0 or last):
        return mask._replace(q_start=None, window_right=-1, kv_block=0, kv_stride=0), whole
    if mask.kv_start is not None:  # an explicit contiguous shard
        return mask._replace(kv_block=0, kv_stride=0), whole
    return mask._replace(kv_block=shards.kv_block, kv_stride=shards.kv_stride), whole


def local_mask(
    q: Tensor, capacity: int, mask: Mask, kv_block: int | None, rank: int, world_size: int
) -> Mask:
    """The rank's own mask from the global one; `capacity` is that of its shard."""
    shards, most = _map_of(capacity, mask, kv_block, rank, world_size)
    lengths = mask.kv_lens.clamp(0, most).int()
    q_start = lengths - q.shape[2] if mask.q_start is None else mask.q_start
    if mask.kv_start is not None:
        # An explicit contiguous shard: this rank's keys stand at kv_start, kv_start + 1, …
        local = (lengths - mask.kv_start.clamp(-FAR, FAR).int()).clamp(0, capacity)
        return mask._replace(kv_lens=local, q_start=q_start, kv_block=0, kv_stride=0)
    return mask._replace(
        kv_lens=shards.local_lengths(lengths).clamp(max=capacity),
        q_start=q_start,
        kv_start=torch.full_like(lengths, shards.kv_start),
        kv_block=shards.kv_block,
        kv_stride=shards.kv_stride,
    )
