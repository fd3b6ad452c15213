"""A KV cache whose positions are spread over the ranks of a group, or whole on one process.

Every rank is given all new tokens and keeps those that the `ShardMap` assigns to it; queries and
outputs are replicated. Lengths live on the device, so that steps can be captured in CUDA graphs; the
host keeps its own count to refuse an overflow and to say what is stored without waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fdattn.checks import DTYPES, HEAD_DIMS, expect_device, expect_dtype, expect_tensor
from torch_fdattn.dist.decode.op import STRATEGIES
from torch_fdattn.dist.functional import decode as sharded_decode
from torch_fdattn.dist.groups import rank_and_size
from torch_fdattn.dist.sharding import ShardMap
from torch_fdattn.functional import attention
from torch_fdattn.functional import decode as local_decode
from torch_fdattn.ops.decode.inputs import MAX_QUERY_TOKENS


class ShardedKVCache:
    """K and V of all layers for `batch` sequences of up to `capacity` tokens.

    One step over T new tokens is, for every layer, ``append(layer, k, v)`` and ``attend(layer, q)``, and
    then ``advance(T)``. T may be anything: one token, several that straddle a shard border, or a whole
    prompt over what is already stored (chunked prefill). Where the sequences of a batch store different
    numbers of tokens, or where the step is captured in a CUDA graph: `ragged_step`.

    It stores values, not graphs: no gradient flows into stored keys (`torch_fdattn.dist.decode` is the
    differentiable form).

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
        held: the same numbers on the host.
        shards: the positions that this rank holds.
    """

    def __init__(
        self, num_layers: int, batch: int, kv_heads: int, capacity: int, head_dim: int, *,
        dtype: torch.dtype, device: torch.device | str, group_name: str | None = None,
        kv_block: int | None = None, strategy: str = "all_gather",
    ) -> None:  # fmt: skip
        sizes = dict(num_layers=num_layers, batch=batch, kv_heads=kv_heads, capacity=capacity)
        for name, value in (sizes | dict(kv_block=kv_block)).items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if head_dim % 8 or not 16 <= head_dim <= 256:
            raise ValueError(f"head_dim must be {HEAD_DIMS}, got {head_dim}")
        if dtype not in DTYPES:
            raise TypeError(f"dtype must be one of {DTYPES}, got {dtype}")
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {STRATEGIES}, got {strategy!r}")
        rank, world_size = rank_and_size(group_name) if group_name is not None else (0, 1)
        # A block larger than the capacity holds it whole, as one of exactly that size does.
        kv_block = min(kv_block or -(-capacity // world_size), capacity)
        self.shards = ShardMap(rank, world_size, kv_block)
        self.num_layers, self.capacity = num_layers, capacity
        self.group_name, self.strategy = group_name, strategy
        self._slots = self.shards.local_capacity(capacity)
        # One row more than the shard: tokens of other ranks are written there, so that the shapes of
        # a write do not depend on whose token it is.
        shape = (num_layers, batch, kv_heads, self._slots + 1, head_dim)
        self._k = torch.zeros(shape, dtype=dtype, device=device)
        self._v = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.held = [0] * batch

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Stores the step's keys and values, k and v (batch, kv_heads, T, head_dim), of one layer.

        Raises:
            ValueError: other shapes or devices than the cache's, or more tokens than the capacity.
        """
        expect_tensor("k", k)
        tokens = k.shape[2] if k.dim() == 4 else 0  # any other shape is refused by _write
        if max(self.held) + tokens > self.capacity:
            raise ValueError(
                f"k must fit the cache's capacity of {self.capacity} tokens, "
                f"got {tokens} new tokens after {max(self.held)}"
            )
        self._write(layer, k, v, self._rows(self.lengths, tokens))

    def attend(
        self, layer: int, q: Tensor, *, scale: float | None = None,
        window: tuple[int, int] | None = None,
    ) -> Tensor:  # fmt: skip
        """Causal attention of the step's queries q (batch, heads, T, head_dim) over the whole cache.

        Call it after `append` of the same T tokens: they are among the keys.
        """
        expect_tensor("q", q)
        new = q.shape[2] if q.dim() == 4 else 0  # any other shape is refused by the op
        return self._attend(layer, q, self.lengths + new, scale, window)

    def advance(self, tokens: int) -> None:
        """Ends a step: the tokens appended to every layer now count as stored."""
        room = self.capacity - max(self.held)
        if not 0 <= tokens <= room:
            raise ValueError(f"tokens must be from 0 to {room}, got {tokens}")
        self.lengths += tokens
        self.held = [held + tokens for held in self.held]

    def reserve(self, counts: Sequence[int]) -> None:
        """Counts, on the host, the tokens that ragged steps are about to store for each sequence.

        Raises:
            ValueError: they do not fit; nothing is counted then.
        """
        for i, (held, count) in enumerate(zip(self.held, counts, strict=True)):
            if held + count > self.capacity:
                raise ValueError(
                    f"sequence {i} must fit the cache's capacity of {self.capacity} tokens, "
                    f"got {count} new tokens after {held}"
                )
        self.held = [held + count for held, count in zip(self.held, counts, strict=True)]

    def ragged_step(self, counts: Tensor, tokens: int) -> RaggedStep:
        """A step of `tokens` columns in which sequence b stores its last counts[b]; see `RaggedStep`."""
        return RaggedStep(self, counts, tokens)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """This rank's K and V of a layer, (batch, kv_heads, local capacity, head_dim), not copied."""
        return self._k[layer, :, :, : self._slots], self._v[layer, :, :, : self._slots]

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens of every sequence, and all of a shorter one."""
        if length < 0:
            raise ValueError(f"length must be at least 0, got {length}")
        self.lengths.clamp_(max=min(length, self.capacity))
        self.held = [min(held, length) for held in self.held]

    def reset(self) -> None:
        """Forgets all tokens; the storage stays."""
        self.truncate(0)

    @property
    def nbytes(self) -> int:
        """Bytes of K and V storage on this rank."""
        return self._k.nbytes + self._v.nbytes

    def bytes_used(self) -> int:
        """Bytes of K and V that hold tokens on this rank."""
        tokens = int(self.shards.local_lengths(torch.tensor(self.held)).sum())
        per_token = self._k.shape[0] * self._k.shape[2] * self._k.shape[4] * self._k.element_size()
        return 2 * tokens * per_token

    def _rows(self, starts: Tensor, tokens: int) -> Tensor:
        """Where columns that stand at starts, starts + 1, … are written: int64 (batch, tokens).

        Tokens of other ranks, columns whose position is already stored (padding) and positions past
        the capacity go to the spare row.
        """
        positions = starts[:, None] + torch.arange(tokens, device=starts.device)
        mine, index = self.shards.locate(positions)
        mine &= (positions >= self.lengths[:, None]) & (positions < self.capacity)
        return torch.where(mine, index, self._slots).long()

    @torch.no_grad()
    def _write(self, layer: int, k: Tensor, v: Tensor, rows: Tensor) -> None:
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer must be from 0 to {self.num_layers - 1}, got {layer}")
        expected = (*self._k.shape[1:3], k.shape[2] if k.dim() == 4 else "T", self._k.shape[4])
        for name, tensor in (("k", k), ("v", v)):
            expect_tensor(name, tensor)
            if tuple(tensor.shape) != expected:
                raise ValueError(f"{name} must have shape {expected}, got {tuple(tensor.shape)}")
            expect_dtype(name, tensor, self._k.dtype, "the cache")
            expect_device(name, tensor, self._k.device, "the cache")
        index = rows[:, None, :, None].expand_as(k)
        self._k[layer].scatter_(2, index, k)
        self._v[layer].scatter_(2, index, v)

    def _attend(
        self, layer: int, q: Tensor, lengths: Tensor, scale: float | None = None,
        window: tuple[int, int] | None = None,
    ) -> Tensor:  # fmt: skip
        """The queries are the last of `lengths` tokens."""
        k, v = self.layer(layer)
        if self.group_name is None:
            few = q.dim() == 4 and 1 <= q.shape[2] <= MAX_QUERY_TOKENS
            local = local_decode if few else attention
            return local(q, k, v, lengths, causal=True, scale=scale, window=window)[0]
        return sharded_decode(
            q, k, v, lengths, self.group_name, kv_block=self.shards.kv_block, scale=scale,
            window=window, strategy=self.strategy,
        )[0]  # fmt: skip


class RaggedStep:
    """A step of T columns in which sequence b stores its last counts[b], the rest being padding.

    With the padding on the left the new tokens of every sequence end in the last column: the queries are
    the last of the keys, as in any step, and the last column's logits are those of each last token.
    A padding column stands at a position that is already stored, so it is neither stored nor counted; a
    sequence with count 0 stays as it is. Takes the place of the cache in a model's forward.

    Nothing here depends on values on the host: the step can be captured in a CUDA graph and replayed with
    other counts. The host's count is `ShardedKVCache.reserve`, which the caller calls before each run.

    Attributes:
        lengths: int32 (batch,), the position of the first column; negative where it is padding.
    """

    def __init__(self, cache: ShardedKVCache, counts: Tensor, tokens: int) -> None:
        self._cache, self._counts = cache, counts
        self._ends = cache.lengths + counts
        self.lengths = self._ends - tokens
        self._rows = cache._rows(self.lengths, tokens)

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._cache._write(layer, k, v, self._rows)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        return self._cache._attend(layer, q, self._ends)

    def advance(self, tokens: int) -> None:
        self._cache.lengths += self._counts
