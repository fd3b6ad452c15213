"""A KV cache whose positions are spread over the ranks of a group, or whole on one process.

Every rank is given all new tokens and keeps those that the `ShardMap` assigns to it; queries and
outputs are replicated. On one process new tokens go through `append_kv`, quantised where asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.dist.batch_cache import BatchKVCache, Columns, aligned, expect_at_least_one
from torch_fdattn.dist.decode.op import STRATEGIES
from torch_fdattn.dist.functional import decode as sharded_decode
from torch_fdattn.dist.groups import rank_and_size
from torch_fdattn.dist.sharding import ShardMap
from torch_fdattn.functional import append_kv
from torch_fdattn.functional import decode as local_decode


class ShardedKVCache(BatchKVCache):
    """K and V of all layers for `batch` sequences of up to `capacity` tokens, contiguous on each rank.

    Steps are those of `BatchKVCache`; a step's tokens may straddle a shard border. No gradient flows into
    stored keys (`torch_fdattn.dist.decode` is the differentiable form).

    Args:
        num_layers, batch, kv_heads, head_dim: the model's shape.
        capacity: tokens a sequence, over all ranks.
        dtype, device: of the keys and values.
        group_name: the process group that shares the cache; None keeps all of it here.
        kv_block: None for block sharding (each rank one contiguous run of positions), else positions go
            round the ranks in blocks of this many.
        strategy: of `torch_fdattn.dist.decode`.
        kv_dtype: None stores in dtype; "fp8_e4m3", "fp8_e5m2" or "int8" in a byte, with the scales of
            `torch_fdattn.dist.kv_scales`. Only without a group: `dist.decode` takes no scales.

    Attributes:
        lengths: int32 (batch,) on the device, tokens stored before the current step.
        held: the same numbers on the host.
        shards: the positions that this rank holds.
        scales: the `KVScales` of a quantised cache, else None.
    """

    def __init__(
        self, num_layers: int, batch: int, kv_heads: int, capacity: int, head_dim: int, *,
        dtype: torch.dtype, device: torch.device | str, group_name: str | None = None,
        kv_block: int | None = None, strategy: str = "all_gather", kv_dtype: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            num_layers, batch, kv_heads, capacity, head_dim, dtype=dtype, device=device,
            kv_dtype=kv_dtype,
        )  # fmt: skip
        if kv_block is not None:
            expect_at_least_one("kv_block", kv_block)
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {STRATEGIES}, got {strategy!r}")
        rank, world_size = rank_and_size(group_name) if group_name is not None else (0, 1)
        if kv_dtype is not None and group_name is not None:
            raise NotImplementedError(
                f"kv_dtype must be None where a group shares the cache, got {kv_dtype!r}"
            )
        # A block larger than the capacity holds it whole, as one of exactly that size does.
        kv_block = min(kv_block or -(-capacity // world_size), capacity)
        self.shards = ShardMap(rank, world_size, kv_block)
        self.group_name, self.strategy = group_name, strategy
        self._slots = self.shards.local_capacity(capacity)
        # One row more than the shard: tokens of other ranks are written there, so that the shapes of
        # a write do not depend on whose token it is.
        shape = (num_layers, batch, kv_heads, self._slots + 1, head_dim)
        self._k = torch.zeros(shape, dtype=self.stored_dtype, device=device)
        self._v = torch.zeros(shape, dtype=self.stored_dtype, device=device)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """This rank's K and V of a layer, (batch, kv_heads, local capacity, head_dim), not copied."""
        return self._k[layer, :, :, : self._slots], self._v[layer, :, :, : self._slots]

    def bytes_used(self) -> int:
        """Bytes of K and V that hold tokens on this rank."""
        tokens = int(self.shards.local_lengths(torch.tensor(self.held)).sum())
        per_token = self._k.shape[0] * self._k.shape[2] * self._k.shape[4] * self._k.element_size()
        return 2 * tokens * per_token

    def _places(self, starts: Tensor, counts: Tensor | None, tokens: int) -> Tensor | None:
        """Where columns that stand at starts, starts + 1, … are written: int64 (batch, tokens).

        Tokens of other ranks, columns whose position is already stored (padding) and positions past
        the capacity go to the spare row.
        """
        if self.group_name is None:
            return super()._places(starts, counts, tokens)
        positions = starts[:, None] + torch.arange(tokens, device=starts.device)
        mine, index = self.shards.locate(positions)
        mine &= (positions >= self.lengths[:, None]) & (positions < self.capacity)
        return torch.where(mine, index, self._slots).long()

    def _store(self, layer: int, k: Tensor, v: Tensor, columns: Columns) -> None:
        if self.group_name is None:
            append_kv(
                *self.layer(layer), *aligned(columns, k, v), self.lengths, columns.counts,
                **self._scales_of(layer),
            )  # fmt: skip
            return
        index = columns.places[:, None, :, None].expand_as(k)
        self._k[layer].scatter_(2, index, k)
        self._v[layer].scatter_(2, index, v)

    def _attend(
        self, layer: int, q: Tensor, lengths: Tensor, longest: int, scale: float | None = None,
        window: tuple[int, int] | None = None,
    ) -> Tensor:  # fmt: skip
        if self.group_name is None:
            return super()._attend(layer, q, lengths, longest, scale, window)
        return sharded_decode(
            q, *self.layer(layer), lengths, self.group_name, kv_block=self.shards.kv_block,
            scale=scale, window=window, strategy=self.strategy,
        )[0]  # fmt: skip

    def _decode(self, layer: int, q: Tensor, lengths: Tensor, **options) -> Tensor:
        return local_decode(q, *self.layer(layer), lengths, **options)[0]

    def _contiguous(self, layer: int, longest: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        k, v = self.layer(layer)
        if self.scales is None:
            return k, v  # the kernel stops at each length by itself
        return self._dequantised(layer, k[:, :, :longest], v[:, :, :longest], dtype)
