"""Drawn test cases: a seed gives a case, a case gives inputs, keywords and the oracle's keywords.

Sizes are drawn in units of the kernel's key tile, so that most cases span several tiles and end in a
ragged one; `summarize` counts what a set of cases covers, and the test run prints it.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torch_fdattn.ops.library import INTERPRET
from torch_fdattn.testing.inputs import LAYOUTS, make_tensor, poison_beyond
from torch_fdattn.testing.oracle import visible_keys

HEAD_DIMS = tuple(range(16, 257, 8))
#: Compiling is dear on a GPU: a few head dims of each kind (power of two, padded, smallest, largest).
GPU_HEAD_DIMS = (16, 40, 64, 96, 128, 200, 256)

#: A scale, in units of head_dim ** -0.5, under which single keys dominate their rows.
PEAKY = 3.0


@dataclass(frozen=True)
class AttentionCase:
    """A call of attention or decode; positions and lengths as Python ints, as the oracle takes them."""

    seed: int
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: torch.dtype
    tile: int
    layouts: tuple[str, str, str] = ("bhsd", "bhsd", "bhsd")
    causal: bool = False
    window: tuple[int, int] | None = None
    scale: float | None = None
    kv_lens: tuple[int, ...] | None = None
    q_start: tuple[int, ...] | None = None
    kv_start: tuple[int, ...] | None = None
    kv_block: int = 0
    kv_stride: int = 0

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def value_dim(self) -> int:
        return self.head_dim

    def parameters(self, device: torch.device | str) -> dict[str, Tensor]:
        """Keywords that are tensors and may have gradients."""
        return {}

    def inputs(self, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
        """(q, k, v), NaN in every gap and beyond kv_lens."""
        generator = torch.Generator().manual_seed(self.seed)
        shapes = (
            (self.batch, self.heads, self.q_len, self.head_dim),
            (self.batch, self.kv_heads, self.kv_len, self.head_dim),
            (self.batch, self.kv_heads, self.kv_len, self.value_dim),
        )
        q, k, v = (
            make_tensor(shape, layout, dtype=self.dtype, device=device, generator=generator)
            for shape, layout in zip(shapes, self.layouts, strict=True)
        )
        return q, poison_beyond(k, self.kv_lens), poison_beyond(v, self.kv_lens)

    def output_gradients(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """(dout, dlse), normally distributed; dout in an order of memory of its own."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        shape = (self.batch, self.heads, self.q_len, self.value_dim)
        layout = random.Random(self.seed).choice(("bhsd", "bshd", "packed"))
        dout = make_tensor(shape, layout, dtype=self.dtype, device=device, generator=generator)
        dlse = torch.randn(shape[:-1], generator=generator).to(device)
        return dout, dlse.double() if self.dtype == torch.float64 else dlse

    def oracle_options(self) -> dict:
        """Keywords of `attention_oracle`."""
        names = (
            "kv_lens",
            "causal",
            "window",
            "scale",
            "q_start",
            "kv_start",
            "kv_block",
            "kv_stride",
        )
        return {name: getattr(self, name) for name in names}

    def options(self, device: torch.device | str) -> dict:
        """Keywords of `torch_fdattn.attention` and `decode`: lengths and positions as int32 tensors."""
        options = self.oracle_options()
        for name in ("kv_lens", "q_start", "kv_start"):
            if options[name] is not None:
                options[name] = torch.tensor(options[name], dtype=torch.int32, device=device)
        return options

    def visible(self) -> list[Tensor]:
        """The boolean (query, valid key) mask of each sequence."""
        left, right = self.window or (-1, -1)
        return [
            visible_keys(
                self.q_len, self.kv_len if self.kv_lens is None else min(max(self.kv_lens[b], 0), self.kv_len),
                q_start=self.q_start[b] if self.q_start else None,
                kv_start=self.kv_start[b] if self.kv_start else 0,
                kv_block=self.kv_block, kv_stride=self.kv_stride,
                window=(left, 0 if self.causal else right),
            )
            for b in range(self.batch)
        ]  # fmt: skip

    def features(self) -> list[str]:
        """What the summary counts."""
        lens = self.kv_lens or (self.kv_len,)
        longest = min(max(lens), self.kv_len)
        found = [
            f"dtype {str(self.dtype).removeprefix('torch.')}",
            f"group {self.group if self.group <= 4 else '5+'}",
            "head dim "
            + ("a power of two" if self.head_dim & (self.head_dim - 1) == 0 else "padded"),
            *(f"layout {layout}" for layout in sorted(set(self.layouts))),
        ]
        tests = {
            "several KV tiles": longest > self.tile,
            "several KV tiles, the last ragged": longest > self.tile and longest % self.tile != 0,
            "several query tiles": self.q_len * (1 if self.q_len > 16 else self.group) > self.tile,
            "more than 64 packed rows": self.q_len <= 16 and self.q_len * self.group > 64,
            "causal": self.causal,
            "window": self.window is not None,
            "kv_lens": self.kv_lens is not None,
            "kv_lens with a zero": self.kv_lens is not None and min(lens) <= 0,
            "kv_lens out of range": self.kv_lens is not None
            and (min(lens) < 0 or max(lens) > self.kv_len),
            "q_start": self.q_start is not None,
            "kv_start": self.kv_start is not None,
            "block-cyclic positions": self.kv_block > 0,
            "own scale": self.scale is not None,
        }
        return found + [name for name, holds in tests.items() if holds]


