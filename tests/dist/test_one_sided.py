"""One-sided exchanges through symmetric memory: on CPUs with TRITON_INTERPRET=1, on GPUs over NVLink."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from torch_fdattn.dist import one_sided_all_gather
from torch_fdattn.dist.decode.one_sided import ONE_SIDED, merge
from torch_fdattn.dist.symm import availability
from torch_fdattn.dist.symm.channel import _channels, channel
from torch_fdattn.ops.library import INTERPRET, launches
from torch_fdattn.testing import assert_launched


@pytest.fixture(autouse=True)
def _kernels(rank_device: torch.device) -> None:
    if rank_device.type == "cpu" and not INTERPRET:
        pytest.skip("tests a kernel: needs a CUDA device or TRITON_INTERPRET=1")


def all_parts(shape: tuple[int, ...], seed: int, device) -> tuple[Tensor, Tensor]:
    """The partial results of all ranks, the same everywhere; some ranks saw no key of some rows."""
    generator = torch.Generator().manual_seed(seed)
    world = dist.get_world_size()
    outs = torch.randn(world, *shape, generator=generator)
    lses = 3 * torch.randn(world, *shape[:3], generator=generator)
    empty = torch.rand(lses.shape, generator=generator) < 0.2
    lses[empty], outs[empty] = float("-inf"), float("nan")
    return outs.to(device), lses.to(device)


def check_merge(
    strategy, group, device, shape, dtype=torch.float32, head_sharded=False, seed=0
) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    outs, lses = all_parts(shape, seed, device)
    found = merge(outs[rank], lses[rank], dtype, group, strategy, head_sharded)
    expected = torch.ops.fdattn.merge_states_forward(outs, lses, dtype)
    if head_sharded:
        expected = [x.chunk(world, 1)[rank] for x in expected]
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, exact)
    if not head_sharded:
        for x in found:
            everywhere = [torch.empty_like(x) for _ in range(world)]
            dist.all_gather(everywhere, x)
            assert all(torch.equal(part, x) for part in everywhere)


@pytest.mark.parametrize("numel", [1, 7, 1000, 20001, 40000])
def test_all_gather(group, rank_device, numel: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(world * numel, device=rank_device, dtype=torch.float32).view(world, numel)
    for sign in (1, -1):
        with assert_launched("one_sided_all_gather"):
            found = one_sided_all_gather(sign * whole[rank], group)
        assert torch.equal(found, sign * whole)


def test_all_gather_of_other_dtypes(group, rank_device) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(world * 6, device=rank_device).view(world, 2, 3)
    for dtype in (torch.int64, torch.float16, torch.float64):
        assert torch.equal(one_sided_all_gather(whole[rank].to(dtype), group), whole.to(dtype))
    assert one_sided_all_gather(whole[rank][:0], group).shape == (world, 0, 3)
    with pytest.raises(
        ValueError, match="x must be contiguous and of a multiple of 4 bytes, got 6"
    ):
        one_sided_all_gather(torch.zeros(3, dtype=torch.float16, device=rank_device), group)


@pytest.mark.parametrize("strategy", ONE_SIDED)
def test_merge(group, rank_device, strategy: str) -> None:
    """Of all heads on every rank, and of each rank's own; in fp32, and in fp16 of two queries."""
    world = dist.get_world_size()
    for head_sharded in (False, True):
        path = "fused" if strategy == "two_shot" and head_sharded else strategy
        before = launches[f"dist_merge/{path}"]
        check_merge(strategy, group, rank_device, (2, 3 * world, 1, 16), head_sharded=head_sharded)
        assert launches[f"dist_merge/{path}"] == before + 1
        shape = (1, 2 * world, 2, 40)
        check_merge(strategy, group, rank_device, shape, torch.float16, head_sharded, seed=1)


@pytest.mark.parametrize("strategy", ["push", "push_tiled", "two_shot", "fused"])
def test_rows_that_do_not_divide(group, rank_device, strategy: str) -> None:
    check_merge(strategy, group, rank_device, (1, 1, 1, 24))
    check_merge(strategy, group, rank_device, (1, 7, 1, 64), torch.float16)


def set_epochs(strategy: str, epoch: int, device) -> None:
    """As if a strategy's next call were this one, and no call had left anything in memory."""
    current = dist.distributed_c10d._resolve_process_group(dist.group.WORLD.group_name)
    for (purpose, _), channels in _channels[current].items():
        if purpose == strategy or (strategy == "symm_all_gather" and "all_gather" in purpose):
            channels[-1].memory.local.zero_()
            channels[-1].state[0] = epoch
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


