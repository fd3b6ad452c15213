"""Drawn calls of varlen_attention: packed sequences or keys on pages, with all that modifies scores crossed."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torch_fdattn.ops.attention.dropout import Dropout, kept_weights
from torch_fdattn.ops.positions import Mask, query_key_positions
from torch_fdattn.testing.cases import PEAKY, draw_head_dim, draw_mask, dtypes
from torch_fdattn.testing.feature_cases import MASK_KINDS, drawn_mask, score_parameters
from torch_fdattn.testing.inputs import LAYOUTS, make_tensor
from torch_fdattn.testing.oracle import attention_oracle, visible_keys

_NAN = float("nan")


@dataclass(frozen=True)
class VarlenCase:
    """A call of varlen_attention; lengths and positions as Python ints.

    kv_sizes are each sequence's capacity of keys, kv_lens how many are valid (None: all), and rest the
    tokens of q and of k behind the last sequence, which hold NaN, as all does that nobody may read.
    """

    seed: int
    q_lens: tuple[int, ...]
    kv_sizes: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    dtype: torch.dtype
    tile: int
    layouts: tuple[str, str, str] = ("bshd", "bshd", "bshd")
    rest: tuple[int, int] = (0, 0)
    page: int = 0  # tokens a page; 0: packed
    causal: bool = False
    window: tuple[int, int] | None = None
    scale: float | None = None
    kv_lens: tuple[int, ...] | None = None
    q_start: tuple[int, ...] | None = None
    kv_start: tuple[int, ...] | None = None
    kv_block: int = 0
    kv_stride: int = 0
    softcap: float = 0.0
    alibi: str = ""  # "", "head" or "sequence"
    sinks: bool = False
    dropout_p: float = 0.0
    mask: str = ""  # "" or one of MASK_KINDS
    mask_shape: tuple[int, ...] = ()
    mask_transposed: bool = False

    @property
    def batch(self) -> int:
        return len(self.q_lens)

    @property
    def error_factor(self) -> float:
        """Of the error rule: softcap's tanh multiplies errors."""
        return 3.0 if self.softcap else 2.0

    def valid(self, b: int) -> int:
        """How many keys of sequence b count."""
        size = self.kv_sizes[b]
        return size if self.kv_lens is None else min(max(self.kv_lens[b], 0), size)

    def inputs(self, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
        """(q, k, v), keys packed."""
        generator = torch.Generator().manual_seed(self.seed)
        sizes = self.q_lens, self.kv_sizes, self.kv_sizes
        tokens = [
            sum(x) + self.rest[i > 0] * (i == 0 or not self.page) for i, x in enumerate(sizes)
        ]
        kinds = (
            (self.heads, tokens[0], self.head_dim),
            (self.kv_heads, tokens[1], self.head_dim),
            (self.kv_heads, tokens[2], self.v_dim),
        )
        q, k, v = (
            make_tensor(
                shape, layout, dtype=self.dtype, device=device, generator=generator
            ).transpose(0, 1)
            for shape, layout in zip(kinds, self.layouts, strict=True)
        )
        poison(q, self.layouts[0], [slice(sum(self.q_lens), None)])
        gaps = [
            slice(begin + self.valid(b), begin + self.kv_sizes[b])
            for b, begin in enumerate(_begins(self.kv_sizes)[:-1])
        ]
        for x, layout in zip((k, v), self.layouts[1:], strict=True):
            poison(x, layout, [*gaps, slice(sum(self.kv_sizes), None)])
        return q, k, v

    def paged(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(pages of k, pages of v, page_table) of packed k and v: NaN and wrong entries where none may look."""
        rng = random.Random(self.seed)
        counts = [-(-size // self.page) for size in self.kv_sizes]
        width, pages = max(counts, default=0), sum(counts) + 2
        free = rng.sample(range(pages), pages)
        table = torch.empty(self.batch, width + 1, dtype=torch.int32)[:, :width]
        caches = [
            x.new_full((pages, self.page, *x.shape[1:]), _NAN).transpose(1, 2) for x in (k, v)
        ]
        for b, begin in enumerate(_begins(self.kv_sizes)[:-1]):
            oldest = self._oldest(b)
            for j in range(width):
                first = j * self.page
                used = first < self.valid(b) and first + self.page > oldest
                table[b, j] = free.pop() if used else rng.choice((free[0], -1, pages, 2**31 - 1))
                for cache, x in zip(caches, (k, v), strict=True) if used else ():
                    count = min(self.page, self.valid(b) - first)
                    token = begin + first
                    cache[table[b, j], :, :count] = x[token : token + count].transpose(0, 1)
        return *caches, table.to(k.device)

    def _oldest(self, b: int) -> int:
        """The first key that any query of a sequence sees, or is followed by."""
        if self.window is None or self.window[0] < 0:
            return 0
        seen = self.visible(b).any(0).nonzero()
        return int(seen[0]) if len(seen) else 0

    def visible(self, b: int) -> Tensor:
        """The boolean (query, valid key) mask of a sequence."""
        left, right = self.window or (-1, -1)
        return visible_keys(
            self.q_lens[b], self.valid(b), q_start=self.q_start[b] if self.q_start else None,
            kv_start=self.kv_start[b] if self.kv_start else 0, kv_block=self.kv_block,
            kv_stride=self.kv_stride, window=(left, 0 if self.causal else right),
        )  # fmt: skip

    def output_gradients(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """(dout (T, H, DV), dlse (H, T)); tokens of no sequence have gradients that must not count."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        shape = self.heads, sum(self.q_lens) + self.rest[0], self.v_dim
        dout = make_tensor(shape, "bshd", dtype=self.dtype, device=device, generator=generator)
        dlse = torch.randn(shape[:2], generator=generator).to(device)
        return dout.transpose(0, 1), dlse.double() if self.dtype == torch.float64 else dlse

    def parameters(self, device: torch.device | str) -> dict[str, Tensor]:
        """Keywords that are tensors and have gradients."""
        found = score_parameters(self, device)
        if not self.mask:
            return found
        beyond = max((self.valid(b) for b in range(self.batch)), default=0)
        return found | {"attn_mask": drawn_mask(self, beyond, device)}

    def options(self, device: torch.device | str) -> dict:
        """Keywords of `torch_fdattn.varlen_attention` but parameters, page_table and cu_seqlens."""
        names = ("causal", "window", "scale", "kv_block", "kv_stride", "softcap", "dropout_p")
        options = {name: getattr(self, name) for name in names}
        for name in ("kv_lens", "q_start", "kv_start"):
            if getattr(self, name) is not None:
                values = getattr(self, name)
                options[name] = torch.tensor(values, dtype=torch.int32, device=device)
        if self.dropout_p:
            options["dropout_seed"] = self._seed().to(device)
        return options

    def cu_seqlens(self, device: torch.device | str) -> tuple[Tensor, Tensor | None]:
        """(cu_seqlens_q, cu_seqlens_k); None where keys lie on pages, or as the queries do."""
        cu_seqlens_q, cu_seqlens_k = (
            torch.tensor(_begins(lengths), dtype=torch.int32, device=device)
            for lengths in (self.q_lens, self.kv_sizes)
        )
        alike = self.q_lens == self.kv_sizes and self.rest[0] == self.rest[1]
        return cu_seqlens_q, None if self.page or alike else cu_seqlens_k

    def _seed(self) -> Tensor:
        return torch.tensor([self.seed * 2**40 - 1, self.seed])

    def oracle(
        self, q: Tensor, k: Tensor, v: Tensor, parameters: dict[str, Tensor], formulation: str
    ) -> tuple[Tensor, Tensor]:
        """(out (H, T, DV), lse (H, T)) at the inputs' own dtype, differentiable: a call a sequence."""
        tokens = q.shape[0]
        outs, lses = [], []
        for b, (row, key) in enumerate(
            zip(_begins(self.q_lens)[:-1], _begins(self.kv_sizes)[:-1], strict=True)
        ):
            count = self.valid(b)
            own_q = q[row : row + self.q_lens[b]].transpose(0, 1)[None]
            own_k, own_v = (x[key : key + count].transpose(0, 1)[None] for x in (k, v))
            slopes = parameters.get("alibi_slopes")
            own = attention_oracle(
                own_q, own_k, own_v, causal=self.causal, window=self.window, scale=self.scale,
                q_start=self.q_start and self.q_start[b : b + 1],
                kv_start=self.kv_start and self.kv_start[b : b + 1], kv_block=self.kv_block,
                kv_stride=self.kv_stride, softcap=self.softcap,
                alibi_slopes=slopes[b : b + 1] if self.alibi == "sequence" else slopes,
                sinks=parameters.get("sinks"), attn_mask=self._entries(b, parameters.get("attn_mask")),
                kept=self._kept(b), formulation=formulation,
            )  # fmt: skip
            outs.append(own[0][0])
            lses.append(own[1][0])
        left = tokens - sum(self.q_lens)
        outs.append(q.new_zeros(self.heads, left, self.v_dim))
        lses.append(q.new_full((self.heads, left), float("-inf")))
        return torch.cat(outs, 1), torch.cat(lses, 1)

    def _entries(self, b: int, entries: Tensor | None) -> Tensor | None:
        """Those of a sequence's queries and valid keys, (1 or H, S or 1, keys or 1)."""
        if entries is None:
            return None
        own = entries[(None,) * (4 - entries.dim())]
        own = own[b if own.shape[0] > 1 else 0]
        rows, columns = (slice(None if x == 1 else n) for x, n in zip(own.shape[1:], (self.q_lens[b], self.valid(b)), strict=True))  # fmt: skip
        return own[:, rows, columns]

    def _kept(self, b: int) -> Tensor | None:
        """Factors (1, H, S, valid keys) of dropout, by its reference."""
        if not self.dropout_p:
            return None
        bounds = (
            None if x is None else torch.tensor(x[b : b + 1]) for x in (self.q_start, self.kv_start)
        )
        mask = Mask(None, *bounds, kv_block=self.kv_block, kv_stride=self.kv_stride)
        where = torch.device("cpu")
        q_pos, k_pos, _ = query_key_positions(mask, self.q_lens[b], self.valid(b), where)
        dropout = Dropout(self.dropout_p, self._seed())
        return dropout.factor * kept_weights(dropout, q_pos, k_pos, 1, self.heads, b).double()

    def features(self) -> list[str]:
        """What the summary counts."""
        tests = {
            "an empty sequence": 0 in self.q_lens,
            "a sequence without keys": any(not self.valid(b) for b in range(self.batch)),
            "no sequences": not self.batch,
            "sequences of several tiles": max(self.q_lens, default=0) > self.tile,
            "other lengths of keys": self.q_lens != self.kv_sizes,
            "tokens of no sequence": any(self.rest),
            "pages": self.page > 0,
            "causal": self.causal,
            "window": self.window is not None,
            "kv_lens": self.kv_lens is not None,
            "positions": self.q_start is not None or self.kv_start is not None,
            "block-cyclic positions": self.kv_block > 0,
            "softcap": self.softcap > 0,
            "ALiBi": bool(self.alibi),
            "ALiBi by sequence": self.alibi == "sequence",
            "sinks": self.sinks,
            "dropout": self.dropout_p > 0,
            "boolean mask": self.mask == "bool",
            "additive mask": self.mask.startswith("bias"),
            "mask of every pair": len(self.mask_shape) == 4 and 1 not in self.mask_shape,
            "mask broadcast over queries or keys": 1 in self.mask_shape[-2:],
            "grouped heads": self.heads > self.kv_heads,
            "other value dim": self.v_dim != self.head_dim,
        }
        kinds = [f"dtype {str(self.dtype).removeprefix('torch.')}"]
        kinds += [f"layout {layout}" for layout in sorted(set(self.layouts))]
        return kinds + [name for name, holds in tests.items() if holds]


def poison(x: Tensor, layout: str, gaps: list[slice]) -> None:
    """NaN in these tokens of a packed tensor, once where heads share memory."""
    for gap in gaps:
        (x[:, :1] if layout == "expanded" else x)[gap] = _NAN


def _begins(lengths: tuple[int, ...]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def draw_varlen(seed: int, device: torch.device | str = "cpu") -> VarlenCase:
    """A few sequences of no, one, some or several tiles of tokens, and any of the features."""
    rng = random.Random(f"varlen {seed}")
    tile = 64 if torch.device(device).type == "cuda" else 16

    def length() -> int:
        some, several = rng.randint(1, tile), rng.randint(tile, 2 * tile)
        return rng.choice((rng.choice((0, 1)), some, several, several))

    batch = rng.choice((0, 1, 4)) if rng.random() < 0.2 else rng.choice((2, 2, 3))
    q_lens = tuple(length() for _ in range(batch))
    kv_sizes, rest = q_lens, (rng.choice((0, 0, 5, tile + 3)),) * 2
    page = rng.choice((1, 3, 8, tile)) if rng.random() < 0.25 else 0
    if page or rng.random() < 0.5:
        kv_sizes = tuple(rng.choice((0, length(), n + rng.randint(0, tile))) for n in q_lens)
        rest = rest[0], 0 if page else rng.choice((0, 7))
    kv_heads, group = rng.choice((1, 1, 2)), rng.choice((1, 2, 3))
    head_dim = draw_head_dim(rng, device)
    longest = max(q_lens, default=0), max(kv_sizes, default=0)
    sizes = max(1, longest[0]), max(2, longest[1])
    mask = draw_mask(rng, batch, *sizes, head_dim, tile) if batch else {}
    if page:  # every sequence has the table's full capacity
        kv_lens = mask.get("kv_lens", (2**20,) * batch)
        mask["kv_lens"] = tuple(min(a, b) for a, b in zip(kv_lens, kv_sizes, strict=True))
        width = -(-longest[1] // page) * page
        kv_sizes = (width,) * batch
    case = VarlenCase(
        seed, q_lens, kv_sizes, kv_heads * group, kv_heads, head_dim,
        rng.choice((16, 24, 48)) if rng.random() < 0.3 else head_dim, rng.choice(dtypes(device)), tile,
        tuple(rng.choice(LAYOUTS) for _ in range(3)), rest, page, **mask,
        softcap=rng.choice((1.0, 5.0, 30.0)) if rng.random() < 0.3 else 0.0,
        alibi=rng.choice(("head", "sequence")) if rng.random() < 0.3 else "",
        sinks=rng.random() < 0.3, dropout_p=rng.choice((0.1, 0.5)) if rng.random() < 0.2 else 0.0,
    )  # fmt: skip
    if case.kv_block and case.q_start is None:  # positions would not follow from the length
        case = replace(case, alibi="")
    case = _with_mask(case)
    if case.dtype == torch.float32 and not _fair_in_fp32(case):
        return replace(case, dtype=torch.float16)
    return case


def _with_mask(case: VarlenCase) -> VarlenCase:
    """The case with an explicit mask, or without: drawn apart, so that the rest of a seed's draw stays."""
    rng = random.Random(f"varlen mask {case.seed}")
    if rng.random() < 0.5:
        return case
    lengths = max(case.q_lens, default=0), max(map(case.valid, range(case.batch)), default=0)
    sizes = case.batch, case.heads, *(max(1, n) + rng.choice((0, 0, 3)) for n in lengths)
    whole = rng.random() < 0.3
    shape = tuple(x if whole or rng.random() < 0.7 else 1 for x in sizes)
    shape = shape[0 if whole else rng.choice((0, 0, 1, 2, 3)) :]
    dtype = torch.float16 if case.dtype == torch.float32 else case.dtype
    kind = rng.choice(MASK_KINDS)
    changed = replace(case, mask=kind, mask_shape=shape, mask_transposed=rng.random() < 0.3)
    return (
        replace(changed, dtype=dtype) if kind != "bias" else changed
    )  # rows may keep a single key


def _fair_in_fp32(case: VarlenCase) -> bool:
    """As in `cases.py`: enough rows, and most of them not dominated by single keys."""
    if not sum(case.q_lens):
        return False
    rows = [case.visible(b).sum(-1) for b in range(case.batch)]
    by_sequence = [x for x in rows if len(x)] if case.alibi == "sequence" else []
    peaky = case.scale is not None and case.scale >= PEAKY * case.head_dim**-0.5
    enough = sum(case.q_lens) * case.heads >= 96
    return enough and not peaky and all(map(_see_many, (torch.cat(rows), *by_sequence)))


def _see_many(counts: Tensor) -> bool:
    """Whether most rows that see a key see at least 8."""
    many = counts[counts > 0] >= 8
    return not len(many) or bool(many.double().mean() > 0.5)
