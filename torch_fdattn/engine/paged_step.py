"""K and V in pages, and one step's passes over them: what a model's forward is given as its cache.

A model sees a batch of T sequences with one token each, (T, 1), and needs nothing of its own for continuous batching:
the token's position is the length that it asks for. First come the tokens of D sequences that decode, as many for each,
then the tokens of P chunks, packed. Per layer:

    append   all T keys and values, each to its slot: on GPUs by the launch that norms and rotates heads (`kv_slots`),
             elsewhere by one `paged_append_kv`, whose table has one page a token
    attend   decodes by `paged_decode`, chunks by `varlen_attention` over the same pages, or over dequantised copies of them

So all of a pass's tokens are stored in a layer before any attends there: chunks of one pass may share pages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.dist.kv_cache.scales import KVFormat
from torch_fdattn.environment import INTERPRET
from torch_fdattn.functional import paged_append_kv, paged_decode, varlen_attention
from torch_fdattn.models import InferenceTransformer, Transformer
from torch_fdattn.ops.append_kv.arguments import Append
from torch_fdattn.ops.append_kv.reference import FEW_TOKENS, append_to_slots
from torch_fdattn.ops.dequantised_pages import dequantised_pages
from torch_fdattn.ops.library import can_bypass_dispatcher
from torch_fdattn.ops.rotary import SMALLEST_MAXIMUM, KVSlots


class PagedKV:
    """The pages of all layers, in memory (layers, pages, page_size, kv_heads, head_dim).

    form: None, or how elements are stored in one byte, under a scale for each token and KV head: its largest absolute value
    over the format's largest. So no token decides about another's precision, and nothing saturates.

    Attributes:
        page_size: positions of a sequence that a page's number stands for.
        k, v: views (layers, pages, kv_heads, page_size, head_dim), as the ops take them.
        scales: fp32 (2, layers, pages + 1, kv_heads, page_size), of k and of v; None without a form. The last page takes what
            padding would store.
        waits_in: names of groups in whose exchanges a step may wait in vain.
    """

    waits_in: tuple[str, ...] = ()

    def __init__(
        self, num_layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int, *,
        dtype: torch.dtype, device: torch.device, form: KVFormat | None = None,
    ) -> None:  # fmt: skip
        shape = num_layers, pages, page_size, kv_heads, head_dim
        stored = dtype if form is None else form.dtype
        # Zeros: a masked key's weight of 0 times what happens to be in memory may be NaN.
        self.k, self.v = (
            torch.zeros(shape, dtype=stored, device=device).transpose(2, 3) for _ in range(2)
        )
        self.page_size, self._form, self.scales = page_size, form, None
        self._token_bytes = self.page_bytes(num_layers, 1, kv_heads, head_dim, dtype, form)
        if form is not None:
            self.scales = torch.ones(2, num_layers, pages + 1, kv_heads, page_size, device=device)

    @property
    def nbytes(self) -> int:
        """Of all pages on this rank, their scales included."""
        return self.k.nbytes + self.v.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def bytes_of(self, tokens: int) -> int:
        """What the first `tokens` tokens of a sequence take on this rank."""
        return self._token_bytes * tokens

    @staticmethod
    def page_bytes(
        num_layers: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype,
        form: KVFormat | None,
    ) -> int:  # fmt: skip
        """Bytes of one page in all layers."""
        head = head_dim * dtype.itemsize
        if form is not None:
            head = head_dim * form.dtype.itemsize + torch.float32.itemsize
        return 2 * num_layers * page_size * kv_heads * head

    def step(
        self, positions: Tensor, pages: Tensor, decodes: Decodes | None, prefills: Prefills | None,
        batch_invariant: bool,
    ) -> PagedStep:  # fmt: skip
        """A step over these pages, of `PagedStep`'s arguments."""
        return PagedStep(self, positions, pages, decodes, prefills, batch_invariant)

    def store(self, layer: int, k: Tensor, v: Tensor, pages: Tensor, slots: Tensor) -> None:
        """k and v (T, kv_heads, 1, head_dim) into these slots of these pages, int32 (T,); a page of -1: nowhere."""
        if self.scales is not None:
            for scales, x in zip(self.scales[:, layer], (k, v), strict=True):
                largest = x[:, :, 0].float().abs().amax(-1).clamp(min=SMALLEST_MAXIMUM)
                # A product with the reciprocal, as the kernel of `kv_slots` has it: the same bits by either.
                scales[pages, :, slots] = largest * (1 / self._form.largest)
        call = self.k[layer], self.v[layer], pages[:, None], k, v, slots
        if len(k) <= FEW_TOKENS and self._stores_as_they_are(k, v):
            append_to_slots(Append(*call))
        else:
            paged_append_kv(*call, **self.scales_of(layer))

    def _stores_as_they_are(self, k: Tensor, v: Tensor) -> bool:
        """Whether the op's checks and the dispatcher may be left out on a CPU: 0.1 ms of a layer's step. In inference mode
        alone: outside of it, torch refuses to write to pages that were made in it, and the op does not."""
        if not k.is_cpu or self.scales is not None or not torch.is_inference_mode_enabled():
            return False
        return not (INTERPRET or checks.CHECK_VALUES) and can_bypass_dispatcher(k, v)

    def scales_of(self, layer: int) -> dict[str, Tensor]:
        """The keywords k_scale and v_scale (pages, kv_heads, page_size) of the ops."""
        if self.scales is None:
            return {}
        k_scale, v_scale = self.scales[:, layer, :-1]
        return dict(k_scale=k_scale, v_scale=v_scale)

    def pages_for_prefill(
        self, layer: int, page_table: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """k, v and a page table (P, n) for `varlen_attention`, which takes no scales: the pages themselves, or copies in
        dtype of those that the table names, one sequence's behind the other's."""
        if self.scales is None:
            return self.k[layer], self.v[layer], page_table
        pages, scales = page_table.flatten(), self.scales[:, layer, :-1]
        k, v = dequantised_pages(self.k[layer], self.v[layer], *scales, pages, dtype)
        own = torch.arange(len(pages), dtype=torch.int32, device=pages.device)
        return k, v, own.view(page_table.shape)


class Decodes(NamedTuple):
    """D sequences that compute the same number of tokens each: one, or as many as the one with the most proposals."""

    page_table: Tensor  # int32 (D, pages of a sequence)
    kv_lens: Tensor  # int32 (D,), the new tokens included, padding not
    queries: int = 1  # tokens of each, padding included
    q_start: Tensor | None = None  # int32 (D,), where the first of several stands


class Prefills(NamedTuple):
    """P chunks of sequences."""

    cu_seqlens: Tensor  # int32 (P + 1,)
    page_table: Tensor  # int32 (P, pages of a sequence)
    kv_lens: Tensor  # int32 (P,), the chunk included


class PagedStep:
    """A step over `PagedKV`, in the place of a model's cache.

    Args:
        positions: int64 (T,) of each token in its sequence.
        pages: int32 (T,), the page of each token; negative: it is padding, and stored nowhere.
        decodes, prefills: of the first tokens, a multiple of D, and of the others; None: there are none.
        batch_invariant: as `paged_decode`'s.

    Attributes:
        lengths: the positions, which the model takes for the lengths before the step.
    """

    def __init__(
        self, kv: PagedKV, positions: Tensor, pages: Tensor, decodes: Decodes | None,
        prefills: Prefills | None, batch_invariant: bool = False,
    ) -> None:  # fmt: skip
        self._kv, self.lengths = kv, positions
        self._pages, self._slots = pages, (positions % kv.page_size).int()
        self._decodes, self._prefills = decodes, prefills
        # Tokens of decodes.
        self._split = 0 if decodes is None else len(decodes.kv_lens) * decodes.queries
        self._batch_invariant = batch_invariant

    def hidden(self, model: Transformer | InferenceTransformer, tokens: Tensor) -> Tensor:
        """(T, hidden size) behind the model's last block, of tokens (T,)."""
        return model.hidden(tokens[:, None], self)[:, 0]

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Stores k and v (T, kv_heads, 1, head_dim)."""
        self._kv.store(layer, k, v, self._pages, self._slots)

    def kv_slots(self, layer: int) -> KVSlots | None:
        """Where a kernel may write the tokens' K and V itself, in place of `append`; None: nowhere."""
        kv = self._kv
        return KVSlots(kv.k[layer], kv.v[layer], self._pages, self._slots, **kv.scales_of(layer))

    def attend(
        self, layer: int, q: Tensor, *, scale: float | None = None,
        window: tuple[int, int] | None = None, softcap: float = 0,
    ) -> Tensor:  # fmt: skip
        """Causal attention of q (T, heads, 1, head_dim) over what each token's sequence has stored up to it."""
        options = dict(scale=scale, window=window, softcap=softcap)
        outs = []
        if self._decodes is not None:
            queries, own = self._decodes.queries, q[: self._split]
            if queries > 1:  # a view (D, heads, queries, head_dim)
                own = own[:, :, 0].unflatten(0, (-1, queries)).transpose(1, 2)
            out = self._attend_decodes(layer, own, q_start=self._decodes.q_start, **options)
            outs.append(out if queries == 1 else out.transpose(1, 2).flatten(0, 1)[:, :, None])
        if self._prefills is not None:
            outs.append(self._attend_prefills(layer, q[self._split :, :, 0], **options)[:, :, None])
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend_decodes(self, layer: int, q: Tensor, **options) -> Tensor:
        """Of q (D, heads, queries, head_dim)."""
        table, kv_lens = self._decodes.page_table, self._decodes.kv_lens
        k, v, scales = self._kv.k[layer], self._kv.v[layer], self._kv.scales_of(layer)
        return paged_decode(
            q, k, v, table, kv_lens, causal=True, batch_invariant=self._batch_invariant, **scales, **options
        )[0]  # fmt: skip

    def _attend_prefills(self, layer: int, q: Tensor, **options) -> Tensor:
        """Of q (tokens, heads, head_dim)."""
        cu_seqlens, table, kv_lens = self._prefills
        k, v, table = self._kv.pages_for_prefill(layer, table, q.dtype)
        return varlen_attention(
            q, k, v, cu_seqlens, page_table=table, kv_lens=kv_lens, causal=True, **options
        )[0]

    def advance(self, tokens: int) -> None:
        """The scheduler counts what is stored."""
