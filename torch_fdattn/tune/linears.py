"""The linear layers of a model on one rank, and which strategy or method of each op was the fastest at how many rows.

Shared with `python -m benchmarks tp_crossover`, which compares the same with others' implementations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from torch_fdattn.dist.collectives import split_evenly
from torch_fdattn.dist.tensor_parallel.auto import ALL_REDUCE, GATHER, LAYER, SCATTER
from torch_fdattn.dist.tensor_parallel.head_sharding import shard_heads
from torch_fdattn.dist.tensor_parallel.op import GEMM_ALL_REDUCE_ROWS
from torch_fdattn.tables.sections import CHOICES

#: Ours by op; what runs where nothing is measured first.
VARIANTS = {op: CHOICES[op] for op in (GATHER, SCATTER, ALL_REDUCE)}
#: Rows up to which a method is tried: its bytes to every rank are twice the result, or the whole result W times.
MAX_ROWS = {"gemm_all_reduce": GEMM_ALL_REDUCE_ROWS, "one_shot": 4096}
#: Gathering and scattering, these are `collective` where ranks have different numbers of rows.
EVEN = ("fused",)


class LayerDims(Protocol):
    """What a model's configuration says of the sizes of a layer."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class Shape(NamedTuple):
    """A linear layer on one rank."""

    layer: str
    columns: int
    features: int
    ops: tuple[str, ...]


def shapes(config: LayerDims, ranks: int) -> list[Shape]:
    """The four of a layer; of the first rank, whose shares are the largest."""
    shard = shard_heads(config.num_heads, config.num_kv_heads, 0, ranks)
    inner = split_evenly(config.intermediate_size, ranks)[0]
    heads, hidden = shard.q_heads * config.head_dim, config.hidden_size
    qkv = heads + 2 * shard.kv_heads * config.head_dim
    return [
        Shape("qkv", qkv, hidden, (GATHER,)),
        Shape("o", hidden, heads, (SCATTER, ALL_REDUCE)),
        Shape("gate_up", 2 * inner, hidden, (GATHER,)),
        Shape("down", hidden, inner, (SCATTER, ALL_REDUCE)),
    ]


def variants(op: str, rows: int, ranks: int, on_gpu: bool) -> list[str]:
    """What is tried at so many rows; torch's own kernels need GPUs."""
    uneven = rows % ranks != 0
    return [
        name
        for name in VARIANTS[op]
        if rows <= MAX_ROWS.get(name, rows)
        and (on_gpu or "shot" not in name)
        and not (uneven and op != ALL_REDUCE and name in EVEN)
    ]


class LinearChoices:
    """What a sweep has found so far; medians are the same on all ranks, and so are the choices."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._choices: dict[tuple[str, int, int], dict[int, str]] = {}
        #: µs of what was chosen, and of the product alone.
        self._taken: dict[tuple[str, int, int, int], tuple[float, float]] = {}

    def add(self, op: str, shape: Shape, rows: int, name: str, us: float, alone_us: float) -> None:
        """name: what was chosen, which takes us; alone_us: of the product without a collective."""
        sizes = op, shape.columns, shape.features
        self._choices.setdefault(sizes, {})[rows] = name
        self._taken[(*sizes, rows)] = us, alone_us

    def layer(self, config: LayerDims, rows: Iterable[int]) -> None:
        """Which form a model's layers had better take: the sum over the four of them."""
        by_name = {shape.layer: shape for shape in shapes(config, self._ranks)}
        for count in rows:
            taken = {
                (name, op): self._taken.get((op, shape.columns, shape.features, count))
                for name, shape in by_name.items()
                for op in shape.ops
            }
            if None in taken.values():  # the time was up before
                continue
            sharded = sum(taken[key][0] for key in taken if key[1] != ALL_REDUCE)
            alone = sum(taken[name, GATHER][1] for name in ("qkv", "gate_up"))
            replicated = alone + sum(taken[name, ALL_REDUCE][0] for name in ("o", "down"))
            down = by_name["down"]
            sizes = LAYER, down.columns, down.features
            form = "ag_rs" if sharded < replicated else "all_reduce"
            self._choices.setdefault(sizes, {})[count] = form

    def entries(self) -> list[dict]:
        """op, columns, features and choices [(rows, name), …] of each."""
        return [
            dict(op=op, columns=n, features=k, choices=sorted(found.items()))
            for (op, n, k), found in self._choices.items()
        ]


def fastest(op: str, times: Mapping[str, float]) -> str:
    """Of ours, by µs; what calls BLAS and the group's collective where nothing was measured."""
    return min(VARIANTS[op], key=lambda name: times.get(name, math.inf))
