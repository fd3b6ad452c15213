"""Which query heads and which key-value heads a tensor-parallel rank holds.

Query heads come in groups that share one KV head, and a group is kept whole: the KV heads are dealt as
evenly as possible, the remainder to the first ranks, and the query heads follow (9/3 heads on 2 ranks:
6/2 and 3/1). With more ranks than KV heads, the ranks are dealt to the KV heads instead: each KV head
is kept by several ranks, which split its query heads between them (8/2 heads on 3 ranks: 2/1, 2/1 and
4/1).
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import NamedTuple

from torch_fdattn.dist.collectives import split_evenly


class HeadShard(NamedTuple):
    """The heads of one rank: contiguous runs [start, start + count)."""

    q_start: int
    q_heads: int
    kv_start: int
    kv_heads: int
    replicated: bool  # whether some KV head is kept by more than one rank


def shard_heads(heads: int, kv_heads: int, rank: int, world_size: int) -> HeadShard:
    """The share of `rank` in a group of `world_size`.

    Raises:
        ValueError: heads is no positive multiple of kv_heads, or there are fewer query heads than ranks.
    """
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(
            f"heads must be a positive multiple of kv_heads, got {heads} and {kv_heads}"
        )
    if heads < world_size:
        raise ValueError(
            f"heads must be at least the number of ranks, so that each has a query head, got {heads} "
            f"heads on {world_size} ranks"
        )
    group = heads // kv_heads
    if world_size <= kv_heads:
        shares = split_evenly(kv_heads, world_size)
        start = sum(shares[:rank])
        return HeadShard(start * group, shares[rank] * group, start, shares[rank], False)
    ends = list(
        accumulate(split_evenly(world_size, kv_heads))
    )  # past the last rank of each KV head
    kv_head = bisect_right(ends, rank)
    first = ends[kv_head - 1] if kv_head else 0
    shares = split_evenly(group, ends[kv_head] - first)
    start = kv_head * group + sum(shares[: rank - first])
    return HeadShard(start, shares[rank - first], kv_head, 1, True)
