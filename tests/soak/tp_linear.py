"""The tensor-parallel matmuls by every strategy and method: sizes, dtypes, equal and unequal rows.

Results are held against fp64 within what their roundings allow, and repeats against the bits of the first.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from tests.soak.loop import Group
from torch_fdattn.dist import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from torch_fdattn.dist.tensor_parallel import low_latency

GATHER, SCATTER, ALL_REDUCE = "gather", "scatter", "all_reduce"
#: torch's own all-reduces, whose workspaces are of one stream, are not ours to soak.
BY = {
    GATHER: ("copy_engine", "fused", "low_latency", "collective"),
    SCATTER: ("copy_engine", "fused", "low_latency", "collective"),
    ALL_REDUCE: ("low_latency", "gemm_all_reduce", "nccl"),
}
#: Whose bits depend on what a backend chooses.
_STOCK = ("collective", "nccl")
ROWS, FEATURES, COLUMNS = (1, 2, 9), (16, 40, 72), (2, 16, 34)
GPU_ROWS, GPU_FEATURES, GPU_COLUMNS = (1, 7, 16, 60, 130), (64, 72, 300, 1024), (34, 64, 130, 512)


class Problem(NamedTuple):
    """A kind of call on one rank. rows: of each rank; M of all."""

    rows: tuple[int, ...]
    shard: Tensor  # (m_r, K), to be gathered
    part: Tensor  # (M, K), of a sum over ranks
    weight: Tensor  # (N, K)
    exact: dict[str, tuple[Tensor, Tensor]]  # for each op (result, how far one may be from it)


class Call(NamedTuple):
    """One call's draw."""

    problem: int
    op: str
    by: str
    scale: float


class Linear:
    """The problems of one group, the largest first."""

    def __init__(self, group: Group, seed: str, device: torch.device) -> None:
        self.group, self.device = group, device
        # Values and tiles, of sizes that are small on CPUs.
        low_latency.LAMPORT_BYTES = 256 if device.type == "cpu" else 1 << 15
        self.problems = [
            self._problem(i, random.Random(f"{seed} {i}"))
            for i in range(16 if device.type == "cuda" else 6)
        ]
        #: The first result of each call.
        self._bits: dict[Call, tuple[Tensor, ...]] = {}

    def _problem(self, i: int, rng: random.Random) -> Problem:
        world, cuda = self.group.size, self.device.type == "cuda"
        sizes = (GPU_ROWS, GPU_FEATURES, GPU_COLUMNS) if cuda else (ROWS, FEATURES, COLUMNS)
        most, features, columns = (max(s) if i == 0 else rng.choice(s) for s in sizes)
        if i == 1 and not cuda:
            features, columns = 260, 40  # several blocks and tiles of `gemm_all_reduce`
        rows = [most] * world
        if i % 4 == 3:
            rows = [rng.randint(0, most) for _ in rows[1:]] + [most]
        half = rng.choice([torch.bfloat16, torch.float16]) if cuda else torch.float16
        dtype = [torch.float32, half][i % 2]
        made = torch.Generator().manual_seed(rng.getrandbits(32))
        xs = torch.randn(world, sum(rows), features, generator=made)
        weights = torch.randn(world, columns, features, generator=made)
        xs, weights = (x.to(self.device, dtype) for x in (xs, weights))
        xs[1:] *= 2  # what ranks add differs in size
        rank = self.group.rank
        own = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
        total, bounds = _exact(xs, weights)
        exact = {
            GATHER: _exact(xs[:1], weights[rank : rank + 1]),
            SCATTER: (total[own], bounds[own]),
            ALL_REDUCE: (total, bounds),
        }
        return Problem(tuple(rows), xs[0, own], xs[rank], weights[rank], exact)

    def warm_up(self) -> None:
        for op, ways in BY.items():
            for by in ways:
                call = Call(0, op, by, 1.0)
                self.run(call, self.inputs(call))

    def draw(self, rng: random.Random) -> Call:
        op = rng.choice(list(BY))
        by = rng.choices(BY[op], [1 if way in _STOCK else 4 for way in BY[op]])[0]
        return self.redraw(Call(rng.randrange(len(self.problems)), op, by, 1.0), rng)

    def redraw(self, call: Call, rng: random.Random) -> Call:
        return call._replace(scale=2.0 ** rng.randint(0, 4) * rng.choice([1, -1]))

    def inputs(self, call: Call) -> tuple[Tensor, ...]:
        problem = self.problems[call.problem]
        return ((problem.shard if call.op == GATHER else problem.part) * call.scale,)

    def run(self, call: Call, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        problem, group = self.problems[call.problem], self.group.name
        (x,), weight, how = inputs, problem.weight, dict(rows=problem.rows, strategy=call.by)
        if call.op == GATHER:
            return tuple(all_gather_matmul(x, [weight], group, **how))
        if call.op == SCATTER:
            return (matmul_reduce_scatter(x, weight, group, **how),)
        return (matmul_all_reduce(x, weight, group, method=call.by),)

    def expect(self, call: Call, found: tuple[Tensor, ...]) -> None:
        exact, bounds = self.problems[call.problem].exact[call.op]
        error = (found[0] / call.scale).double() - exact
        wrong = ~(error.abs() <= bounds)  # NaN is wrong, too
        assert not wrong.any(), f"{call}: {int(wrong.sum())} of {wrong.numel()} numbers are wrong"
        if call.by not in _STOCK:
            first = self._bits.setdefault(call, found)
            assert torch.equal(first[0], found[0]), f"{call}: other bits than the first time"

    def replicated(self, call: Call, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return found if call.op == ALL_REDUCE else ()

    def kinds(self, call: Call) -> Iterable[str]:
        return f"{call.op} by {call.by}", str(self.problems[call.problem].part.dtype)[6:]


def _exact(xs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(the sum over ranks of xs (W, M, K) @ weights (W, N, K).mT in fp64, how far a result may be from it).

    Partial products are rounded to the dtype once, and summed in it or in fp32, in any order.
    """
    world, _, features = xs.shape
    info, wide, wide_weights = torch.finfo(xs.dtype), xs.double(), weights.double()
    partial = wide @ wide_weights.mT
    bounds = (world + 1) * (info.eps * partial.abs().sum(0) + info.tiny * info.eps)
    summing = torch.finfo(torch.float32).eps * features
    bounds += summing * (wide.abs() @ wide_weights.abs().mT).sum(0)
    return partial.sum(0), bounds