@pytest.mark.parametrize("strategy", ONE_SIDED)
def test_epochs_wrap(group, rank_device, strategy: str) -> None:
    """From two calls before the epoch's 32 bits are full on, with shapes that change."""
    world = dist.get_world_size()
    check_merge(strategy, group, rank_device, (1, world, 1, 16))
    set_epochs(strategy, 0xFFFFFFFE, rank_device)
    for i in range(4):
        check_merge(strategy, group, rank_device, (1, world, 1 + i % 2, 16), seed=i)
    set_epochs(strategy, 1, rank_device)


def test_channels_grow(group, rank_device) -> None:
    here = channel(group, "test/growth", 1000, rank_device)
    assert here is channel(group, "test/growth", here.half_bytes, rank_device)
    larger = channel(group, "test/growth", 2 * here.half_bytes + 1, rank_device)
    assert larger.half_bytes == 2 * here.half_bytes + 4096  # flags beside data of a power of two
    assert larger is channel(group, "test/growth", 10, rank_device)
    assert channel(group, "test/growth", larger.half_bytes + 1, rank_device).half_bytes == 4 * here.half_bytes  # fmt: skip


@pytest.fixture(scope="module")
def pair(group: str) -> str | None:
    """A group of the first two ranks, which overlaps with the whole one."""
    made = (
        dist.new_group([0, 1], timeout=dist.distributed_c10d.default_pg_timeout)
        if (dist.get_world_size() > 2)
        else None
    )
    if made is None or dist.get_rank() > 1:
        return None
    return made.group_name


def test_overlapping_groups_and_stragglers(group, rank_device, pair) -> None:
    """Calls in two groups in turn, with ranks that come late by different times."""
    if dist.get_world_size() < 3:
        pytest.skip("needs 3 ranks")
    rng = random.Random(dist.get_rank())
    rank = dist.get_rank()
    for i in range(4):
        time.sleep(rng.random() * 0.02)
        x = torch.full((5,), 10.0 * i + rank, device=rank_device)
        found = one_sided_all_gather(x, group)
        assert found[:, 0].tolist() == [10.0 * i + r for r in range(dist.get_world_size())]
        if pair is not None:
            found = one_sided_all_gather(x + 0.5, pair)
            assert found[:, 0].tolist() == [10.0 * i + 0.5, 10.0 * i + 1.5]


@pytest.mark.parametrize("strategy", ONE_SIDED)
def test_graphs_and_streams(group, rank_device, strategy: str) -> None:
    """Replays mixed with eager calls on several streams."""
    if rank_device.type != "cuda":
        pytest.skip("needs a CUDA device")
    rank, shape = dist.get_rank(), (2, 8, 1, 64)
    outs, lses = all_parts(shape, 0, rank_device)
    part, lse = outs[rank].clone(), lses[rank].clone()
    merge(part, lse, torch.bfloat16, group, strategy, False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = merge(part, lse, torch.bfloat16, group, strategy, False)
    other = torch.cuda.Stream()
    for i in range(20):
        outs, lses = all_parts(shape, i, rank_device)
        expected = torch.ops.fdattn.merge_states_forward(outs, lses, torch.bfloat16)
        part.copy_(outs[rank])
        lse.copy_(lses[rank])
        graph.replay()
        for ours, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, exact)
        torch.cuda.synchronize()
        with torch.cuda.stream(other if i % 2 else torch.cuda.current_stream()):
            check_merge(strategy, group, rank_device, shape, torch.bfloat16, seed=i)
        torch.cuda.synchronize()


def test_wrong_calls(group, rank_device) -> None:
    out, lse = (
        torch.zeros(1, 3, 1, 16, device=rank_device),
        torch.zeros(1, 3, 1, device=rank_device),
    )
    with pytest.raises(ValueError, match=r"strategy must be one of .* got 'gossip'"):
        merge(out, lse, torch.float32, group, "gossip", False)
    with pytest.raises(ValueError, match=r"lse must have shape \(1, 3, 1\)"):
        merge(out, lse[:, :2], torch.float32, group, "fused", False)
    with pytest.raises(TypeError, match=r"out must have dtype torch\.float32"):
        merge(out.half(), lse, torch.float32, group, "fused", False)
    if dist.get_world_size() == 2:
        with pytest.raises(
            ValueError, match="out must have heads that 2 ranks divide evenly, got 3"
        ):
            merge(out, lse, torch.float32, group, "fused", True)


def test_available(group, rank_device) -> None:
    assert availability.available(group, rank_device)
    assert "meta devices" in availability.unsupported_reason(group, torch.device("meta"))


def test_two_shot_sends_nan(group, rank_device) -> None:
    """A NaN that a kernel computed is a value like any other, not one that is missing."""
    rank, world = dist.get_rank(), dist.get_world_size()
    out = torch.ones(1, world, 1, 16, device=rank_device)
    out[0, rank] = float("nan")
    for strategy in ("two_shot", "fused", "push"):
        found, lse = merge(out, out[..., 0].nan_to_num(0.0), torch.float16, group, strategy, False)
        assert found.isnan().all()
        assert not lse.isnan().any()
