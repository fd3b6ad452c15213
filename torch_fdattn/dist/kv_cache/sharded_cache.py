"""KV caches whose positions are spread over the ranks of a group, or whole on one process.

Every rank is given all new tokens and keeps those that the `ShardMap` assigns to it; queries and
outputs are replicated. New tokens go through the append ops, quantised where asked for: what a rank keeps of
consecutive positions is consecutive in its shard too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.dist.decode import rank_invariant
from torch_fdattn.dist.decode.inputs import runs_decode
from torch_fdattn.dist.decode.op import check_strategy
from torch_fdattn.dist.functional import decode as sharded_decode
from torch_fdattn.dist.groups import Group, name_of, pair_of_names, rank_and_size
from torch_fdattn.dist.kv_cache.batch_cache import (
    BatchKVCache,
    Columns,
    aligned,
    expect_positive,
)
from torch_fdattn.dist.kv_cache.shard_map import ShardMap
from torch_fdattn.dist.state_tree import expect_block
from torch_fdattn.functional import append_kv
from torch_fdattn.functional import decode as local_decode
from torch_fdattn.ops.append_kv.arguments import Append
from torch_fdattn.ops.append_kv.reference import append_slices
from torch_fdattn.ops.decode.inputs import MAX_QUERY_TOKENS
from torch_fdattn.ops.library import INTERPRET, can_bypass_dispatcher
from torch_fdattn.ops.positions import key_positions


class _Share(NamedTuple):
    """`Columns.places` of a rank: which of a step's tokens it keeps, and where."""

    begins: (
        Tensor  # (B,) tokens that it holds before the step, which is where the first new one goes
    )
    counts: Tensor  # (B,) tokens of the step that it keeps
    columns: (
        Tensor | None
    )  # (B, 1, rows, 1) the column of the first, second, … of them; None: there is one


