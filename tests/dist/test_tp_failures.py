"""The tensor-parallel matmuls where ranks differ, or where a call fails half way."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.dist.dense_layers import HIDDEN, config
from tests.dist.one_sided_matmuls import STRATEGIES, _kernels, by_tiles, draw, of_rank  # noqa: F401
from tests.dist.parts import randomise
from torch_fdattn.dist import (
    TPMLP,
    PeerTimeout,
    all_gather_matmul,
    check,
    matmul_all_reduce,
    matmul_reduce_scatter,
    set_timeout,
)
from torch_fdattn.dist.symm import received_sums
from torch_fdattn.dist.tensor_parallel import fused_gather, gemm_all_reduce
from torch_fdattn.dist.tensor_parallel.auto import ALL_REDUCE, GATHER, SCATTER
from torch_fdattn.models.transformer import MLP
from torch_fdattn.ops.library import launches


@pytest.fixture(autouse=True)
def _several(rank_device) -> None:
    if dist.get_world_size() == 1:
        pytest.skip("needs 2 ranks")


class Failure(RuntimeError):
    """As if memory ran out."""


def fails(*_, **__) -> None:
    raise Failure


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("who", ["all", "rank 0"])
def test_a_gather_that_fails_half_way(group, rank_device, monkeypatch, strategy, who) -> None:
    """Its chunks are not taken for those of the next call."""
    world, rank = dist.get_world_size(), dist.get_rank()
    weight = draw(6, 16, device=rank_device)
    for i in range(3):
        x = draw(3 * world, 16, device=rank_device) + i
        with monkeypatch.context() as patch:
            if i == 1 and (who == "all" or rank == 0):
                patch.setattr(torch, "mm", fails)
                patch.setattr(fused_gather, "tile_for", fails)
                patch.setattr(F, "linear", fails)
                with pytest.raises(Failure):
                    all_gather_matmul(x[of_rank(3)], [weight], group, strategy=strategy)
                continue
            (y,) = all_gather_matmul(x[of_rank(3)], [weight], group, strategy=strategy)
            torch.testing.assert_close(y, F.linear(x, weight))


def test_a_reduce_scatter_that_fails_half_way(group, rank_device, monkeypatch) -> None:
    world = dist.get_world_size()
    weight = draw(6, 16, device=rank_device)
    for i in range(3):
        x = draw(3 * world, 16, device=rank_device) + i
        if i == 1:
            with monkeypatch.context() as patch:
                patch.setattr(received_sums, "cdiv", fails)
                with pytest.raises(Failure):
                    matmul_reduce_scatter(x, weight, group, strategy="copy_engine")
            continue
        y = matmul_reduce_scatter(x, weight, group, strategy="copy_engine")
        torch.testing.assert_close(y, world * F.linear(x, weight)[of_rank(3)])


def test_an_all_reduce_that_fails(group, rank_device, monkeypatch) -> None:
    """On all ranks, before its launch: the next call finds nothing of it."""
    world, rank = dist.get_world_size(), dist.get_rank()
    weight = draw(6, 16, device=rank_device)
    for i in range(4):
        x = draw(3, 16, device=rank_device) + i
        if i == 1:
            with monkeypatch.context() as patch:
                patch.setattr(gemm_all_reduce, "launch", fails)
                with pytest.raises(Failure):
                    matmul_all_reduce(x, weight, group, method="gemm_all_reduce")
            dist.barrier()
            continue
        time.sleep(0.2 * (rank == i % world))
        y = matmul_all_reduce(x, weight, group, method="gemm_all_reduce")
        torch.testing.assert_close(y, world * F.linear(x, weight))


def test_a_rank_that_comes_too_late_for_a_sum(group, rank_device) -> None:
    """The owner has given up: NaN, and an exception on this rank, too."""
    world, rank, late = dist.get_world_size(), dist.get_rank(), 1
    new = dist.new_group()
    x, weight = draw(4, 16, device=rank_device), draw(6, 16, device=rank_device)
    torch.testing.assert_close(by_tiles(x, weight, new.group_name, 2), world * F.linear(x, weight))
    missed = "[023]" if rank == late else late  # any of those who gave up
    set_timeout(1)
    for turn in (rank != late, rank == late):
        if turn:
            assert by_tiles(x, weight, new.group_name, 2).isnan().all()
            with pytest.raises(PeerTimeout, match=f"waited for rank {missed} "):
                check(new.group_name)
        dist.barrier()
    set_timeout(10)
    dist.destroy_process_group(new)


@pytest.mark.parametrize("strategy", ["collective", *STRATEGIES])
def test_only_x_must_want_gradients_everywhere(group, rank_device, strategy: str) -> None:
    """A gather's backward goes to other ranks for x alone."""
    world, first = dist.get_world_size(), dist.get_rank() == 0
    x, weight = draw(3, 16, device=rank_device), draw(8, 16, device=rank_device)
    one = weight.clone().requires_grad_(first)
    (y,) = all_gather_matmul(x, [one], group, strategy=strategy)
    assert y.requires_grad == first
    if first:
        y.sum().backward()
        torch.testing.assert_close(one.grad, world * x.sum(0).expand_as(one))
    x = draw(4, 16, device=rank_device).requires_grad_(first)  # a size that no rank has seen
    with pytest.raises(ValueError, match="whether gradients are wanted must be the same"):
        all_gather_matmul(x, [weight.requires_grad_()], group, strategy=strategy)


