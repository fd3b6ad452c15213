"""Which strategy the matmuls and the layers take: measured, alike on all ranks and in every call."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.dist.dense_layers import HIDDEN, config
from tests.dist.one_sided_matmuls import STRATEGIES, _kernels, draw, expect_launch, of_rank  # noqa: F401
from tests.dist.parts import randomise
from torch_fdattn.dist import (
    TPMLP,
    all_gather_matmul,
    matmul_all_reduce,
    matmul_all_reduce_rms_norm,
)
from torch_fdattn.dist.tensor_parallel.auto import ALL_REDUCE, GATHER, SCATTER
from torch_fdattn.dist.tensor_parallel.layers import TokenRows
from torch_fdattn.models.transformer import MLP
from torch_fdattn.ops.library import launches


def test_auto_is_collective_where_nothing_was_measured(group, rank_device) -> None:
    before = launches.total()
    x, weight = draw(2, 6, device=rank_device), draw(4, 6, device=rank_device)
    all_gather_matmul(x, [weight], group)
    matmul_all_reduce(x, weight, group)
    assert launches.total() == before


@torch.no_grad()
def test_every_call_and_a_graph_take_the_same_choice(group, rank_device, measured) -> None:
    """No memory of first calls: the table alone decides."""
    if dist.get_world_size() == 1:
        pytest.skip("needs 2 ranks")
    measured((ALL_REDUCE, 6, 8, [[4, "low_latency"], [64, "nccl"]]))
    weight = draw(6, 8, device=rank_device)
    for rows, ours in ((4, True), (5, True), (40, False)):
        x = draw(rows, 8, device=rank_device)
        for _ in range(4):
            before = launches["tensor_parallel/low_latency"]
            y = matmul_all_reduce(x, weight, group)
            torch.testing.assert_close(y, dist.get_world_size() * F.linear(x, weight), atol=1e-5, rtol=1e-5)  # fmt: skip
            assert (launches["tensor_parallel/low_latency"] > before) == ours
    if rank_device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        x = draw(4, 8, device=rank_device)
        before = launches["tensor_parallel/low_latency"]
        with torch.cuda.graph(graph):
            y = matmul_all_reduce(x, weight, group)
        assert launches["tensor_parallel/low_latency"] == before + 1
        graph.replay()
        torch.testing.assert_close(y, dist.get_world_size() * F.linear(x, weight), atol=1e-5, rtol=1e-5)  # fmt: skip


@torch.no_grad()
def test_a_norm_behind_it_takes_the_same_choice(group, rank_device, measured) -> None:
    if dist.get_world_size() == 1:
        pytest.skip("needs 2 ranks")
    measured((ALL_REDUCE, 6, 8, [[4, "low_latency"], [64, "nccl"]]))
    x, weight = draw(4, 8, device=rank_device), draw(6, 8, device=rank_device)
    residual, norm = draw(4, 6, device=rank_device), draw(6, device=rank_device)
    for _ in range(3):
        before = launches["tensor_parallel/row_norm"]
        matmul_all_reduce_rms_norm(x, weight, group, residual, norm, 1e-6)
        assert launches["tensor_parallel/row_norm"] == before + 1


@torch.no_grad()
def test_layers_choose_alike_where_shares_differ(group, rank_device, measured) -> None:
    """By the first rank's sizes, of those measured the nearest."""
    world = dist.get_world_size()
    if world == 1:
        pytest.skip("needs 2 ranks")
    dense = randomise(MLP(config(inner=10 * world + 1))).to(rank_device)
    measured(
        (GATHER, 30, HIDDEN, [[4 * world, "collective"], [8 * world, "copy_engine"]]),
        (SCATTER, HIDDEN, 14, [[8 * world, "copy_engine"]]),
        (ALL_REDUCE, HIDDEN, 14, [[2, "low_latency"], [64, "nccl"]]),
    )
    for strategy, rows, launched in (
        ("ag_rs", 4 * world, ["copy_engine_reduce_scatter"]),
        ("ag_rs", 7 * world, ["copy_engine_all_gather", "copy_engine_reduce_scatter"]),
        ("all_reduce", 3, ["low_latency"]),
        ("all_reduce", 60, []),
    ):
        layer = TPMLP.from_module(dense, group, strategy)
        x = draw(rows, HIDDEN, device=rank_device)
        own = of_rank(rows // world) if strategy == "ag_rs" else slice(None)
        before = launches.copy()
        torch.testing.assert_close(layer(x[own]), dense(x)[own], atol=1e-4, rtol=1e-4)
        ours = {
            name[len("tensor_parallel/") :]
            for name in launches - before
            if "tensor_parallel" in name
        }
        assert ours == set(launched), (strategy, rows)


@torch.no_grad()
@pytest.mark.parametrize("linear_strategy", STRATEGIES)
def test_layers_that_take_either_form(group, rank_device, linear_strategy: str) -> None:
    """`copy_engine`, which all-reduces nothing, is for sharded rows; replicated ones take what is measured."""
    world = dist.get_world_size()
    dense, tokens = randomise(MLP(config(inner=9))).to(rank_device), TokenRows()
    layer = TPMLP.from_module(dense, group, "auto", tokens=tokens, linear_strategy=linear_strategy)
    x = draw(2 * world, HIDDEN, device=rank_device)
    torch.testing.assert_close(layer(x), dense(x), atol=1e-4, rtol=1e-4)
    tokens.rows = [2] * world
    own = of_rank(2)
    names = (f"{linear_strategy}_all_gather", f"{linear_strategy}_reduce_scatter")
    with expect_launch(*names):
        torch.testing.assert_close(layer(x[own]), dense(x)[own], atol=1e-4, rtol=1e-4)