@dataclass(frozen=True)
class MergeCase:
    """A call of merge_states; `empty` are the parts of single rows, or whole parts, that saw no key."""

    seed: int
    parts: int
    batch: int
    heads: int
    length: int
    head_dim: int
    dtype: torch.dtype
    out_dtype: torch.dtype | None
    layout: str
    empty_rate: float
    empty_parts: tuple[int, ...] = ()
    lse_scale: float = 1.0

    def inputs(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """(outs, lses); outs hold NaN wherever lses are -inf."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.parts, self.batch, self.heads, self.length, self.head_dim)
        outs = make_tensor(shape, self.layout, dtype=self.dtype, device=device, generator=generator)
        lses = torch.randn(shape[:-1], generator=generator) * self.lse_scale
        empty = torch.rand(shape[:-1], generator=generator) < self.empty_rate
        empty[list(self.empty_parts)] = True
        lses = lses.masked_fill(empty, float("-inf")).to(device)
        if self.layout != "expanded":  # its heads share memory, their empty rows differ
            outs.masked_fill_(empty.to(device)[..., None], float("nan"))
        return outs, lses.double() if self.dtype == torch.float64 else lses

    def output_gradients(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """(dout, dlse)."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        shape = (self.batch, self.heads, self.length, self.head_dim)
        dtype = self.out_dtype or self.dtype
        dout = make_tensor(shape, "bshd", dtype=dtype, device=device, generator=generator)
        dlse = torch.randn(shape[:-1], generator=generator).to(device)
        return dout, dlse.double() if self.dtype == torch.float64 else dlse

    def features(self) -> list[str]:
        found = [
            f"dtype {str(self.dtype).removeprefix('torch.')}",
            f"layout {self.layout}",
            "head dim "
            + ("a power of two" if self.head_dim & (self.head_dim - 1) == 0 else "padded"),
        ]
        tests = {
            "1 part": self.parts == 1,
            "2 to 32 parts": 1 < self.parts <= 32,
            "more than 32 parts": self.parts > 32,
            "whole parts empty": bool(self.empty_parts),
            "single rows empty": self.empty_rate > 0,
            "all parts empty": len(self.empty_parts) == self.parts,
            "other output dtype": self.out_dtype not in (None, self.dtype),
            "wide lses": self.lse_scale > 10,
        }
        return found + [name for name, holds in tests.items() if holds]


def drawn_seeds(count: int, variable: str | None = None) -> range:
    """The seeds of a drawn test: all of them for the kernels in the interpreter, fewer elsewhere; or as many as
    the environment's variable says, wherever it is set.

    A fifth on a GPU, where most draws compile kernels of their own (layouts and kinds of mask specialise a
    kernel; forward and backward of one take about 8 s); a quarter for the readable references.
    """
    if variable is not None and variable in os.environ:
        return range(int(os.environ[variable]))
    if torch.cuda.is_available():
        return range(count // 5)
    return range(count if INTERPRET else count // 4)


def expected_path(op: str, device: torch.device | str, dtype: torch.dtype) -> str:
    """The launch counter that a call must move."""
    on_gpu = torch.device(device).type == "cuda"
    interpreted = INTERPRET and dtype in (torch.float16, torch.float32)
    return f"{op}/{'triton' if on_gpu or interpreted else 'cpu'}"


def dtypes(device: torch.device | str) -> tuple[torch.dtype, ...]:
    """What to choose from; float32 twice, because cases unfair in it are turned into float16."""
    half = (torch.float16,) if INTERPRET else (torch.float16, torch.bfloat16)
    on_cpu = torch.device(device).type == "cpu" and not INTERPRET
    return (*half, torch.float32, torch.float32, *(torch.float64,) * on_cpu)


def draw_head_dim(rng: random.Random, device: torch.device | str) -> int:
    if torch.device(device).type == "cuda":
        return rng.choice(GPU_HEAD_DIMS)
    # Small ones are the fast ones in the interpreter; some cases are any.
    return rng.choice(HEAD_DIMS) if rng.random() < 0.15 else rng.choice((16, 24, 32, 40, 64))


def _tiles(rng: random.Random, tile: int, most: int) -> int:
    """A length: most often several tiles and a ragged rest, sometimes whole tiles, sometimes less than one."""
    kind = rng.random()
    if kind < 0.1:
        return rng.randint(1, tile)
    if kind < 0.2:
        return tile * rng.randint(1, most)
    return tile * rng.randint(1, most) + rng.randint(1, tile - 1)


def draw_mask(
    rng: random.Random, batch: int, q_len: int, kv_len: int, head_dim: int, tile: int
) -> dict:
    """Lengths, windows and positions under which a good part of the pairs is visible."""
    options: dict = {}
    if rng.random() < 0.5:
        lens = [
            rng.choice((kv_len, rng.randint(1, kv_len), rng.randint(kv_len // 2, kv_len)))
            for _ in range(batch)
        ]
        if rng.random() < 0.3:
            lens[rng.randrange(batch)] = rng.choice((0, -3))
        if rng.random() < 0.2:
            lens[rng.randrange(batch)] = kv_len + 7
        options["kv_lens"] = tuple(lens)
    options["causal"] = rng.random() < 0.5
    if rng.random() < 0.4:
        left = rng.choice((-1, 0, rng.randint(1, 2 * tile), 1 << 40))
        options["window"] = (
            left,
            -1 if options["causal"] else rng.choice((-1, 0, rng.randint(1, tile))),
        )
    if rng.random() < 0.2:
        options["scale"] = rng.choice((0.3, 0.8, 1.2, PEAKY)) * head_dim**-0.5
    block_cyclic = rng.random() < 0.3
    if block_cyclic:
        options["kv_block"] = rng.choice((1, 3, tile // 2, tile))
        options["kv_stride"] = options["kv_block"] * rng.randint(1, 3)
    if rng.random() < 0.4:
        options["kv_start"] = tuple(rng.randint(-tile, 2 * tile) for _ in range(batch))
    if block_cyclic or rng.random() < 0.3:
        # Near the end of the shard's span, so that causal queries see most of it.
        start = options.get("kv_start", (0,) * batch)
        span = kv_len * (options["kv_stride"] // options["kv_block"] if block_cyclic else 1)
        options["q_start"] = tuple(
            s + rng.randint(span // 2, span + tile) - q_len // 2 for s in start
        )
    return options


def draw_attention(
    seed: int, device: torch.device | str = "cpu", tile: int | None = None
) -> AttentionCase:
    """An attention case with several query and key tiles."""
    rng = random.Random(f"attention {seed}")
    tile = tile or (64 if torch.device(device).type == "cuda" else 16)
    kv_heads, group = rng.choice((1, 1, 2)), rng.choice((1, 1, 2, 3, 5))
    batch = rng.choice((1, 2, 3)) if kv_heads * group <= 2 else 1
    few = batch * kv_heads * group <= 2  # many heads and many tiles together only take time
    q_len, kv_len = _tiles(rng, tile, 2 if few else 1), _tiles(rng, tile, 4 if few else 2)
    return _attention_case(rng, seed, device, tile, batch, kv_heads, group, q_len, kv_len)


def draw_decode(
    seed: int, device: torch.device | str = "cpu", tile: int | None = None
) -> AttentionCase:
    """A decode case: 1 to 16 query tokens, caches of several splits, now and then more than 64 rows."""
    rng = random.Random(f"decode {seed}")
    tile = tile or (64 if torch.device(device).type == "cuda" else 16)
    batch, kv_heads, group = (
        rng.choice((1, 1, 2, 3)),
        rng.choice((1, 1, 2)),
        rng.choice((1, 2, 3, 5, 8)),
    )
    q_len = rng.choice((1, 1, 2, 3, 5))
    if rng.random() < 0.1:
        batch, kv_heads, group, q_len = 1, 1, rng.choice((5, 8)), rng.choice((13, 16))
    kv_len = _tiles(rng, tile, 8)
    return _attention_case(rng, seed, device, tile, batch, kv_heads, group, q_len, kv_len)


def _attention_case(
    rng, seed, device, tile, batch, kv_heads, group, q_len, kv_len
) -> AttentionCase:
    head_dim = draw_head_dim(rng, device)
    case = AttentionCase(
        seed, batch, kv_heads * group, kv_heads, q_len, kv_len, head_dim, rng.choice(dtypes(device)), tile,
        tuple(rng.choice(LAYOUTS) for _ in range(3)), **draw_mask(rng, batch, q_len, kv_len, head_dim, tile),
    )  # fmt: skip
    if case.dtype == torch.float32 and not _fair_in_fp32(case):
        return replace(case, dtype=torch.float16)
    return case


def _fair_in_fp32(case: AttentionCase) -> bool:
    """Whether torch's error is a fair measure in fp32: enough rows, and not dominated by single keys.

    In a row that one key dominates dS = p (dO·v - D) cancels: exactly in torch's formula, to rounding in
    every implementation that takes D from rowsum(dO ∘ O). Half precision's own rounding hides both; in
    fp32 such rows have tests of their own, with a bound of their own.
    """
    rows = torch.cat([seen.sum(-1) for seen in case.visible()])
    many = rows[rows > 0] >= 8
    peaky = case.scale is not None and case.scale >= PEAKY * case.head_dim**-0.5
    return len(many) * case.heads >= 24 and bool(many.double().mean() > 0.5) and not peaky


def draw_merge(seed: int, device: torch.device | str = "cpu") -> MergeCase:
    """A merge case, empty parts and rows included."""
    rng = random.Random(f"merge {seed}")
    parts = rng.choice((1, 2, 3, 4, 7, 16, 33, 70))
    # Many parts take time in the interpreter, and fp32's noise needs some rows (`_fair_in_fp32`).
    batch, heads = (rng.choice((1, 2)), rng.choice((1, 3))) if parts <= 7 else (1, 1)
    length = rng.choice((1, 2, 4, 5))
    allowed = [d for d in dtypes(device) if d != torch.float32 or batch * heads * length >= 4]
    dtype = rng.choice(allowed)
    wider = (None, None, *(d for d in allowed if d != torch.float64))
    empty = sorted(rng.sample(range(parts), rng.randint(1, parts))) if rng.random() < 0.3 else ()
    return MergeCase(
        seed, parts, batch, heads, length, draw_head_dim(rng, device), dtype,
        None if dtype == torch.float64 else rng.choice(wider), rng.choice(LAYOUTS),
        rng.choice((0.0, 0.2, 0.5)), tuple(empty), rng.choice((1.0, 5.0, 60.0)),
    )  # fmt: skip


def summarize(features: Iterable[Iterable[str]]) -> str:
    """One line from many cases' `features()`: how many cases there are, and how many have each."""
    features = list(features)
    counts = Counter(feature for found in features for feature in found)
    return f"{len(features)} cases: " + ", ".join(
        f"{name} {n}" for name, n in sorted(counts.items())
    )
