"""A KV cache in pages: memory follows what sequences hold, not what they might.

A model takes it as it takes `ShardedKVCache`, by what it can do. Where a group shares its positions, each rank has pages
and a table of its own, for the tokens that it keeps. `LLM` has pages of another kind, which requests share by their prefixes.

K and V of a layer are pages (P, page, H_kv, D) in memory, (P, H_kv, page, D) as the ops see them: the
tokens of a page are written in runs of H_kv · D elements. New tokens go through `paged_append_kv`, up to
16 queries a sequence through `paged_decode`, both straight over the page table.

Longer prompts (prefill) attend over K and V gathered from their pages, one layer at a time. The other way,
16 queries a call through `paged_decode`, copies nothing but reads every stored key once for each 16 queries:
with chunks of 512 queries 32 times, where gathering reads and writes it once. The gathered copy is of what
is stored up to the chunk's end; of a prompt that is one chunk, each key is copied once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fdattn.dist.decode.rank_invariant import check_pages
from torch_fdattn.dist.groups import Group
from torch_fdattn.dist.kv_cache.batch_cache import Columns, expect_positive
from torch_fdattn.dist.kv_cache.sharded_cache import SharedKVCache
from torch_fdattn.engine.pages import PageTable
from torch_fdattn.functional import paged_append_kv, paged_decode


class PagedKVCache(SharedKVCache):
    """K and V of all layers for `batch` sequences of up to `capacity` tokens, in pages given as they grow.

    Steps are those of `BatchKVCache`. Pages are allocated on the host, by `append` and by `reserve`, before
    the step runs; nothing is allocated within a captured one.

    Args:
        num_layers, batch, kv_heads, head_dim: the model's shape.
        capacity: tokens a sequence; it sets the table's width and takes no memory.
        page_size: tokens a page.
        pages: of each rank, shared by the sequences; default: enough for all of them at full capacity.
        dtype, device, kv_dtype, group, kv_block, strategy, hierarchy, invariant_block: as `ShardedKVCache`;
            invariant_block must be whole pages.

    Attributes:
        lengths: int32 (batch,) on the device, tokens stored before the current step.
        held: the same numbers on the host.
        table: the `PageTable`.
        scales: the `KVScales` of a quantised cache, else None.

    Raises:
        ValueError: from `append` and `reserve` also where pages run out, naming how many would do.

    Examples:
        >>> cache = torch_fdattn.engine.PagedKVCache(1, 2, 2, 256, 16, dtype=torch.float32, device="cpu", pages=8)
        >>> q, k, v = torch.randn(2, 4, 8, 16), *torch.randn(2, 2, 2, 8, 16)
        >>> cache.append(0, k, v)
        >>> cache.attend(0, q).shape
        torch.Size([2, 4, 8, 16])
        >>> cache.advance(8)
        >>> cache.held
        [8, 8]
    """

    def __init__(
        self, num_layers: int, batch: int, kv_heads: int, capacity: int, head_dim: int, *,
        dtype: torch.dtype, device: torch.device | str, page_size: int = 16,
        pages: int | None = None, kv_dtype: str | None = None, group: Group = None,
        kv_block: int | None = None, strategy: str = "auto",
        hierarchy: tuple[Group, Group] | None = None, invariant_block: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            num_layers, batch, kv_heads, capacity, head_dim, dtype=dtype, device=device,
            kv_dtype=kv_dtype, group=group, kv_block=kv_block, strategy=strategy,
            hierarchy=hierarchy, invariant_block=invariant_block,
        )  # fmt: skip
        expect_positive("page_size", page_size)
        if invariant_block is not None:
            check_pages(invariant_block, page_size)
        # All ranks have the fullest one's number of pages, and so all of them run out of pages at the same step.
        if invariant_block is None:
            most = self._fullest.local_capacity(capacity)
        else:
            most = self._local_capacity(capacity)
        pages = batch * -(-most // page_size) if pages is None else pages
        expect_positive("pages", pages)
        self.table = PageTable(batch, most, page_size, pages, device)
        shape = (num_layers, pages, page_size, kv_heads, head_dim)
        self._k = torch.zeros(shape, dtype=self.stored_dtype, device=device)
        self._v = torch.zeros(shape, dtype=self.stored_dtype, device=device)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer, (pages, kv_heads, page_size, head_dim), not copied."""
        return self._k[layer].transpose(1, 2), self._v[layer].transpose(1, 2)

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens of every sequence, and all of a shorter one; the rest's pages are free."""
        super().truncate(length)
        self.table.shrink(self._local(self.held))

    def _grow_to(self, lengths: Sequence[int]) -> None:
        self.table.expect_enough([self._fullest.local_capacity(length) for length in lengths])
        self.table.grow(self._local(lengths))

    def _local(self, lengths: Sequence[int]) -> list[int]:
        """How many tokens of sequences of these lengths this rank holds."""
        return [self.shards.local_capacity(length) for length in lengths]

    def _store(self, layer: int, k: Tensor, v: Tensor, columns: Columns) -> None:
        paged_append_kv(
            *self.layer(layer), self.table.on_device, *self._kept(k, v, columns),
            **self._scales_of(layer),
        )  # fmt: skip

    def _shard(self, layer: int) -> dict[str, Tensor]:
        k, v = self.layer(layer)
        return dict(k_shard=k, v_shard=v, page_table=self.table.on_device)

    def _decode(self, layer: int, q: Tensor, lengths: Tensor, **options) -> Tensor:
        return paged_decode(q, *self.layer(layer), self.table.on_device, lengths, **options)[0]

    def _contiguous(self, layer: int, longest: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Gathered pages. A sequence that has fewer gets any page in their place, beyond its length."""
        pages = -(-longest // self.table.page_size)
        ids = self.table.on_device[:, :pages].clamp(min=0)
        k, v = (x[layer][ids].flatten(1, 2).transpose(1, 2) for x in (self._k, self._v))
        return self._dequantised(layer, k, v, dtype)
