"""How the positions of one sequence are spread over the ranks of a group.

One map serves block and round-robin sharding: rank r of W holds, in order, the positions
``kv_start + (j // kv_block) · kv_stride + j % kv_block`` for j = 0, 1, …, with ``kv_start = r · kv_block``
and ``kv_stride = W · kv_block``. With kv_block equal to the shard's capacity the first block is the
whole shard (block sharding); with a small kv_block the blocks go round the ranks (round-robin), so
that every rank holds its share of the sequence at any length.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn.ops.positions import keys_before


class ShardMap(NamedTuple):
    """The positions that one rank holds.

    Examples:
        >>> shards = torch_fdattn.dist.ShardMap(rank=1, world_size=2, kv_block=4)
        >>> shards.local_lengths(torch.tensor([4, 6, 20]))  # of the positions 4 … 7, 12 … 15, …
        tensor([0, 2, 8])
        >>> shards.local_capacity(20)
        8
    """

    rank: int
    world_size: int
    kv_block: int

    @property
    def kv_start(self) -> int:
        return self.rank * self.kv_block

    @property
    def kv_stride(self) -> int:
        return self.world_size * self.kv_block

    def local_lengths(self, lengths: Tensor) -> Tensor:
        """How many of the first `lengths` positions this rank holds; same dtype, elementwise."""
        return keys_before(lengths, self.kv_start, self.kv_block, self.kv_stride)

    def locate(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(whether this rank holds each position, its local index there)."""
        block = torch.div(positions, self.kv_block, rounding_mode="floor")
        mine = block % self.world_size == self.rank
        round_ = torch.div(block, self.world_size, rounding_mode="floor")
        return mine, round_ * self.kv_block + positions % self.kv_block

    def local_capacity(self, capacity: int) -> int:
        """Storage that this rank needs for sequences of up to `capacity` positions."""
        full, rest = divmod(capacity, self.kv_stride)
        return full * self.kv_block + min(max(rest - self.kv_start, 0), self.kv_block)
