"""K and V in pages, and one step's passes over them: what a model's forward is given as its cache.

A model sees a batch of T sequences with one token each, (T, 1), which takes no part of its own for continuous batching: the
token's position is the length that it asks for. First come the D tokens that decode, then the tokens of P chunks,
packed. Per layer:

    append   all T keys and values, each to its slot: one `paged_append_kv`, whose table has one page a token
    attend   decodes by `paged_decode`, chunks by `varlen_attention` over the same pages

So all of a step's tokens are stored in a layer before any attends there: chunks of one step may share pages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn.functional import paged_append_kv, paged_decode, varlen_attention


class PagedKV:
    """The pages of all layers, in memory (layers, pages, page_size, kv_heads, head_dim).

    Attributes:
        k, v: views (layers, pages, kv_heads, page_size, head_dim), as the ops take them.
    """

    def __init__(
        self, num_layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int, *,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        shape = num_layers, pages, page_size, kv_heads, head_dim
        # Zeros: a masked key's weight of 0 times what happens to be in memory may be NaN.
        self.k, self.v = (
            torch.zeros(shape, dtype=dtype, device=device).transpose(2, 3) for _ in range(2)
        )
        self.page_size = page_size

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


class Decodes(NamedTuple):
    """D sequences that compute one token each."""

    page_table: Tensor  # int32 (D, pages of a sequence)
    kv_lens: Tensor  # int32 (D,), the new tokens included


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
        decodes, prefills: of the first D tokens and of the others; None: there are none.
        batch_invariant: as `paged_decode`'s.

    Attributes:
        lengths: the positions, which the model takes for the lengths before the step.
    """

    def __init__(
        self, kv: PagedKV, positions: Tensor, pages: Tensor, decodes: Decodes | None,
        prefills: Prefills | None, batch_invariant: bool = False,
    ) -> None:  # fmt: skip
        self._kv, self.lengths = kv, positions
        self._pages, self._slots = pages[:, None], (positions % kv.page_size).int()
        self._decodes, self._prefills = decodes, prefills
        self._batch_invariant = batch_invariant

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Stores k and v (T, kv_heads, 1, head_dim)."""
        paged_append_kv(self._kv.k[layer], self._kv.v[layer], self._pages, k, v, self._slots)

    def attend(
        self, layer: int, q: Tensor, *, scale: float | None = None,
        window: tuple[int, int] | None = None, softcap: float = 0,
    ) -> Tensor:  # fmt: skip
        """Causal attention of q (T, heads, 1, head_dim) over what each token's sequence has stored up to it."""
        options = dict(causal=True, scale=scale, window=window, softcap=softcap)
        k, v = self._kv.k[layer], self._kv.v[layer]
        outs, split = [], 0
        if self._decodes is not None:
            table, kv_lens = self._decodes
            split = len(kv_lens)
            invariant = self._batch_invariant
            outs.append(
                paged_decode(q[:split], k, v, table, kv_lens, batch_invariant=invariant, **options)[
                    0
                ]
            )
        if self._prefills is not None:
            cu_seqlens, table, kv_lens = self._prefills
            packed, _ = varlen_attention(
                q[split:, :, 0], k, v, cu_seqlens, page_table=table, kv_lens=kv_lens, **options
            )
            outs.append(packed[:, :, None])
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def advance(self, tokens: int) -> None:
        """The scheduler counts what is stored."""
