"""Drawn decode cases as serving has them: pages, quantised caches, ALiBi, softcap, sinks, other value dims."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torch_fdattn.testing.cases import AttentionCase, draw_decode
from torch_fdattn.testing.inputs import make_tensor

QUANTISED = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}
#: Scales of quantised caches by name, as shapes to be broadcast to (B or pages, H_kv, slots).
SCALES = ("tensor", "head", "sequence", "slot")
_PAGES_UNUSED = 2


@dataclass(frozen=True)
class ServingCase(AttentionCase):
    """A call of decode or paged_decode; `inputs` are what a dense, unquantised call would get."""

    v_dim: int = 0  # 0: head_dim
    page: int = 0  # tokens a page; 0: contiguous
    page_layout: str = "nhd"
    cache: str = ""  # "" or a key of QUANTISED
    scales: tuple[str, str] = ("tensor", "tensor")
    softcap: float = 0.0
    alibi: str = ""  # "", "head" or "sequence"
    sinks: bool = False
    batch_invariant: bool = False

    @property
    def error_factor(self) -> float:
        """Of the error rule: softcap's tanh multiplies errors."""
        return 3.0 if self.softcap else 2.0

    def inputs(self, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
        """(q, k, v) with k and v dense and multiplied by their scales, in fp64 where they are quantised."""
        q, *stored = self._stored(device)
        return q, *(
            x if scale is None else x.double() * self._by_key(scale, device)[..., None]
            for x, scale in zip(stored, self._scales(device), strict=True)
        )

    def oracle_options(self) -> dict:
        options = super().oracle_options()
        return options | dict(
            softcap=self.softcap, alibi_slopes=self._slopes(), sinks=self._sinks()
        )

    def call(self, device: torch.device | str) -> tuple[str, tuple, dict]:
        """(name of the Python entry, its arguments, its keywords)."""
        q, k, v = self._stored(device)
        options = super().options(device)
        slopes, sinks = self._slopes(), self._sinks()
        options |= dict(
            softcap=self.softcap, batch_invariant=self.batch_invariant,
            alibi_slopes=None if slopes is None else slopes.to(device),
            sinks=None if sinks is None else sinks.to(device),
        )  # fmt: skip
        if self.cache:
            options["k_scale"], options["v_scale"] = self._scales(device)
        if not self.page:
            return "decode", (q, *(self._laid_out(x, i) for i, x in ((1, k), (2, v)))), options
        table = self._page_table().to(device)
        pages = (self._in_pages(x, table) for x in (k, v))
        return "paged_decode", (q, *pages, self._with_garbage(table)), options

    def features(self) -> list[str]:
        found = [*super().features(), f"cache {self.cache or 'unquantised'}"]
        tests = {
            "paged": self.page > 0,
            "page 1": self.page == 1,
            "other value dim": self.v_dim not in (0, self.head_dim),
            "softcap": self.softcap > 0,
            "ALiBi": bool(self.alibi),
            "sinks": self.sinks,
            "batch-invariant": self.batch_invariant,
            "scales a key": bool(self.cache) and "slot" in self.scales,
        }
        return found + [name for name, holds in tests.items() if holds]

    @property
    def _pages(self) -> int:
        """Pages a sequence."""
        return -(-self.kv_len // self.page)

    @property
    def _dtype(self) -> torch.dtype:
        return QUANTISED.get(self.cache, self.dtype)

    def _stored(self, device) -> tuple[Tensor, Tensor, Tensor]:
        """q as called, and the contents of the caches (B, H_kv, N, D) dense, zero beyond the lengths."""
        generator = torch.Generator().manual_seed(self.seed)
        q = make_tensor(
            (self.batch, self.heads, self.q_len, self.head_dim), self.layouts[0],
            dtype=self.dtype, device=device, generator=generator,
        )  # fmt: skip
        caches = []
        for dim in (self.head_dim, self.v_dim or self.head_dim):
            x = torch.randn(self.batch, self.kv_heads, self.kv_len, dim, generator=generator)
            if self.cache == "int8":
                x = (x * 40).round().clamp(-127, 127)
            for b, length in enumerate(self.kv_lens or ()):
                x[b, :, max(length, 0) :] = 0
            caches.append(x.to(device).to(self._dtype))
        return q, *caches

    def _scales(self, device) -> tuple[Tensor | None, Tensor | None]:
        if not self.cache:
            return None, None
        generator = torch.Generator().manual_seed(self.seed + 2)
        rows = self.batch * self._pages + _PAGES_UNUSED if self.page else self.batch
        slots = self.page or self.kv_len
        shapes = {
            "tensor": (), "head": (self.kv_heads, 1), "sequence": (rows, self.kv_heads, 1),
            "slot": (rows, self.kv_heads, slots),
        }  # fmt: skip
        unit = 0.025 if self.cache == "int8" else 1.0
        return tuple(
            (unit * (0.5 + torch.rand(shapes[kind], generator=generator))).to(device)
            for kind in self.scales
        )

    def _by_key(self, scale: Tensor, device) -> Tensor:
        """Scales (B, H_kv, N) in fp64."""
        if not self.page:
            return scale.double().expand(self.batch, self.kv_heads, self.kv_len)
        rows = self.batch * self._pages + _PAGES_UNUSED
        by_page = scale.double().expand(rows, self.kv_heads, self.page)[
            self._page_table().to(device).long()
        ]
        return by_page.transpose(1, 2).flatten(2, 3)[:, :, : self.kv_len]

    def _page_table(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 3)
        order = torch.randperm(self.batch * self._pages + _PAGES_UNUSED, generator=generator)
        return order[: self.batch * self._pages].view(self.batch, self._pages).int()

    def _with_garbage(self, table: Tensor) -> Tensor:
        """The table with entries of all kinds beyond each sequence's own, in a wider tensor."""
        wide = torch.full(
            (self.batch, self._pages + 2), 1 << 30, dtype=torch.int32, device=table.device
        )
        wide[:, -1] = -7
        wide[:, : self._pages] = table
        for b, length in enumerate(self.kv_lens or ()):
            used = -(-min(max(length, 0), self.kv_len) // self.page)
            wide[b, used : self._pages] = 1 << 29
        return wide[:, : self._pages]

    def _in_pages(self, dense: Tensor, table: Tensor) -> Tensor:
        """Pages (P, H_kv, page, D) of either order in memory, NaN (or 127) wherever nothing is stored."""
        rows = self.batch * self._pages + _PAGES_UNUSED
        shape = (rows, self.page, self.kv_heads, dense.shape[3])
        if self.page_layout == "hnd":
            shape = (rows, self.kv_heads, self.page, dense.shape[3])
        pages = self._nans(shape, dense.device)
        pages = pages if self.page_layout == "hnd" else pages.transpose(1, 2)
        for b in range(self.batch):
            valid = (
                self.kv_len if self.kv_lens is None else min(max(self.kv_lens[b], 0), self.kv_len)
            )
            for j in range(self._pages):
                part = dense[b, :, j * self.page : min((j + 1) * self.page, valid)]
                pages[int(table[b, j]), :, : part.shape[1]] = part
        return pages

    def _nans(self, shape: tuple[int, ...], device) -> Tensor:
        if self._dtype == torch.int8:
            return torch.full(shape, 127, dtype=torch.int8, device=device)
        return torch.full(shape, float("nan"), device=device).to(self._dtype)

    def _laid_out(self, dense: Tensor, which: int) -> Tensor:
        """A contiguous cache in one of three orders of memory, NaN around and beyond the lengths."""
        batch, heads, length, dim = dense.shape
        if self.layouts[which] in ("bhsd", "slice", "every_other"):
            view = self._nans((batch, heads, length + 5, dim), dense.device)[:, :, 2 : 2 + length]
        elif self.layouts[which] == "transposed":
            view = self._nans((batch, heads, dim, length), dense.device).mT
        else:
            view = self._nans((batch, length, heads + 1, dim + 8), dense.device)
            view = view[:, :, 1:, 8:].transpose(1, 2)
        for b in range(batch):
            valid = length if self.kv_lens is None else min(max(self.kv_lens[b], 0), length)
            view[b, :, :valid] = dense[b, :, :valid]
        return view

    def _slopes(self) -> Tensor | None:
        generator = torch.Generator().manual_seed(self.seed + 4)
        shape = {"": None, "head": (self.heads,), "sequence": (self.batch, self.heads)}[self.alibi]
        return None if shape is None else torch.rand(shape, generator=generator) * 0.1

    def _sinks(self) -> Tensor | None:
        generator = torch.Generator().manual_seed(self.seed + 5)
        return torch.randn(self.heads, generator=generator) if self.sinks else None


def draw_serving(seed: int, device: torch.device | str = "cpu") -> ServingCase:
    """A decode case with any of serving's features."""
    plain = draw_decode(seed, device)
    rng = random.Random(f"serving {seed}")
    fields = {name: getattr(plain, name) for name in plain.__dataclass_fields__}
    page = rng.choice((0, 1, 3, 16, 16, 64, 5)) if rng.random() < 0.6 else 0
    if page:
        fields["kv_len"] = -(-plain.kv_len // page) * page  # the table's capacity
    cache = rng.choice(tuple(QUANTISED)) if rng.random() < 0.4 else ""
    case = ServingCase(
        **fields,
        v_dim=rng.choice((16, 32, 48, 64)) if rng.random() < 0.25 else 0,
        page=page,
        page_layout=rng.choice(("nhd", "hnd")),
        cache=cache,
        scales=(rng.choice(SCALES), rng.choice(SCALES)),
        softcap=rng.choice((1.0, 5.0, 30.0)) if rng.random() < 0.25 else 0.0,
        alibi=rng.choice(("head", "sequence")) if rng.random() < 0.25 else "",
        sinks=rng.random() < 0.25,
        batch_invariant=rng.random() < 0.2,
    )
    if case.alibi and case.kv_block and case.q_start is None:
        return replace(case, alibi="")
    return case
