"""The tensors of a decode case: rotated copies, memory orders, pages, quantised caches, exact answers.

Paged caches lie as (P, page, H_kv, D) in memory, the order that engines and peers use, their pages in
random order; all copies share one page table, as the layers of a model do. Quantised caches have one
scale for K and one for V, which every peer can take; the exact answer is that of the quantised values,
so that an error is the kernel's alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .exact import Exact, exact_attention
from .runner import DTYPES, generator
from .shapes import DecodeCase

_QUANTISED = {"fp8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}


@dataclass(frozen=True)
class DecodeInputs:
    """What one call reads.

    q (B, H, 1, D); k, v (B, H_kv, N, D), or pages (P, H_kv, page, D), any strides; kv_lens (B,) and
    page_table (B, pages of the longest) int32; scales (B, H_kv, 1) fp32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    kv_lens: Tensor
    page_table: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def make_inputs(case: DecodeCase, device: torch.device, copies: int) -> list[DecodeInputs]:
    """`copies` inputs with values of their own, contiguous caches in BHSD memory."""
    made = generator(device, 0)
    dtype = DTYPES[case.dtype]
    kv_lens = torch.tensor(case.kv_lens, dtype=torch.int32, device=device)
    page_table, pages = (None, 0) if case.page is None else _page_table(case, device)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made, device=device, dtype=dtype)

    def cache() -> tuple[Tensor, Tensor | None]:
        if case.page is None:
            values = random(case.batch, case.kv_heads, case.kv_len, case.head_dim)
        else:
            values = random(pages, case.page, case.kv_heads, case.head_dim).transpose(1, 2)
        return (values, None) if case.cache is None else _quantised(values, case)

    inputs = []
    for _ in range(copies):
        q, (k, k_scale), (v, v_scale) = (
            random(case.batch, case.heads, 1, case.head_dim),
            cache(),
            cache(),
        )
        inputs.append(DecodeInputs(q, k, v, kv_lens, page_table, k_scale, v_scale))
    return inputs


def _page_table(case: DecodeCase, device: torch.device) -> tuple[Tensor, int]:
    """(table, pages in use): every sequence has just the pages it needs, entries beyond are 0."""
    assert case.page is not None
    needed = [-(-length // case.page) for length in case.kv_lens]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0))
    table = torch.zeros((case.batch, max(needed)), dtype=torch.int32)
    for row, own in zip(table, order.int().split(needed), strict=True):
        row[: len(own)] = own
    return table.to(device), sum(needed)


def _quantised(values: Tensor, case: DecodeCase) -> tuple[Tensor, Tensor]:
    assert case.cache is not None
    dtype, largest = _QUANTISED[case.cache]
    scale = values.abs().max().float() / largest
    scaled = values.float() / scale
    if case.cache == "int8":
        scaled = scaled.round()
    return scaled.to(dtype), scale.reshape(1, 1, 1).repeat(case.batch, case.kv_heads, 1)


class Layouts:
    """The inputs of a case in the memory orders that implementations are meant for."""

    def __init__(self, case: DecodeCase, device: torch.device, copies: int) -> None:
        self._found = {"BHSD": make_inputs(case, device, copies)}
        self._paged = case.page is not None

    @property
    def first(self) -> list[DecodeInputs]:
        return self._found["BHSD"]

    def in_memory(self, order: str) -> list[DecodeInputs]:
        """BHSD or BSHD for contiguous caches; pages have one order only."""
        if self._paged:
            return self.first
        if order not in self._found:
            self._found[order] = [replace(x, k=_turned(x.k), v=_turned(x.v)) for x in self.first]
        return self._found[order]


def _turned(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def flat_bytes(case: DecodeCase, inputs: Sequence[DecodeInputs]) -> list[tuple[Tensor, Tensor]]:
    """Contiguous parts of K and V that are as large as what a call must read: the floor's inputs."""

    def part(x: Tensor) -> Tensor:
        memory = x if case.page is None else x.transpose(1, 2)
        return memory.view(-1).view(torch.uint8)[: case.kv_bytes // 2]

    return [(part(x.k), part(x.v)) for x in inputs]


class ExactHead:
    """The exact answer for the longest sequence's last KV head (the last of several longest)."""

    def __init__(self, case: DecodeCase, inputs: DecodeInputs) -> None:
        self._case, self._inputs = case, inputs
        self._group = case.heads // case.kv_heads
        self._length, self._row = max((n, row) for row, n in enumerate(case.kv_lens))
        keys = self._tokens(inputs.k, inputs.k_scale)
        values = self._tokens(inputs.v, inputs.v_scale)
        self.exact: Exact = exact_attention(self.queries(inputs.q), keys, values)

    def queries(self, x: Tensor) -> Tensor:
        """The head's part of q or out."""
        return x[self._row, -self._group :]

    def _tokens(self, cache: Tensor, scale: Tensor | None) -> Tensor:
        table = self._inputs.page_table
        if table is None:
            found = cache[self._row, -1]
        else:
            found = cache[table[self._row].long(), -1].flatten(0, 1)
        found = found[: self._length].double()
        return found if scale is None else found * scale[self._row, -1].double()
