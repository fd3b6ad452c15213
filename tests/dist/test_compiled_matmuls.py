"""Graphs whose matmuls beside collectives became one op compute what they did, on every rank; gradients too.

torchrun --nproc-per-node 2 -m pytest tests/dist/test_compiled_matmuls.py    strategy "collective"
TRITON_INTERPRET=1 torchrun …                                                the kernels as well
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._pytree import tree_leaves

import torch_fdattn
from tests.compile_backend.collective_forms import FORMS
from tests.dist.parts import assert_near, randomise
from tests.pairwise import pairwise
from torch_fdattn.dist import all_gather_matmul, matmul_reduce_scatter
from torch_fdattn.ops.library import INTERPRET, launches

WIDTH = 16
OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


#: Where kernels run, theirs; the interpreter has nothing new to say of the collectives.
STRATEGIES = [
    *(() if INTERPRET else ("collective",)),
    *(("copy_engine", "fused", "low_latency") if INTERPRET or torch.cuda.is_available() else ()),
]


def compiled(function, strategy: str, lower: str = "aot_eager", dynamic: bool = False):
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(
        function, backend="fdattn", dynamic=dynamic, fullgraph=True,
        options={"lower": lower, "tensor_parallel": strategy},
    )  # fmt: skip


def rewritten() -> dict[str, int]:
    return {op: counters["fdattn"][f"op/{op}"] for op in OPS if counters["fdattn"][f"op/{op}"]}


def of_rank(*shape: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(shape, generator=generator).to(device)


#: What a graph becomes does not depend on the strategy: each form by one of them, in turn.
BY_TURNS = [(name, STRATEGIES[i % len(STRATEGIES)]) for i, name in enumerate(FORMS)]


@pytest.mark.parametrize(("name", "strategy"), BY_TURNS)
def test_forms(group, rank_device, name: str, strategy: str) -> None:
    function, ops = FORMS[name]
    expected = [op for op in ops if strategy != "copy_engine" or op != "matmul_all_reduce"]
    world = dist.get_world_size()
    x, w = of_rank(world * 6, 8, device=rank_device), of_rank(10, 8, device=rank_device)

    def run(x, w):
        return function(x, w, group, world)

    before = sum(launches.values())
    found = compiled(run, strategy)(x, w)
    assert sum(rewritten().values()) == len(expected)
    assert counters["fdattn"]["left/strategy"] == len(ops) - len(expected)
    assert (sum(launches.values()) > before) == (strategy != "collective" and bool(expected))
    results = tree_leaves(found), tree_leaves(run(x.double(), w.double()))
    for ours, exact in zip(*results, strict=True):
        assert_near(ours, exact, 1e-6)


class SwiGLU(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=bias) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.mlp = SwiGLU(bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def plan(sequence_parallel: bool) -> dict:
    if not sequence_parallel:
        columns = {f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
        return {**columns, "mlp.down": RowwiseParallel()}
    return {
        "norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }


#: How many ops of each kind a forward and a backward have.
EXPECTED = {
    # Rows are gathered for gate and up together, and in the backward for down's gradient.
    True: {"all_gather_matmul": 2, "matmul_reduce_scatter": 2},
    # down; and the gradients of gate's and up's input.
    False: {"matmul_all_reduce": 3},
}


@pairwise(
    strategy=STRATEGIES, sequence_parallel=[False, True], sequences=[1, 2], bias=[False, True]
)
def test_dtensor_model(
    group, rank_device, mesh, strategy: str, sequence_parallel: bool, sequences: int, bias: bool
) -> None:
    world = dist.get_world_size()
    dense = randomise(Block(bias)).to(rank_device)
    model = parallelize_module(copy.deepcopy(dense), mesh, plan(sequence_parallel))
    torch.manual_seed(1)
    whole = torch.randn(sequences, 4 * world, WIDTH).to(rank_device)
    part = whole.chunk(world, 1)[dist.get_rank()].contiguous() if sequence_parallel else whole
    found, expected = [], []
    run = compiled(model, strategy)
    for function, results in ((run, found), (model, expected)):
        model.zero_grad()
        x = part.clone().requires_grad_()
        y = function(x)
        (y * torch.cos(y.detach())).sum().backward()
        results += [y, x.grad, *(local(p.grad) for p in model.parameters())]
    reduces = strategy == "copy_engine" and not sequence_parallel  # which it cannot: they stay
    assert rewritten() == ({} if reduces else EXPECTED[sequence_parallel])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    exact = dense(whole)
    mine = exact.chunk(world, 1)[dist.get_rank()] if sequence_parallel else exact
    torch.testing.assert_close(found[0], mine, rtol=1e-4, atol=1e-4)


def local(x: Tensor) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


@pytest.mark.slow  # C++ is compiled; the pass is the same whatever lowers the graph
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_through_inductor_with_dynamic_lengths(group, rank_device, mesh, strategy: str) -> None:
    model = parallelize_module(randomise(Block(True)).to(rank_device), mesh, plan(True))
    run = compiled(model, strategy, lower="inductor", dynamic=True)
    with fresh_cache(), torch.no_grad():  # a graph out of a cache is not rewritten again
        for rows in (4, 6, 5):
            x = of_rank(2, rows, WIDTH, device=rank_device)
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
    assert rewritten() == {"all_gather_matmul": 1, "matmul_reduce_scatter": 1}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_own_layers(group, rank_device, strategy: str) -> None:
    """This package's ops are traced as collectives, which the pass then finds."""
    up, down = (of_rank(24, 16, device=rank_device) for _ in range(2))

    def run(x, up, down):
        (y,) = all_gather_matmul(x, [up], group)
        return matmul_reduce_scatter(y.relu(), down.t(), group)

    results = []
    for function in (compiled(run, strategy), run):
        leaves = [
            t.clone().requires_grad_() for t in (of_rank(5, 16, device=rank_device), up, down)
        ]
        y = function(*leaves)
        y.square().sum().backward()
        results.append([y, *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-3)
    assert rewritten() == {"all_gather_matmul": 2, "matmul_reduce_scatter": 2}


def test_explained(group, rank_device, mesh) -> None:
    model = parallelize_module(randomise(Block(False)).to(rank_device), mesh, plan(True))
    x = of_rank(1, 4, WIDTH, device=rank_device).requires_grad_()
    report = torch_fdattn.explain(model, tensor_parallel="collective")(x)
    assert [site.op for site in report.matmuls] == [
        "all_gather_matmul", "matmul_reduce_scatter", "all_gather_matmul", "matmul_reduce_scatter",
    ]  # fmt: skip
    assert "mlp.gate and mlp.up, 2 matmuls, keeps the gathered rows" in str(report)
    assert x.grad is None
    left = torch_fdattn.explain(model)(x)
    if rank_device.type == "cpu":
        assert {site.reason for site in left.matmuls} == {"not-faster"}