def test_autocast_of_ranks_that_differ(group, rank_device) -> None:
    """What travels is of autocast's dtype."""
    # Of sizes that no rank has seen.
    x, weight = draw(7, 18, device=rank_device), draw(10, 18, device=rank_device)
    first, kind = dist.get_rank() == 0, rank_device.type
    with torch.autocast(kind, torch.float16, enabled=first):
        for strategy in ("collective", *STRATEGIES):
            with pytest.raises(ValueError, match="x_shard's dtype must be the same on all ranks"):
                all_gather_matmul(x, [weight], group, strategy=strategy)
        with pytest.raises(ValueError, match="x's dtype must be the same on all ranks"):
            matmul_all_reduce(x, weight, group, method="low_latency")


def test_bfloat16_in_the_interpreter(group, rank_device) -> None:
    if rank_device.type == "cuda":
        pytest.skip("of the interpreter")
    x = draw(3, 16, device=rank_device, dtype=torch.bfloat16)
    for strategy in STRATEGIES:
        with pytest.raises(NotImplementedError, match="float16 or float32 on CPUs, got bfloat16"):
            all_gather_matmul(x, [x], group, strategy=strategy)
    with pytest.raises(NotImplementedError, match="float16 or float32 on CPUs, got bfloat16"):
        matmul_all_reduce(x, x, group, method="gemm_all_reduce")


def test_auto_where_shares_differ(group, rank_device, measured) -> None:
    """Ranks that find the same choose it; those that would choose differently, by sizes of their own, the collective."""
    world, rank = dist.get_world_size(), dist.get_rank()
    measured(
        (GATHER, 8, 16, [[4 * world, "copy_engine"]]),
        (GATHER, 9, 16, [[4 * world, "fused"]]),
        (SCATTER, 6, 16, [[4 * world, "fused"]]),
        (ALL_REDUCE, 6, 16, [[4 * world, "low_latency"]]),
    )
    for columns, fast in ((8, True), (11 + min(rank, 1), True), (10 if rank else 7, False)):
        before = launches.total()
        x, weight = draw(4 * world, 16, device=rank_device), torch.ones(columns, 16)
        (y,) = all_gather_matmul(x[of_rank(4)], [weight.to(rank_device)], group)
        torch.testing.assert_close(y, x.sum(1, keepdim=True).expand(-1, columns))
        assert (launches.total() > before) == fast
    features = 16 + min(rank, 1)
    x, weight = (torch.ones(n, features, device=rank_device) for n in (4 * world, 6))
    whole = torch.full((4 * world, 6), 16.0 * world + world - 1, device=rank_device)
    torch.testing.assert_close(matmul_reduce_scatter(x, weight, group), whole[of_rank(4)])
    torch.testing.assert_close(matmul_all_reduce(x, weight, group), whole)


def test_differences_are_named_where_auto_asks_all_ranks(group, rank_device, measured) -> None:
    """And before a new group's ranks ask each other whether they map each other's memory."""
    world, rank = dist.get_world_size(), dist.get_rank()
    new = dist.new_group()
    measured(
        *((op, 7, 12, [[world, "copy_engine"]]) for op in (GATHER, SCATTER)),
        (ALL_REDUCE, 7, 12, [[world, "low_latency"]]),
    )
    x = torch.ones(world, 12, device=rank_device)
    half = x.half() if rank else x
    with pytest.raises(ValueError, match="x_shard's dtype must be the same on all ranks"):
        all_gather_matmul(half[:1], [half[:1].expand(7, 12)], new.group_name)
    with pytest.raises(ValueError, match="x's dtype must be the same on all ranks"):
        matmul_reduce_scatter(half, half[:1].expand(7, 12), new.group_name)
    with pytest.raises(ValueError, match="x's dtype must be the same on all ranks"):
        matmul_all_reduce(half, half[:1].expand(7, 12), new.group_name)
    strategy = "copy_engine" if rank else "collective"
    with pytest.raises(ValueError, match="strategy must be the same on all ranks"):
        all_gather_matmul(x[:1], [x[:1]], new.group_name, strategy=strategy)
    with pytest.raises(ValueError, match="method must be the same on all ranks"):
        matmul_all_reduce(x, x[:1], new.group_name, method="low_latency" if rank else "nccl")
    dist.destroy_process_group(new)


def test_auto_under_autocast(group, rank_device, measured) -> None:
    """By what was measured for autocast's dtype."""
    world = dist.get_world_size()
    measured((GATHER, 8, 16, [[5 * world, "copy_engine"]]), dtype="float16")
    x, weight = draw(5, 16, device=rank_device), draw(8, 16, device=rank_device)
    for dtype, fast in ((torch.float32, False), (torch.bfloat16, False), (torch.float16, True)):
        before = launches.total()
        with torch.autocast(rank_device.type, dtype, enabled=dtype != torch.float32):
            (y,) = all_gather_matmul(x, [weight], group)
        assert y.dtype == dtype
        assert (launches.total() > before) == fast


@torch.no_grad()
def test_layers_of_unequal_shares_far_from_what_was_measured(group, rank_device, measured) -> None:
    """The second has the first rank's shares of the first one, and others elsewhere: no rank asks the others."""
    world = dist.get_world_size()
    measured(
        (GATHER, 4, HIDDEN, [[world << 20, "copy_engine"]]),
        (SCATTER, HIDDEN, 4, [[world << 20, "copy_engine"]]),
        (ALL_REDUCE, HIDDEN, 4, [[1 << 20, "low_latency"]]),
    )
    for inner in (2 * world, 2 * world - 1):
        dense = randomise(MLP(config(inner=inner))).to(rank_device)
        x = draw(world, HIDDEN, device=rank_device)
        for strategy, own in (("ag_rs", of_rank(1)), ("all_reduce", slice(None))):
            y = TPMLP.from_module(dense, group, strategy)(x[own])
            torch.testing.assert_close(y, dense(x)[own], atol=1e-4, rtol=1e-4)
