"""One-sided matmuls call after call: graphs, epochs, memory that grows, ranks that come late or never."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.dist.one_sided_matmuls import (  # noqa: F401
    CALLS,
    METHODS,
    STRATEGIES,
    _kernels,
    by_packets,
    by_tiles,
    draw,
    of_rank,
)
from tests.epochs import start_at
from torch_fdattn.dist import (
    PeerTimeout,
    all_gather_matmul,
    matmul_all_reduce,
    matmul_all_reduce_rms_norm,
    matmul_reduce_scatter,
    set_timeout,
)
from torch_fdattn.dist.consensus import assume_equal_on_all_ranks
from torch_fdattn.dist.symm.channel import _channels


@pytest.mark.parametrize(
    ("strategy", "late"),
    [("copy_engine", "last"), ("fused", "first"), ("fused", "last"), ("low_latency", "first")],
)
def test_a_rank_that_comes_late(group, rank_device, strategy: str, late: str) -> None:
    """What it has not sent yet is waited for."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x = draw(world * 4, 32, device=rank_device)
    weight = draw(world, 16, 32, device=rank_device)[rank]
    wrong = torch.zeros(2, device=rank_device)
    for _ in range(2):  # what was sent in a call before is other data
        x = x + 1
        mine = x * (rank + 1)
        whole = mine @ weight.t()
        dist.all_reduce(whole)
        for i, right in enumerate((x @ weight.t(), whole[of_rank(4)])):
            if rank == (0 if late == "first" else world - 1):
                time.sleep(0.2)
            if i == 0:
                (found,) = all_gather_matmul(x[of_rank(4)], [weight], group, strategy=strategy)
            else:
                found = matmul_reduce_scatter(mine, weight, group, strategy=strategy)
            wrong[i] += not torch.allclose(found, right, rtol=1e-4, atol=1e-4)
    dist.all_reduce(wrong)  # all ranks fail, or none
    assert wrong.tolist() == [0, 0]


def test_graphs(group, rank_device) -> None:
    """Replays, which copy to where the capture did, mixed with eager calls; ranks that come late."""
    if rank_device.type != "cuda" or dist.get_world_size() == 1:
        pytest.skip("needs a CUDA device")
    rng, world = random.Random(dist.get_rank()), dist.get_world_size()
    weight = draw(256, 512, device=rank_device, dtype=torch.bfloat16)
    for call in CALLS.values():
        x = draw(64 * world, 512, device=rank_device, dtype=torch.bfloat16)
        call(x, weight, group)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = [call(x, weight, group), call(x + 1, weight, group)]
        for _ in range(10):
            x.copy_(draw(*x.shape, device=rank_device, dtype=torch.bfloat16))
            time.sleep(rng.random() * 0.01)
            graph.replay()
            for i, y in enumerate(found):
                assert torch.equal(y, call(x + i, weight, group))
            torch.cuda.synchronize()


def set_epochs(epoch: int) -> None:
    """As if all channels' next calls were this one."""
    group = dist.distributed_c10d._resolve_process_group(dist.group.WORLD.group_name)
    for (purpose, _), channels in _channels.get(group, {}).items():
        if purpose.partition("/")[0] in (*STRATEGIES, *METHODS):
            start_at(epoch, purpose, channels[-1])
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def test_epochs_wrap(group, rank_device) -> None:
    """From two calls before the epoch's 32 bits are full on, with stragglers and shapes that change."""
    rng, world = random.Random(dist.get_rank()), dist.get_world_size()
    for i in range(6):
        if i == 1:
            set_epochs(0xFFFFFFFE)
        time.sleep(rng.random() * 0.02)
        x = draw(2 + i % 2, 16, device=rank_device) + i
        weight = draw(6, 16, device=rank_device)
        one = F.linear(x, weight)
        for strategy in STRATEGIES:
            (y,) = all_gather_matmul(x, [weight], group, strategy=strategy)
            torch.testing.assert_close(y, one.repeat(world, 1))
            y = matmul_reduce_scatter(x.repeat(world, 1), weight, group, strategy=strategy)
            torch.testing.assert_close(y, world * one)
        for method in METHODS:
            torch.testing.assert_close(matmul_all_reduce(x, weight, group, method=method), world * one)  # fmt: skip
        for shots in (1, 2):
            torch.testing.assert_close(by_tiles(x, weight, group, shots), world * one)
        torch.testing.assert_close(by_packets(x, weight, group), world * one)
    set_epochs(1)


