"""Packed sequences: the tokens of all sequences one after the other, without padding (varlen).

Sequence b is ``q[cu_seqlens[b] : cu_seqlens[b + 1]]`` of q (T, H, D). Kernels cut T tokens of B sequences into
blocks of which none holds tokens of two sequences, and whose number follows from T and B alone, so that
launches need no length: block c of those that begin before sequence b's is its own where

    cu_seqlens[b] // BLOCK + b + 1 <= c < cu_seqlens[b + 1] // BLOCK + b + 2

Tokens before the first and behind the last sequence have blocks too, as sequences -1 and B: rows that see no
key. The device side is `packed_tiles.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Packed(NamedTuple):
    """Where sequences begin; the part of varlen's schemas that follows q, k, v."""

    cu_seqlens_q: Tensor  # (B + 1,)
    cu_seqlens_k: Tensor | None = None  # None: the keys lie as the queries do, or on pages
    page_table: Tensor | None = None  # (B, pages a sequence)

    @property
    def sequences(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1

    @property
    def begins_of_keys(self) -> Tensor:
        return self.cu_seqlens_q if self.cu_seqlens_k is None else self.cu_seqlens_k

    def blocks(self, tokens: int, block: int) -> int:
        """How many blocks hold `tokens`, whatever the lengths."""
        return tokens // block + self.sequences + 2


def by_heads(x: Tensor) -> Tensor:
    """A packed (T, H, D) tensor as kernels address it: (1, H, T, D), with a batch stride of 0."""
    tokens, heads, dim = x.shape
    token, head, last = x.stride()
    return x.as_strided((1, heads, tokens, dim), (0, head, token, last))


def key_capacity(k: Tensor, packed: Packed | None) -> int:
    """The keys that a sequence may have: k's, all tokens' of packed ones, or those of its pages."""
    if packed is None or packed.page_table is None:
        return k.shape[2]
    return k.shape[2] * packed.page_table.shape[1]


def kernel_arguments(packed: Packed | None, k: Tensor) -> dict[str, object]:
    """What kernels take of it: nothing where sequences are not packed, which costs them nothing."""
    if packed is None:
        return {}
    arguments: dict[str, object] = {
        "sequences": packed.sequences,
        "cu_seqlens_q_ptr": packed.cu_seqlens_q.contiguous(),
    }
    table = packed.page_table
    if table is None:
        return arguments | {"cu_seqlens_k_ptr": packed.begins_of_keys.contiguous()}
    return arguments | {
        "page_table_ptr": table, "table_stride": table.stride(0), "table_step": table.stride(1),
        "page_count": k.shape[0], "PAGE": k.shape[2],
    }  # fmt: skip
