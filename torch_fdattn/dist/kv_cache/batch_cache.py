"""What all KV caches have in common: steps of a batch, lengths on the device and on the host, scales.

How a cache stores and finds its tokens is its own matter: contiguous on one process or spread over many
(`ShardedKVCache`), or in pages (`torch_fdattn.engine.PagedKVCache`).

Lengths live on the device, so that steps can be captured in CUDA graphs; the host keeps its own count to
refuse an overflow and to say what is stored without waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn.checks import DTYPES, HEAD_DIMS, expect_device, expect_dtype, expect_tensor
from torch_fdattn.dist.kv_cache.scales import KVScales, kv_format
from torch_fdattn.functional import attention
from torch_fdattn.ops.decode.inputs import MAX_QUERY_TOKENS


class Columns(NamedTuple):
    """The T columns of a step: sequence b stores its last counts[b], or all where counts is None."""

    starts: Tensor  # (B,) position of the first column; negative where it is padding
    counts: Tensor | None
    places: Tensor | None  # what the cache derives from them, once for all layers

    def real(self, tokens: int) -> Tensor | None:
        """Which columns are no padding, (B, T); None: all."""
        if self.counts is None:
            return None
        column = torch.arange(tokens, device=self.counts.device)
        return column >= tokens - self.counts[:, None]


class BatchKVCache:
    """K and V of all layers for `batch` sequences of up to `capacity` tokens; see its subclasses.

    One step over T new tokens is, for every layer, ``append(layer, k, v)`` and ``attend(layer, q)``, and
    then ``advance(T)``. T may be anything: one token, several, or a whole prompt over what is already
    stored (chunked prefill). Where the sequences of a batch store different numbers of tokens, or where
    the step is captured in a CUDA graph: `ragged_step`.

    It stores values, not graphs: no gradient flows into stored keys.

    Attributes:
        lengths: int32 (batch,) on the device, tokens stored before the current step.
        held: the same numbers on the host.
        scales: the `KVScales` of a quantised cache, else None.
    """

    def __init__(
        self, num_layers: int, batch: int, kv_heads: int, capacity: int, head_dim: int, *,
        dtype: torch.dtype, device: torch.device | str, kv_dtype: str | None,
    ) -> None:  # fmt: skip
        sizes = dict(num_layers=num_layers, batch=batch, kv_heads=kv_heads, capacity=capacity)
        for name, value in sizes.items():
            expect_positive(name, value)
        if head_dim % 8 or not 16 <= head_dim <= 256:
            raise ValueError(f"head_dim must be {HEAD_DIMS}, got {head_dim}")
        if dtype not in DTYPES:
            raise TypeError(f"dtype must be one of {DTYPES}, got {dtype}")
        form = kv_format(kv_dtype)
        self.num_layers, self.capacity, self.dtype = num_layers, capacity, dtype
        self.stored_dtype = dtype if form is None else form.dtype
        self.scales = None if form is None else KVScales(form, num_layers, kv_heads, device)
        self._new_shape = batch, kv_heads, "T", head_dim
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
        self._grow_to([held + tokens for held in self.held])
        columns = Columns(self.lengths, None, self._places(self.lengths, None, tokens))
        self._write(layer, k, v, columns, stores=True)

    def attend(
        self, layer: int, q: Tensor, *, scale: float | None = None,
        window: tuple[int, int] | None = None, softcap: float = 0,
    ) -> Tensor:  # fmt: skip
        """Causal attention of the step's queries q (batch, heads, T, head_dim) over the whole cache.

        Call it after `append` of the same T tokens: they are among the keys. scale, window and softcap as
        `torch_fdattn.attention`; tokens that a window has left behind stay stored.
        """
        expect_tensor("q", q)
        new = q.shape[2] if q.dim() == 4 else 0  # any other shape is refused by the op
        longest = min(max(self.held) + new, self.capacity)
        options = dict(scale=scale, window=window, softcap=softcap)
        return self._attend(layer, q, self.lengths + new, longest, **options)

    def advance(self, tokens: int) -> None:
        """Ends a step: the tokens appended to every layer now count as stored."""
        free = self.capacity - max(self.held)
        if not 0 <= tokens <= free:
            raise ValueError(f"tokens must be from 0 to {free}, got {tokens}")
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
        lengths = [held + count for held, count in zip(self.held, counts, strict=True)]
        self._grow_to(lengths)
        self.held = lengths

    def ragged_step(self, counts: Tensor, tokens: int, full: bool = False) -> RaggedStep:
        """A step of `tokens` columns in which sequence b stores its last counts[b]; see `RaggedStep`."""
        return RaggedStep(self, counts, tokens, full)

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens of every sequence, and all of a shorter one."""
        if length < 0:
            raise ValueError(f"length must be at least 0, got {length}")
        self.lengths.clamp_(max=min(length, self.capacity))
        self.held = [min(held, length) for held in self.held]

    def reset(self) -> None:
        """Forgets all tokens; the storage stays, and so do a quantised cache's scales."""
        self.truncate(0)

    @property
    def calibrated(self) -> bool:
        """Whether scales are final. Before that, a step runs eagerly, so that it can set them."""
        return self.scales is None or self.scales.calibrated

    @property
    def nbytes(self) -> int:
        """Bytes of K and V storage on this rank."""
        return self._k.nbytes + self._v.nbytes

    def bytes_used(self) -> int:
        """Bytes of K and V that hold tokens on this rank."""
        _, kv_heads, _, head_dim = self._new_shape
        per_token = self.num_layers * kv_heads * head_dim * self.stored_dtype.itemsize
        return 2 * sum(self.held) * per_token

    def _write(self, layer: int, k: Tensor, v: Tensor, columns: Columns, stores: bool) -> None:
        """stores: whether any column is known to hold a token, by which scales can be set."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._write(layer, k, v, columns, stores)
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer must be from 0 to {self.num_layers - 1}, got {layer}")
        batch, kv_heads, _, head_dim = self._new_shape
        tokens = k.shape[2] if isinstance(k, Tensor) and k.dim() == 4 else "T"
        expected = (batch, kv_heads, tokens, head_dim)
        for name, tensor in (("k", k), ("v", v)):
            expect_tensor(name, tensor)
            if tensor.shape != expected:
                raise ValueError(f"{name} must have shape {expected}, got {tuple(tensor.shape)}")
            expect_dtype(name, tensor, self.dtype, "the cache")
            expect_device(name, tensor, self.lengths.device, "the cache")
        if stores and self.scales is not None and not self.scales.is_calibrated(layer):
            self.scales.calibrate(layer, k, v, columns.real(tokens))
        self._store(layer, k, v, columns)

    def _attend(
        self, layer: int, q: Tensor, lengths: Tensor, longest: int, **options
    ) -> Tensor:  # fmt: skip
        """The queries are the last of `lengths` tokens, of which no sequence has more than `longest`."""
        options["causal"] = True
        if q.dim() == 4 and 1 <= q.shape[2] <= MAX_QUERY_TOKENS:
            return self._decode(layer, q, lengths, **options, **self._scales_of(layer))
        k, v = self._contiguous(layer, longest, q.dtype)
        return attention(q, k, v, lengths, **options)[0]

    def _scales_of(self, layer: int) -> dict[str, Tensor]:
        return {} if self.scales is None else self.scales.of_layer(layer)

    def _dequantised(self, layer: int, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple:
        """Stored k and v (B, kv_heads, …, D) times their scales, in dtype; as they are if not quantised."""
        if self.scales is None:
            return k, v
        wide = torch.promote_types(dtype, torch.float32)
        scales = self.scales.of_layer(layer).values()
        return tuple(
            (x.to(wide) * s[..., None]).to(dtype) for x, s in zip((k, v), scales, strict=True)
        )

    # What a cache adds.

    def _places(self, starts: Tensor, counts: Tensor | None, tokens: int) -> Tensor | None:
        """`Columns.places`. Here: for each of the T first rows the column that it takes, since append_kv
        wants a sequence's new tokens first and padding after them."""
        if counts is None or tokens == 1:
            return None
        row = torch.arange(tokens, device=counts.device)
        return (row + (tokens - counts[:, None])).clamp(max=tokens - 1).long()[:, None, :, None]

    def _grow_to(self, lengths: Sequence[int]) -> None:
        """Before sequences grow to these lengths."""

    def _store(self, layer: int, k: Tensor, v: Tensor, columns: Columns) -> None:
        raise NotImplementedError

    def _decode(self, layer: int, q: Tensor, lengths: Tensor, **options) -> Tensor:
        raise NotImplementedError

    def _contiguous(self, layer: int, longest: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V (B, kv_heads, at least `longest`, D) of a layer in dtype, for long prompts."""
        raise NotImplementedError


class RaggedStep:
    """A step of T columns in which sequence b stores its last counts[b], the rest being padding.

    With the padding on the left the new tokens of every sequence end in the last column: the queries are
    the last of the keys, as in any step, and the last column's logits are those of each last token.
    A padding column stands at a position that is already stored, so it is neither stored nor counted; a
    sequence with count 0 stays as it is. Takes the place of the cache in a model's forward.

    With T up to 16 nothing here depends on values on the host: the step can be captured in a CUDA graph and
    replayed with other counts. The host's count is `BatchKVCache.reserve`, which the caller calls before
    each run.

    Args:
        full: whether every count is T, which the caller knows: no column is padding, and none is moved.

    Attributes:
        lengths: int32 (batch,), the position of the first column; negative where it is padding.
    """

    def __init__(
        self, cache: BatchKVCache, counts: Tensor, tokens: int, full: bool = False
    ) -> None:
        self._cache, self._counts = cache, counts
        self._ends = cache.lengths + counts
        self.lengths = self._ends - tokens
        stored = None if full else counts
        places = cache._places(self.lengths, stored, tokens)
        self._columns = Columns(self.lengths, stored, places)

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        # Before anything is reserved a step stores nothing: it warms up for a capture.
        self._cache._write(layer, k, v, self._columns, stores=max(self._cache.held) > 0)

    def attend(self, layer: int, q: Tensor, **options) -> Tensor:
        """`BatchKVCache.attend`, with its keywords."""
        return self._cache._attend(layer, q, self._ends, max(self._cache.held), **options)

    def advance(self, tokens: int) -> None:
        self._cache.lengths += self._counts


def aligned(columns: Columns, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with each sequence's new tokens first and its padding last, as append_kv takes them."""
    if columns.places is None:
        return k, v
    return k.take_along_dim(columns.places, 2), v.take_along_dim(columns.places, 2)


def expect_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
