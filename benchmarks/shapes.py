"""What a case is, as frozen data, and the one format of case names.

A name reads `B<batch> H<query heads>/<KV heads> N<KV length> D<head dim>` and then what else tells
cases apart: `B4 H16/16 N4096 D128 causal bf16`, `B32 H32/8 N32768 D128 bf16 page16 ragged-uniform`.
A label is the short form that tables of published figures use (`hd128 4k causal`). Needs no torch,
so that results can be shown anywhere.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

_NAME = re.compile(r"B(\d+) H(\d+)/(\d+) N(\d+) D(\d+)((?: \S+)*)")
PURE_READ, MATMUL = "pure_read", "matmul"
LOCAL = "local"  # the same call without its communication
GEMM_ALONE = "gemm_alone"  # a matmul without the collective beside it
FLOORS = (PURE_READ, MATMUL, LOCAL, GEMM_ALONE)
MATMUL_CASE = "M8192 N8192 K8192 bf16"
DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1, "int8": 1}


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


class Case:
    """What every case has: batch, heads, kv_heads, kv_len, head_dim, `tags`, a label, and whether it is tiny."""

    @property
    def name(self) -> str:
        return Shape(
            self.batch, self.heads, self.kv_heads, self.kv_len, self.head_dim, self.tags
        ).name


@dataclass(frozen=True)
class AttentionCase(Case):
    """Prefill or training attention: as many queries as keys.

    feature: what else is asked for (`features.py`); its cases have times in place of rates.
    """

    label: str
    batch: int
    heads: int
    kv_heads: int
    seq_len: int
    head_dim: int
    causal: bool
    dtype: str = "bf16"
    tiny: bool = False
    feature: str | None = None

    @property
    def kv_len(self) -> int:
        return self.seq_len

    @property
    def tags(self) -> tuple[str, ...]:
        feature = (self.feature,) if self.feature else ()
        return ("causal" if self.causal else "full", self.dtype, *feature)

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
class DecodeCase(Case):
    """One query token per sequence against a cache of `kv_len` tokens, or of up to that many.

    page: tokens a page, pages in random order; None is one contiguous cache a sequence.
    ragged: how lengths are drawn (`sequence_lengths`); None is all of them full.
    cache: fp8 (e4m3) or int8 K and V with fp32 scales; None is the dtype of q.
    """

    batch: int
    heads: int
    kv_heads: int
    kv_len: int
    head_dim: int = 128
    dtype: str = "bf16"
    tiny: bool = False
    page: int | None = None
    ragged: str | None = None
    cache: str | None = None

    @property
    def tags(self) -> tuple[str, ...]:
        cache = (f"kv-{self.cache}",) if self.cache else ()
        page = (f"page{self.page}",) if self.page else ()
        return (self.dtype, *cache, *page, *((f"ragged-{self.ragged}",) if self.ragged else ()))

    @property
    def label(self) -> str:
        parts = [f"B{self.batch} H{self.heads}/{self.kv_heads} N{self.kv_len}"]
        if self.tiny:
            parts.insert(0, "tiny")
        else:
            parts += [f"D{self.head_dim}"] if self.head_dim != 128 else []
            parts += [self.dtype] if self.dtype != "bf16" else []
        return " ".join((*parts, *self.tags[1:]))

    @property
    def kv_lens(self) -> tuple[int, ...]:
        return sequence_lengths(self.batch, self.kv_len, self.ragged)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the valid K and V: what the call must read, and the numerator of its GB/s."""
        values = 2 * self.kv_heads * self.head_dim * sum(self.kv_lens)
        return values * DTYPE_BYTES[self.cache or self.dtype]


@dataclass(frozen=True)
class CompileCase(Case):
    """Layers of a model under torch.compile (`compiled.py`); use: a key of its `_USES`."""

    use: str
    batch: int
    heads: int
    kv_heads: int
    kv_len: int
    head_dim: int
    dtype: str = "bf16"
    tiny: bool = False
    layers: int = 2

    @property
    def tags(self) -> tuple[str, ...]:
        return self.dtype, self.use

    @property
    def label(self) -> str:
        return f"{'tiny ' if self.tiny else ''}{self.use} B{self.batch} N{self.kv_len}"


@dataclass(frozen=True)
class CpuCase(Case):
    """Attention of CPU tensors (`cpu.py`); kind: causal, full, padded, window, varlen, decode or paged."""

    kind: str
    kv_len: int
    dtype: str
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    tiny: bool = False

    @property
    def batch(self) -> int:
        return 4 if self.kind in ("padded", "paged") else 1

    @property
    def queries(self) -> int:
        return 1 if self.kind in ("decode", "paged") else self.kv_len

    @property
    def tags(self) -> tuple[str, ...]:
        return self.dtype, self.kind

    @property
    def label(self) -> str:
        group = "" if self.heads == self.kv_heads else " GQA"
        return f"{'tiny ' if self.tiny else ''}{self.kind}{group} {self.kv_len} {self.dtype}"


@dataclass(frozen=True)
class GenerateCase(Case):
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
    batch = 1

    @property
    def kv_len(self) -> int:
        return self.prompt_tokens + self.new_tokens

    @property
    def tags(self) -> tuple[str, ...]:
        return self.dtype, self.model, f"prompt{self.prompt_tokens}"

    @property
    def label(self) -> str:
        label = f"{self.model} prompt{self.prompt_tokens} {self.dtype}"
        return f"tiny {label}" if self.tiny else label


@functools.cache
def sequence_lengths(batch: int, kv_len: int, ragged: str | None) -> tuple[int, ...]:
    """The lengths of a batch, from torch's CPU generator with seed 0: the same on every machine.

    `uniform` is 1 to kv_len. `power` is kv_len · u⁶, u uniform in [0, 1), at least 1: many short
    sequences and few long ones. It is drawn after 32 lengths of the former, which are thrown away,
    because the published baselines were drawn that way; these are their very lengths. `short` is a
    sixteenth of kv_len: of a cache sharded over ranks in blocks, the first alone has any key.
    """
    if ragged is None:
        return (kv_len,) * batch
    if ragged == "short":
        return (-(-kv_len // 16),) * batch
    import torch

    made = torch.Generator().manual_seed(0)
    if ragged == "uniform":
        return tuple(torch.randint(1, kv_len + 1, (batch,), generator=made).tolist())
    if ragged == "power":
        torch.randint(1, kv_len + 1, (32,), generator=made)
        drawn = kv_len * torch.rand(batch, generator=made) ** 6
        return tuple(drawn.int().clamp(min=1).tolist())
    raise ValueError(f"ragged must be uniform, power, short or None, got {ragged!r}")
