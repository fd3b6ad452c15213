"""K and V in pages whose positions the ranks of a group share, and one step's passes over them.

A page of the scheduler is one page of `page_size` tokens on each of W ranks, under one number on all of them: page i of a
sequence holds its positions i · W · page_size and on, of which rank r has the r-th run of page_size. So positions go round the ranks
in blocks of a page, all ranks have the same page tables, reference counts and prefixes, and a sequence of n pages' tokens takes
⌈n / W⌉ pages of each rank.

    decodes   every rank computes all of them; `dist.decode` over its own pages, by one of its strategies
    chunks    each rank computes its share of their tokens; K and V are gathered, and each rank stores its own positions;
              `attend_chunks` takes the queries to the keys

Both in one pass: the model sees the decodes and this rank's share. Where bits must not depend on the number of ranks, all
compute all tokens of a chunk, and attend as decodes do, a few queries at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.dist.consensus import assume_equal_on_all_ranks
from torch_fdattn.dist.decode.op import COLLECTIVES_ALONE
from torch_fdattn.dist.functional import decode as sharded_decode
from torch_fdattn.dist.groups import rank_and_size
from torch_fdattn.dist.kv_cache.chunk_attention import attend_chunks, chunk_mask, gather_shares
from torch_fdattn.dist.kv_cache.scales import KVFormat
from torch_fdattn.dist.kv_cache.shard_map import ShardMap
from torch_fdattn.engine.paged_step import Decodes, PagedKV, PagedStep, Prefills
from torch_fdattn.engine.sequence_rows import NO_PAGE
from torch_fdattn.models import InferenceTransformer, Transformer
from torch_fdattn.ops.decode.inputs import MAX_QUERY_TOKENS
from torch_fdattn.ops.options import AttentionOptions, default_scale, window_bounds
from torch_fdattn.ops.packed import Packed
from torch_fdattn.ops.rotary import KVSlots
from torch_fdattn.ops.scores import Scores


class ShardedPagedKV(PagedKV):
    """`PagedKV` of a group's rank.

    Args:
        page_size: tokens of a page of one rank.
        pages: of each rank.
        group_name, strategy, hierarchy: of `torch_fdattn.dist.decode`.
        rank_invariant: whether its invariant_block is a page of one rank; a step then has decodes or one chunk.

    Attributes:
        page_size: tokens that the number of a page stands for, on all ranks together.
        shards: the positions that this rank holds.
    """

    def __init__(
        self, num_layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int, *,
        dtype: torch.dtype, device: torch.device, form: KVFormat | None, group_name: str, strategy: str,
        hierarchy: tuple[str, str] | None, rank_invariant: bool,
    ) -> None:  # fmt: skip
        super().__init__(
            num_layers, pages, page_size, kv_heads, head_dim, dtype=dtype, device=device, form=form
        )
        self.shards = ShardMap(*rank_and_size(group_name, "kv_group"), page_size)
        self.page_size = self.shards.kv_stride
        self.group_name = group_name
        #: Of `dist.decode`, the same in every call.
        self.exchange = dict(
            strategy=strategy, hierarchy=hierarchy, kv_block=self.shards.kv_block,
            invariant_block=page_size if rank_invariant else None,
        )  # fmt: skip
        self.waits_in = () if strategy in COLLECTIVES_ALONE else (group_name, *(hierarchy or ()))

    def bytes_of(self, tokens: int) -> int:
        return super().bytes_of(self.shards.local_capacity(tokens))

    def step(
        self, positions: Tensor, pages: Tensor, decodes: Decodes | None, prefills: Prefills | None,
        batch_invariant: bool,
    ) -> ShardedStep:  # fmt: skip
        return ShardedStep(self, positions, pages, decodes, prefills, batch_invariant)


class ShardedStep(PagedStep):
    """`PagedStep` over `ShardedPagedKV`, with its arguments: of all T tokens, the same on every rank.

    Attributes:
        lengths: the positions of the rows that this rank computes: the decodes, and its share of the others.
    """

    def __init__(
        self, kv: ShardedPagedKV, positions: Tensor, pages: Tensor, decodes: Decodes | None,
        prefills: Prefills | None, batch_invariant: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(kv, positions, pages, decodes, prefills, batch_invariant)
        shards = kv.shards
        is_own, places = shards.locate(positions)
        self._pages = pages.masked_fill(~is_own, NO_PAGE)
        self._slots = (places % shards.kv_block).int()
        self._tokens = len(positions) - self._split
        self._rank_invariant = kv.exchange["invariant_block"] is not None
        self._share = 0 if self._rank_invariant else -(-self._tokens // shards.world_size)
        self.lengths = self._own_rows(positions)
        if prefills is not None and not self._rank_invariant:
            self._mask = chunk_mask(prefills.cu_seqlens, prefills.kv_lens, shards)

    def hidden(self, model: Transformer | InferenceTransformer, tokens: Tensor) -> Tensor:
        # Steps follow from calls and draws that are the same on all ranks.
        with assume_equal_on_all_ranks():
            return self._all_rows(super().hidden(model, self._own_rows(tokens)))

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        if self._share:
            k, v = self._all_rows(torch.stack([k, v], 1)).unbind(1)
        super().append(layer, k, v)

    def kv_slots(self, layer: int) -> KVSlots | None:
        # Of a share of the tokens, `append` gathers the others.
        return None if self._share else super().kv_slots(layer)

    def _attend_decodes(self, layer: int, q: Tensor, **options) -> Tensor:
        return self._decode(layer, q, self._decodes, **options)

    def _decode(self, layer: int, q: Tensor, of: Decodes | Prefills, **options) -> Tensor:
        kv = self._kv
        return sharded_decode(
            q, kv.k[layer], kv.v[layer], of.kv_lens, kv.group_name, page_table=of.page_table,
            batch_invariant=self._batch_invariant, causal=True, **kv.exchange, **kv.scales_of(layer),
            **options,
        )[0]  # fmt: skip

    def _attend_few_by_few(self, layer: int, q: Tensor, **options) -> Tensor:
        """Of one chunk's q (tokens, heads, head_dim)."""
        start, outs = self._prefills.kv_lens - len(q), []
        for few in q.split(MAX_QUERY_TOKENS):
            queries = few.transpose(0, 1)[None]
            outs.append(self._decode(layer, queries, self._prefills, q_start=start, **options))
            start = start + len(few)
        return torch.cat(outs, 2)[0].transpose(0, 1)

    def _attend_prefills(
        self, layer: int, q: Tensor, *, scale: float | None, window: tuple[int, int] | None,
        softcap: float,
    ) -> Tensor:  # fmt: skip
        kv = self._kv
        if self._rank_invariant:
            return self._attend_few_by_few(layer, q, scale=scale, window=window, softcap=softcap)
        k, v, table = kv.pages_for_prefill(layer, self._prefills.page_table, q.dtype)
        mask = self._mask._replace(window_left=window_bounds(window)[0])
        options = AttentionOptions(mask, default_scale(q, scale), Scores(softcap))
        packed = Packed(self._prefills.cu_seqlens, None, table)
        return attend_chunks(q, k, v, packed, options, kv.shards, kv.group_name)

    def _own_rows(self, x: Tensor) -> Tensor:
        """Of x (T,) what this rank computes; 0 where its share has no token."""
        if not self._share:
            return x
        shards, rest = self._kv.shards, x[self._split :]
        padding = self._share * shards.world_size - self._tokens
        rest = torch.nn.functional.pad(rest, (0, padding))
        own = rest.narrow(0, shards.rank * self._share, self._share)
        return torch.cat([x[: self._split], own])

    def _all_rows(self, x: Tensor) -> Tensor:
        """All T rows from those that each rank computes."""
        if not self._share:
            return x
        shares = gather_shares(x[self._split :], self._kv.shards, self._kv.group_name)
        return torch.cat([x[: self._split], shares[: self._tokens]])
