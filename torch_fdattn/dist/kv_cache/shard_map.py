"""How the positions of one sequence are spread over the ranks of a group.

One map serves block and round-robin sharding: rank r of W holds, in order, the positions
``kv_start + (j // kv_block) · kv_stride + j % kv_block`` for j = 0, 1, …, with ``kv_start = r · kv_block``
and ``kv_stride = W · kv_block``. With kv_block equal to the shard's capacity the first block is the
whole shard (block sharding); with a small kv_block the blocks go round the ranks (round-robin), so
that every rank holds its share of the sequence at any length.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

from torch_fdattn.ops.positions import keys_before


class _Sizes(NamedTuple):
    rank: int
    world_size: int
    kv_block: int


class ShardMap(_Sizes):
    """The positions that one rank holds.

    Args:
        rank: from 0 to world_size - 1.
        world_size: ranks that share each sequence.
        kv_block: consecutive positions of a rank.

    Raises:
        ValueError: one of them is out of range; TypeError: no whole number.

    Examples:
        >>> shards = torch_fdattn.dist.ShardMap(rank=1, world_size=2, kv_block=4)
        >>> shards.local_lengths(torch.tensor([4, 6, 20]))  # of the positions 4 … 7, 12 … 15, …
        tensor([0, 2, 8])
        >>> shards.local_capacity(20)
        8
    """

    __slots__ = ()

    def __new__(cls, rank: int, world_size: int, kv_block: int) -> Self:
        for name, value in (("rank", rank), ("world_size", world_size), ("kv_block", kv_block)):
            if not isinstance(value, int | torch.SymInt) or isinstance(value, bool):
                raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank must be from 0 to {world_size - 1}, for a world_size of {world_size}, got {rank}"
            )
        if isinstance(kv_block, int) and kv_block < 1:  # not asked of symbolic sizes
            raise ValueError(f"kv_block must be at least 1, got {kv_block}")
        return super().__new__(cls, rank, world_size, kv_block)

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