class SharedKVCache(BatchKVCache):
    """A `BatchKVCache` whose positions a group may share; how a rank stores its own is its subclasses' matter.

    Args:
        group: the process group that shares the cache: itself, its name or a DeviceMesh of one dimension;
            None keeps all of it here.
        kv_block: None for block sharding (each rank one contiguous run of positions), else positions go
            round the ranks in blocks of this many.
        strategy, hierarchy, invariant_block: of `torch_fdattn.dist.decode`.

    Attributes:
        shards: the positions that this rank holds.
        invariant_block: keys of a block, or None.
    """

    def __init__(
        self, *sizes: int, dtype: torch.dtype, device: torch.device | str, kv_dtype: str | None,
        group: Group, kv_block: int | None, strategy: str,
        hierarchy: tuple[Group, Group] | None, invariant_block: int | None,
    ) -> None:  # fmt: skip
        super().__init__(*sizes, dtype=dtype, device=device, kv_dtype=kv_dtype)
        if kv_block is not None:
            expect_positive("kv_block", kv_block)
        hierarchy = pair_of_names(hierarchy)
        check_strategy(strategy, hierarchy)
        _check_invariant(invariant_block, kv_block, strategy, group)
        rank, world_size = 0, 1
        group_name = None
        if group is not None:
            group_name = name_of(group)
            rank, world_size = rank_and_size(group_name)
        # A block larger than the capacity holds it whole, as one of exactly that size does.
        of_one = _multiple(self.capacity, invariant_block)
        own = _multiple(-(-self.capacity // world_size), invariant_block)
        kv_block = min(kv_block or own, of_one)
        self.shards = ShardMap(rank, world_size, kv_block)
        self.invariant_block = invariant_block
        self.group_name, self.strategy, self.hierarchy = group_name, strategy, hierarchy

    @property
    def _fullest(self) -> ShardMap:
        """The map of rank 0, which holds the most tokens at any length."""
        return self.shards._replace(rank=0)

    def _local_capacity(self, length: int) -> int:
        """Rows of this rank's shard that hold its part of as many tokens: with invariant_block whole blocks, on all ranks
        as many.
        """
        if self.invariant_block is None:
            return self.shards.local_capacity(length)
        return _multiple(self._fullest.local_capacity(length), self.invariant_block)

    def bytes_used(self) -> int:
        """Bytes of K and V that hold tokens on this rank."""
        _, kv_heads, _, head_dim = self._new_shape
        per_token = self.num_layers * kv_heads * head_dim * self.stored_dtype.itemsize
        return 2 * sum(map(self.shards.local_capacity, self.held)) * per_token

    def _places(self, starts: Tensor, counts: Tensor | None, tokens: int) -> Tensor | _Share | None:
        """`Columns.places`, for columns that stand at starts, starts + 1, …"""
        if self.group_name is None:
            return super()._places(starts, counts, tokens)
        ends = self.lengths + (tokens if counts is None else counts)
        begins = self.shards.local_lengths(self.lengths)
        kept = self.shards.local_lengths(ends.clamp(max=self.capacity)) - begins
        if tokens == 1:
            return _Share(begins, kept, None)
        rounds, rest = divmod(tokens, self.shards.kv_stride)
        most = rounds * self.shards.kv_block + min(rest, self.shards.kv_block)
        slots = begins[:, None] + torch.arange(most, dtype=torch.int32, device=starts.device)
        shards = self.shards
        positions = key_positions(slots, shards.kv_start, shards.kv_block, shards.kv_stride)
        columns = positions - starts[:, None]
        return _Share(begins, kept, columns.clamp(0, tokens - 1).long()[:, None, :, None])

    def _kept(
        self, k: Tensor, v: Tensor, columns: Columns
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The append ops' k, v, kv_lens and new_lens: what of a step this rank keeps."""
        share = columns.places
        if not isinstance(share, _Share):
            return *aligned(columns, k, v), self.lengths, columns.counts
        if share.columns is not None:
            k, v = (x.take_along_dim(share.columns, 2) for x in (k, v))
        return k, v, share.begins, share.counts

    def _attend(
        self, layer: int, q: Tensor, lengths: Tensor, longest: int, **options
    ) -> Tensor:  # fmt: skip
        if self.group_name is None:
            return super()._attend(layer, q, lengths, longest, **options)
        if q.dim() == 4 and runs_decode(q):
            shard = dict(self._shard(layer), **self._scales_of(layer))
        else:
            if options.get("softcap"):
                raise NotImplementedError(
                    f"softcap over a cache that ranks share takes passes of 1 to {MAX_QUERY_TOKENS} query tokens, got "
                    f"softcap {options['softcap']} and {q.shape[2]} tokens: give it {MAX_QUERY_TOKENS} at a time, or take "
                    "engine.LLM, whose chunks have a softcap"
                )
            k, v = self._contiguous(layer, self._local_capacity(longest), q.dtype)
            shard = dict(k_shard=k, v_shard=v)
        return sharded_decode(
            q, kv_lens=lengths, group=self.group_name, kv_block=self.shards.kv_block,
            strategy=self.strategy, hierarchy=self.hierarchy, invariant_block=self.invariant_block,
            **options, **shard,
        )[0]  # fmt: skip

    def _shard(self, layer: int) -> dict[str, Tensor]:
        """`dist.decode`'s arguments k_shard, v_shard and, for pages, page_table."""
        raise NotImplementedError


def _check_invariant(block: int | None, kv_block: int | None, strategy: str, group: Group) -> None:
    expect_block(block)
    if block is None:
        return
    rank_invariant.check_strategy(strategy)
    if group is None:
        raise ValueError(
            "group must be a process group with invariant_block, of this process alone for a cache that is not shared, got None"
        )
    if kv_block is not None and kv_block % block:
        raise ValueError(f"kv_block must be a multiple of invariant_block={block}, got {kv_block}")


def _multiple(length: int, block: int | None) -> int:
    """The next multiple of a block, if there are blocks."""
    return length if block is None else -(-length // block) * block


class ShardedKVCache(SharedKVCache):
    """K and V of all layers for `batch` sequences of up to `capacity` tokens, contiguous on each rank.

    Steps are those of `BatchKVCache`; a step's tokens may straddle a shard border. No gradient flows into
    stored keys (`torch_fdattn.dist.decode` is the differentiable form).

    Args:
        num_layers, batch, kv_heads, head_dim: the model's shape.
        capacity: tokens a sequence, over all ranks.
        dtype, device: of the keys and values.
        group: the process group that shares the cache: itself, its name or a DeviceMesh of one dimension;
            None keeps all of it here.
        kv_block: None for block sharding (each rank one contiguous run of positions), else positions go
            round the ranks in blocks of this many.
        strategy, hierarchy: of `torch_fdattn.dist.decode`.
        invariant_block: of `torch_fdattn.dist.decode`: results have the same bits on any number of ranks, 1 included, with
            any kv_block that is a multiple of it (1024, say; kv_block None is rounded up to one). It needs a group.
        kv_dtype: None stores in dtype; "fp8_e4m3", "fp8_e5m2" or "int8" in a byte, with the scales of
            `torch_fdattn.dist.kv_cache.scales`: from all new tokens, so the same on every rank.

    Attributes:
        lengths: int32 (batch,) on the device, tokens stored before the current step.
        held: the same numbers on the host.
        shards: the positions that this rank holds.
        scales: the `KVScales` of a quantised cache, else None.

    Examples:
        >>> cache = torch_fdattn.dist.ShardedKVCache(
        ...     1, 2, 2, 256, 16, dtype=torch.float32, device="cpu",
        ...     group=torch.distributed.group.WORLD, kv_block=16,
        ... )
        >>> q, k, v = torch.randn(2, 4, 8, 16), *torch.randn(2, 2, 2, 8, 16)  # 8 tokens, the same on all ranks
        >>> cache.append(0, k, v)
        >>> cache.attend(0, q).shape
        torch.Size([2, 4, 8, 16])
        >>> cache.advance(8)
        >>> cache.held
        [8, 8]
    """

    def __init__(
        self, num_layers: int, batch: int, kv_heads: int, capacity: int, head_dim: int, *,
        dtype: torch.dtype, device: torch.device | str, group: Group = None,
        kv_block: int | None = None, strategy: str = "auto", kv_dtype: str | None = None,
        hierarchy: tuple[Group, Group] | None = None, invariant_block: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            num_layers, batch, kv_heads, capacity, head_dim, dtype=dtype, device=device,
            kv_dtype=kv_dtype, group=group, kv_block=kv_block, strategy=strategy,
            hierarchy=hierarchy, invariant_block=invariant_block,
        )  # fmt: skip
        shape = (num_layers, batch, kv_heads, self._local_capacity(capacity), head_dim)
        self._k = torch.zeros(shape, dtype=self.stored_dtype, device=device)
        self._v = torch.zeros(shape, dtype=self.stored_dtype, device=device)
        # Once: a view takes the host as long as a launch.
        self._layers = [(self._k[i], self._v[i]) for i in range(num_layers)]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """This rank's K and V of a layer, (batch, kv_heads, local capacity, head_dim), not copied."""
        # A graph is given the storage, not views of it that overlap.
        if torch.compiler.is_compiling():
            return self._k[layer], self._v[layer]
        return self._layers[layer]

    def _store(self, layer: int, k: Tensor, v: Tensor, columns: Columns) -> None:
        k, v, *lengths = self._kept(k, v, columns)
        plain = torch.is_inference_mode_enabled() and k.is_cpu and self.scales is None
        if plain and not (INTERPRET or checks.CHECK_VALUES) and can_bypass_dispatcher(k, v):
            # As append_kv would, without its checks, which `_write` has made: 30 µs of a layer's step. In inference mode
            # alone: outside of it, torch refuses to write to a cache that was made in it, and append_kv does not.
            append_slices(Append(*self.layer(layer), None, k, v, *lengths))
        else:
            append_kv(*self.layer(layer), k, v, *lengths, **self._scales_of(layer))

    def _shard(self, layer: int) -> dict[str, Tensor]:
        k, v = self.layer(layer)
        return dict(k_shard=k, v_shard=v)

    def _decode(self, layer: int, q: Tensor, lengths: Tensor, **options) -> Tensor:
        return local_decode(q, *self.layer(layer), lengths, **options)[0]

    def _contiguous(self, layer: int, longest: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        k, v = self.layer(layer)
        if self.scales is None:
            return k, v  # the kernel stops at each length by itself
        return self._dequantised(layer, k[:, :, :longest], v[:, :, :longest], dtype)
