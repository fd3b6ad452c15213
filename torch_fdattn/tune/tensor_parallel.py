"""Which strategy or method of the tensor-parallel matmuls is the fastest, by rows and a layer's sizes, on these ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fdattn.dist import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from torch_fdattn.dist.collectives import split_evenly
from torch_fdattn.dist.tensor_parallel import auto
from torch_fdattn.dist.tensor_parallel.auto import ALL_REDUCE, GATHER, STOCK, LinearSizes
from torch_fdattn.tune.linears import LinearChoices, Shape, fastest, shapes, variants
from torch_fdattn.tune.session import Measurement, Session, name_of

SECTION = "tensor_parallel"
ROWS, QUICK_ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096), (2,)
#: Rows up to which what a call reads is its weight.
ROTATED_ROWS = 1024
#: The product without a collective, among the times of a case.
ALONE = "alone"


class LayerSizes(NamedTuple):
    """A `linears.LayerDims`."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


#: Of models of 8 and of 70 billion parameters; a lookup takes the nearest.
LAYERS = (LayerSizes(4096, 14336, 32, 8, 128), LayerSizes(8192, 28672, 64, 8, 128))
QUICK_LAYERS = (LayerSizes(32, 64, 4, 2, 8),)


@torch.inference_mode()
def measure(session: Session) -> list[dict]:
    if not session.shares_memory(SECTION):
        return []
    dtype = session.half if session.clock.on_gpu else torch.float32
    layers, rows = (QUICK_LAYERS, QUICK_ROWS) if session.quick else (LAYERS, ROWS)
    choices = LinearChoices(session.ranks)
    _sweep(session, layers, rows, dtype, choices)
    for layer in layers:
        choices.layer(layer, rows)
    about = dict(ranks=session.ranks, dtype=name_of(dtype))
    return [
        entry | about | dict(choices=[list(pair) for pair in entry["choices"]])
        for entry in choices.entries()
    ]


def _sweep(
    session: Session, layers: Sequence[LayerSizes], rows: Sequence[int], dtype: torch.dtype, choices: LinearChoices
) -> None:  # fmt: skip
    for layer in layers:
        for shape in shapes(layer, session.ranks):
            for op in shape.ops:
                for count in rows:
                    if session.expired():
                        session.note(f"{SECTION}: time is up at {op} of {shape.layer}, {count} rows")  # fmt: skip
                        return
                    _measure(session, op, shape, count, dtype, choices)


def _measure(
    session: Session, op: str, shape: Shape, rows: int, dtype: torch.dtype, choices: LinearChoices
) -> None:  # fmt: skip
    about = (
        f"{op} M{rows} N{shape.columns} K{shape.features} {name_of(dtype)}, {session.ranks} ranks"
    )
    case = MatmulCase(session, op, shape, rows, dtype)
    names = variants(op, rows, session.ranks, session.clock.on_gpu)
    candidates = ((name, case.calls(name)) for name in names)
    agreed = session.agreeing(f"{SECTION}: {about}", candidates)
    times = session.clock.compare({ALONE: case.alone(), **agreed})
    alone_us, infinite = times.pop(ALONE, 0.0), float("inf")
    name, us = fastest(op, times), min(times.values(), default=infinite)
    shipped = _shipped(session, op, shape, rows, dtype)
    session.report(Measurement(SECTION, about, shipped, name, times.get(shipped, infinite), us))
    choices.add(op, shape, rows, name, us, alone_us)


def _shipped(session: Session, op: str, shape: Shape, rows: int, dtype: torch.dtype) -> str:
    sizes = LinearSizes(rows, shape.columns, shape.features, session.ranks)
    device = auto.Device.of(session.device)
    return auto.lookup(auto.table(), op, device, name_of(dtype), sizes) or STOCK[op]


class MatmulCase:
    """One op at one size on this rank, and its calls by each strategy or method, over copies of the weight."""

    def __init__(
        self, session: Session, op: str, shape: Shape, rows: int, dtype: torch.dtype
    ) -> None:
        self._op, self._group = op, session.group.group_name
        self._rows = split_evenly(rows, session.ranks)
        rank = torch.distributed.get_rank(session.group)
        made = torch.Generator(session.device).manual_seed(rank)
        new = partial(torch.randn, generator=made, device=session.device, dtype=dtype)
        self._every = new((rows, shape.features))  # what the product alone takes
        self._x = self._every[: self._rows[rank]] if op == GATHER else self._every
        weight = new((shape.columns, shape.features)).mul_(shape.features**-0.5)
        copies = session.clock.copies(weight.nbytes) if rows <= ROTATED_ROWS else 1
        self._weights = [weight, *(weight.clone() for _ in range(copies - 1))]

    def alone(self) -> list[Callable[[], Tensor]]:
        return [partial(F.linear, self._every, weight) for weight in self._weights]

    def calls(self, name: str) -> list[Callable[[], Tensor]]:
        return [partial(self._call, weight, name) for weight in self._weights]

    def _call(self, weight: Tensor, name: str) -> Tensor:
        if self._op == GATHER:
            return all_gather_matmul(
                self._x, [weight], self._group, rows=self._rows, strategy=name
            )[0]
        if self._op == ALL_REDUCE:
            return matmul_all_reduce(self._x, weight, self._group, method=name)
        return matmul_reduce_scatter(self._x, weight, self._group, rows=self._rows, strategy=name)