@pytest.mark.parametrize("method", ["low_latency", "one_shot", "two_shot", "nccl"])
def test_calls_between_larger_ones(rank_device, method: str) -> None:
    """Symmetric memory grows in between, and the time limit changes."""
    if method.endswith("shot") and rank_device.type == "cpu":
        pytest.skip("torch's symmetric memory: needs a CUDA device")
    group = dist.new_group(range(dist.get_world_size()))
    weight, norm = draw(64, 16, device=rank_device), torch.ones(64, device=rank_device)

    def check(rows: int) -> None:
        x, residual = draw(rows, 16, device=rank_device), draw(rows, 64, device=rank_device)
        right = dist.get_world_size() * F.linear(x, weight)
        given = x, weight, group.group_name
        torch.testing.assert_close(matmul_all_reduce(*given, method=method), right)
        # A program a row, which takes the interpreter long where there are many.
        for eps in (1e-6, 0.5) if rank_device.type == "cuda" or rows == 8 else ():
            normed, added = matmul_all_reduce_rms_norm(*given, residual, norm, eps, method=method)
            torch.testing.assert_close(added, residual + right)
            torch.testing.assert_close(normed, F.rms_norm(added, (64,), norm, eps))
        y = matmul_reduce_scatter(x.repeat(dist.get_world_size(), 1), *given[1:], strategy=way)
        torch.testing.assert_close(y, right)

    way = "low_latency" if method == "low_latency" else "collective"
    repeats = 5 if rank_device.type == "cuda" else 1  # the interpreter launches nothing directly
    try:
        with assume_equal_on_all_ranks():
            for rows in (*[8] * repeats, *[192] * repeats, *[8] * repeats):
                check(rows)
            set_timeout(9.0)
            check(8)
    finally:
        set_timeout(10.0)


EACH_KERNEL = (
    "copy_engine scatter", "fused gather", "fused scatter", "low_latency gather", "gemm_all_reduce",
    "low_latency by tiles, 2",
)  # fmt: skip


def test_a_rank_that_does_not_come(group, rank_device) -> None:
    """NaN in time, then the exception; calls that were queued before it send nothing."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if world == 1:
        pytest.skip("needs 2 ranks")
    lost = 1
    new, rest = dist.new_group(), dist.new_group([i for i in range(world) if i != lost])
    x, weight = draw(2 * world, 16, device=rank_device), draw(6, 16, device=rank_device)
    # Of two ranks nobody else can be late; more of them wait longer, and for one call of each kind of kernel.
    limit, calls = (0.3, CALLS) if world == 2 else (1, {name: CALLS[name] for name in EACH_KERNEL})
    for call in calls.values():
        for _ in range(2):
            assert call(x, weight, new.group_name).isfinite().all()
    dist.barrier()
    set_timeout(limit)
    for name, call in calls.items() if rank != lost else ():
        dist.barrier(rest)  # or the one that is late would be the one reported
        y = call(x, weight, new.group_name)
        assert y.isnan().all(), name
        with pytest.raises(PeerTimeout, match=f"waited for rank {lost} .*epoch 3") as error:
            call(x, weight, new.group_name)
        assert error.value.strategy == name.split()[0]
        # What would follow in a queue; the others are not told a word of it.
        _forget(new.group_name)
        again = call(x, weight, new.group_name)
        assert again.isnan().all(), name
        _forget(new.group_name)
    set_timeout(10)
    dist.barrier()
    dist.destroy_process_group(new)
    if rank != lost:
        dist.destroy_process_group(rest)


def _forget(group_name: str) -> None:
    """As if the host had not yet seen what the device knows."""
    group = dist.distributed_c10d._resolve_process_group(group_name)
    for channels in _channels.get(group, {}).values():
        channels[-1].fault.tensor.zero_()
