"""Every case that a benchmark measures, as frozen data, and the one format of their names.

A name reads `B<batch> H<query heads>/<KV heads> N<KV length> D<head dim>` and then what else tells
cases apart: `B4 H16/16 N4096 D128 causal bf16`. A label is the short form that tables of published
figures use (`hd128 4k causal`); `--cases` matches either. The order is the order of measuring, most
wanted first, because a run with a time budget drops the last ones.

Tiny cases exist so that the machinery runs on a CPU; their figures mean nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

_NAME = re.compile(r"B(\d+) H(\d+)/(\d+) N(\d+) D(\d+)((?: \S+)*)")
PURE_READ, MATMUL = "pure_read", "matmul"
FLOORS = (PURE_READ, MATMUL)
MATMUL_CASE = "M8192 N8192 K8192 bf16"
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Shape:
    """What a case's name says."""

    batch: int
    heads: int
    kv_heads: int
    kv_len: int
    head_dim: int
    tags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        shape = f"B{self.batch} H{self.heads}/{self.kv_heads} N{self.kv_len} D{self.head_dim}"
        return " ".join((shape, *self.tags))


def parse_name(name: str) -> Shape:
    """The shape behind a case name."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"case must look like 'B1 H32/8 N4096 D128 bf16', got {name!r}")
    return Shape(*map(int, match.groups()[:5]), tags=tuple(match[6].split()))


@dataclass(frozen=True)
class AttentionCase:
    """Prefill or training attention: as many queries as keys."""

    label: str
    batch: int
    heads: int
    kv_heads: int
    seq_len: int
    head_dim: int
    causal: bool
    dtype: str = "bf16"
    tiny: bool = False

    @property
    def name(self) -> str:
        tags = ("causal" if self.causal else "full", self.dtype)
        return Shape(self.batch, self.heads, self.kv_heads, self.seq_len, self.head_dim, tags).name

    @property
    def forward_flops(self) -> float:
        """4·B·H·N²·D, half of it if causal: the convention of every published table."""
        full = 4 * self.batch * self.heads * self.seq_len**2 * self.head_dim
        return full / 2 if self.causal else float(full)

    @property
    def backward_flops(self) -> float:
        """2.5 times forward: five matmuls for two, recomputation of the scores included."""
        return 2.5 * self.forward_flops


@dataclass(frozen=True)
class DecodeCase:
    """One query token per sequence against a full cache of `kv_len` tokens."""

    batch: int
    heads: int
    kv_heads: int
    kv_len: int
    head_dim: int = 128
    dtype: str = "bf16"
    tiny: bool = False

    @property
    def label(self) -> str:
        shape = f"B{self.batch} H{self.heads}/{self.kv_heads} N{self.kv_len}"
        return f"tiny {shape}" if self.tiny else shape

    @property
    def name(self) -> str:
        return Shape(
            self.batch, self.heads, self.kv_heads, self.kv_len, self.head_dim, (self.dtype,)
        ).name

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V: what the call must read, and the numerator of its GB/s."""
        values = 2 * self.batch * self.kv_heads * self.kv_len * self.head_dim
        return values * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class GenerateCase:
    """Greedy generation with one sequence: `new_tokens` after a prompt of `prompt_tokens`.

    heads, kv_heads and head_dim are the model's, for the name; N is the cache's length at the end.
    """

    model: str
    heads: int
    kv_heads: int
    head_dim: int
    prompt_tokens: int
    new_tokens: int
    dtype: str = "bf16"
    tiny: bool = False

    @property
    def label(self) -> str:
        label = f"{self.model} prompt{self.prompt_tokens} {self.dtype}"
        return f"tiny {label}" if self.tiny else label

    @property
    def name(self) -> str:
        length = self.prompt_tokens + self.new_tokens
        tags = (self.dtype, self.model, f"prompt{self.prompt_tokens}")
        return Shape(1, self.heads, self.kv_heads, length, self.head_dim, tags).name


def _smollm2(prompt_tokens: int, new_tokens: int, dtype: str, tiny: bool = False) -> GenerateCase:
    return GenerateCase("smollm2", 9, 3, 64, prompt_tokens, new_tokens, dtype, tiny)


def _prefill(head_dim: int, kilo: int, causal: bool) -> AttentionCase:
    """16384 tokens in sequences of `kilo` × 1024, 2048 / head_dim heads, as in the baselines."""
    heads = 2048 // head_dim
    label = f"hd{head_dim} {kilo}k {'causal' if causal else 'full'}"
    return AttentionCase(label, 16 // kilo, heads, heads, kilo * 1024, head_dim, causal)


ATTENTION_CASES: tuple[AttentionCase, ...] = (
    _prefill(128, 4, True),
    _prefill(128, 16, True),
    _prefill(128, 4, False),
    _prefill(128, 16, False),
    _prefill(128, 1, True),
    AttentionCase("hd128 8k causal 32/8", 2, 32, 8, 8192, 128, True),
    _prefill(64, 4, True),
    _prefill(64, 16, True),
    _prefill(64, 16, False),
    _prefill(256, 16, True),
    AttentionCase("tiny causal", 2, 4, 2, 48, 32, True, "fp32", tiny=True),
    AttentionCase("tiny full", 1, 3, 1, 33, 16, False, "fp32", tiny=True),
)

DECODE_CASES: tuple[DecodeCase, ...] = (
    DecodeCase(1, 32, 8, 1024),
    DecodeCase(1, 32, 8, 4096),
    DecodeCase(1, 32, 8, 32768),
    DecodeCase(1, 32, 8, 131072),
    DecodeCase(8, 32, 8, 1024),
    DecodeCase(32, 32, 8, 1024),
    DecodeCase(16, 32, 8, 4096),
    DecodeCase(64, 32, 8, 4096),
    DecodeCase(128, 64, 8, 8192),
    DecodeCase(8, 32, 32, 4096),
    DecodeCase(1, 32, 32, 32768),
    DecodeCase(2, 4, 2, 64, 32, "fp32", tiny=True),
    DecodeCase(1, 6, 2, 33, 16, "fp32", tiny=True),
)

GENERATE_CASES: tuple[GenerateCase, ...] = (
    _smollm2(32, 128, "bf16"),
    _smollm2(4096, 128, "bf16"),
    _smollm2(32, 128, "fp32"),
    _smollm2(16, 8, "fp32", tiny=True),
)


class _Selectable(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def tiny(self) -> bool: ...


AnyCase = TypeVar("AnyCase", bound=_Selectable)


def select(cases: Sequence[AnyCase], wanted: str | None, *, tiny_only: bool) -> list[AnyCase]:
    """The cases whose name or label contains one of `wanted`'s comma-separated substrings.

    Tiny cases are chosen only when a substring says `tiny`; with `tiny_only` (no GPU) no others
    are, because a full case would take minutes on a CPU and prove nothing.
    """
    parts = [part.strip() for part in (wanted or "").split(",") if part.strip()]
    if tiny_only and not parts:
        parts = ["tiny"]
    chosen = []
    for case in cases:
        texts = (case.name, case.label)
        hit = any(part in text for part in parts for text in texts) if parts else True
        asked_tiny = any("tiny" in part for part in parts)
        if hit and (not case.tiny or asked_tiny) and (case.tiny or not tiny_only):
            chosen.append(case)
    if not chosen:
        labels = ", ".join(case.label for case in cases if case.tiny or not tiny_only)
        raise ValueError(f"--cases must match one of [{labels}], got {wanted!r}")
    return chosen
