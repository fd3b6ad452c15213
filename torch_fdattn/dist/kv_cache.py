"""A KV cache whose positions are spread over the ranks of a group, or whole on one process.

Every rank is given all new tokens and keeps those that the `ShardMap` assigns to it; queries and
outputs are replicated. Lengths live on the device, so that steps can be captured in CUDA graphs; the
host keeps its own count only to refuse an overflow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.checks import expect_device, expect_dtype
from torch_fdattn.dist.decode.op import STRATEGIES
from torch_fdattn.dist.functional import decode as sharded_decode
from torch_fdattn.dist.groups import rank_and_size
from torch_fdattn.dist.sharding import ShardMap
from torch_fdattn.functional import attention
from torch_fdattn.functional import decode as local_decode
from torch_fdattn.ops.decode.op import MAX_QUERY_TOKENS


class ShardedKVCache:
    """K and V of all layers for `batch` sequences of up to `capacity` tokens.

    One step over T new tokens is, for every layer, ``append(layer, k, v)`` and ``attend(layer, q)``, and
    then ``advance(T)``. T may be anything: one token, several that straddle a shard border, or a whole
    prompt over what is already stored (chunked prefill).

    Args:
        num_layers, batch, kv_heads, head_dim: the model's shape.
        capacity: tokens a sequence, over all ranks.
        dtype, device: of the storage.
        group_name: the process group that shares the cache; None keeps all of it here.
        kv_block: None for block sharding (each rank one contiguous run of positions), else positions go
            round the ranks in blocks of this many.
        strategy: of `torch_fdattn.dist.decode`.

    Attributes:
        lengths: int32 (batch,) on the device, tokens stored before the current step.
        shards: the positions that this rank holds.
    """

    def __init__(
        self, num_layers: int, batch: int, kv_heads: int, capacity: int, head_dim: int, *,
        dtype: torch.dtype, device: torch.device | str, group_name: str | None = None,
        kv_block: int | None = None, strategy: str = "all_gather",
    ) -> None:  # fmt: skip
        for name, value in (("capacity", capacity), ("kv_block", kv_block)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {STRATEGIES}, got {strategy!r}")
        rank, world_size = rank_and_size(group_name) if group_name is not None else (0, 1)
        # A block larger than the capacity holds it whole, as one of exactly that size does.
        kv_block = min(kv_block or -(-capacity // world_size), capacity)
        self.shards = ShardMap(rank, world_size, kv_block)
        self.capacity, self.group_name, self.strategy = capacity, group_name, strategy
        self._slots = self.shards.local_capacity(capacity)
        # One row more than the shard: tokens of other ranks are written there, so that the shapes of
        # a write do not depend on whose token it is.
        shape = (num_layers, batch, kv_heads, self._slots + 1, head_dim)
        self._k = torch.zeros(shape, dtype=dtype, device=device)
        self._v = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self._host_length = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Stores the step's keys and values, k and v (batch, kv_heads, T, head_dim), of one layer.

        Raises:
            ValueError: other shapes or devices than the cache's, or more tokens than the capacity.
        """
        expected = (*self._k.shape[1:3], k.shape[2] if k.dim() == 4 else "T", self._k.shape[4])
        for name, tensor in (("k", k), ("v", v)):
            if tuple(tensor.shape) != expected:
                raise ValueError(f"{name} must have shape {expected}, got {tuple(tensor.shape)}")
            expect_dtype(name, tensor, self._k.dtype, "the cache")
            expect_device(name, tensor, self._k.device, "the cache")
        tokens = k.shape[2]
        if self._host_length + tokens > self.capacity:
            raise ValueError(
                f"k must fit the cache's capacity of {self.capacity} tokens, "
                f"got {tokens} new tokens after {self._host_length}"
            )
        positions = self.lengths[:, None] + torch.arange(tokens, device=k.device)
        mine, index = self.shards.locate(positions)
        index = torch.where(mine & (positions < self.capacity), index, self._slots).long()
        index = index[:, None, :, None].expand_as(k)
        self._k[layer].scatter_(2, index, k)
        self._v[layer].scatter_(2, index, v)

    def attend(
        self, layer: int, q: Tensor, *, scale: float | None = None,
        window: tuple[int, int] | None = None,
    ) -> Tensor:  # fmt: skip
        """Causal attention of the step's queries q (batch, heads, T, head_dim) over the whole cache.

        Call it after `append` of the same T tokens: they are among the keys.
        """
        k, v = self.layer(layer)
        lengths = self.lengths + q.shape[2]
        if self.group_name is None:
            local = local_decode if 1 <= q.shape[2] <= MAX_QUERY_TOKENS else attention
            return local(q, k, v, lengths, causal=True, scale=scale, window=window)[0]
        return sharded_decode(
            q, k, v, lengths, self.group_name, kv_block=self.shards.kv_block, scale=scale,
            window=window, strategy=self.strategy,
        )[0]  # fmt: skip

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """This rank's K and V of a layer, (batch, kv_heads, local capacity, head_dim), not copied."""
        return self._k[layer, :, :, : self._slots], self._v[layer, :, :, : self._slots]

    def advance(self, tokens: int) -> None:
        """Ends a step: the tokens appended to every layer now count as stored."""
        if not 0 <= tokens <= self.capacity - self._host_length:
            raise ValueError(
                f"tokens must be from 0 to {self.capacity - self._host_length}, got {tokens}"
            )
        self.lengths += tokens
        self._host_length += tokens

    def reset(self) -> None:
        """Forgets all tokens; the storage stays."""
        self.lengths.zero_()
        self._host_length = 0

    @property
    def nbytes(self) -> int:
        """Bytes of K and V storage on this rank."""
        return self._k.nbytes + self._v.nbytes

    def bytes_used(self) -> int:
        """Bytes of K and V that hold tokens on this rank; waits for the device."""
        tokens = int(self.shards.local_lengths(self.lengths).sum())
        per_token = self._k.shape[0] * self._k.shape[2] * self._k.shape[4] * self._k.element_size()
        return 2 * tokens * per_token
