"""What ranks that run ahead, and memory that held other things before, must not do to a one-sided exchange."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.dist.test_one_sided import all_parts, check_merge, set_epochs
from torch_fdattn.dist import one_sided_all_gather, set_timeout
from torch_fdattn.dist.decode import push, push_tiled
from torch_fdattn.dist.decode.one_sided import ONE_SIDED, merge
from torch_fdattn.dist.symm.channel import Channel, _channels
from torch_fdattn.dist.symm.signals import BROKEN, CLOCK, OVER
from torch_fdattn.ops.library import INTERPRET


@pytest.fixture(autouse=True)
def _kernels(rank_device: torch.device) -> None:
    if dist.get_world_size() == 1:
        pytest.skip("needs 2 ranks")
    if rank_device.type == "cpu" and not INTERPRET:
        pytest.skip("tests a kernel: needs a CUDA device or TRITON_INTERPRET=1")


def last_channel(strategy: str) -> Channel:
    group = dist.distributed_c10d._resolve_process_group(dist.group.WORLD.group_name)
    return next(c[-1] for (name, _), c in _channels[group].items() if name.startswith(strategy))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


@pytest.mark.parametrize("strategy", ONE_SIDED)
def test_a_rank_that_gave_up_writes_nothing(group, rank_device, strategy: str) -> None:
    """Its later calls, queued before the host knew, wait for nobody: what they wrote could be read as another's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    outs, lses = all_parts((1, world, 1, 16), 0, rank_device)
    merge(outs[rank], lses[rank], torch.float32, group, strategy, False)
    wait(rank_device)
    channel = last_channel(strategy)
    before = channel.memory.local.clone()
    wait(rank_device)
    if rank == 0:
        channel.state[BROKEN.value] = 1  # as a wait that timed out leaves it
        channel.state[CLOCK.value] = OVER.value
        for _ in range(2):
            found, lse = merge(outs[rank], lses[rank], torch.float32, group, strategy, False)
            assert found.isnan().all()
            assert lse.isnan().all()
    wait(rank_device)
    assert torch.equal(channel.memory.local, before)
    mend(channel)


def mend(channel: Channel) -> None:
    """As if it had never broken, and had never been used."""
    wait(channel.state.device)
    for x in (channel.memory.local, channel.state, channel.fault.tensor):
        x.zero_()
    channel.state[0] = 1
    wait(channel.state.device)


@pytest.mark.parametrize("strategy", ["fused", "push_tiled"])
def test_one_time_out_ends_all_waits(group, rank_device, strategy: str) -> None:
    """Also those which other programs began before it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    outs, lses = all_parts((1, world, 1, 16), 0, rank_device)
    merge(outs[rank], lses[rank], torch.float32, group, strategy, False)
    wait(rank_device)
    channel = last_channel(strategy)

    def time_out_elsewhere() -> None:
        if rank_device.type == "cuda":
            with torch.cuda.stream(torch.cuda.Stream(rank_device)):
                channel.state[CLOCK.value].fill_(OVER.value)
        else:
            channel.state[CLOCK.value] = OVER.value

    def call_alone() -> float:
        start = time.monotonic()
        for x in merge(outs[0], lses[0], torch.float32, group, strategy, False):
            assert x.isnan().all()
        return time.monotonic() - start

    if rank == 0:
        timer = threading.Timer(0.3, time_out_elsewhere)
        timer.start()
        assert call_alone() < 5  # of 10 s
        timer.join()
        assert not channel.state[BROKEN.value]  # nor does this wait say whom it waited for
        assert not channel.fault.tensor.any()
        channel.state[CLOCK.value] = 0
        set_timeout(0.1)
        call_alone()
        set_timeout(10.0)
        assert channel.state[BROKEN.value]
        assert channel.state[CLOCK.value] == OVER.value
    mend(channel)


def test_a_rank_that_comes_too_late(group, rank_device) -> None:
    """It is named by the others, and names one of them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    outs, lses = all_parts((1, world, 1, 16), 0, rank_device)
    mine = outs[rank], lses[rank], torch.float32, group, "two_shot", False
    merge(*mine)
    wait(rank_device)
    if rank == 1:
        dist.barrier()  # the others have given up
    else:
        set_timeout(0.2)
    found, _ = merge(*mine)
    wait(rank_device)
    if rank != 1:
        dist.barrier()
    set_timeout(10.0)
    assert found[:, 0].isnan().all()
    channel = last_channel("two_shot")
    peer = int(channel.fault.tensor) % (1 << 32) - 1
    assert peer not in (-1, rank)
    assert peer == 1 or rank == 1
    mend(channel)


def test_numbers_that_look_like_flags(group, rank_device) -> None:
    """Where a call has its flags another one had its rows: they may hold the bits of any epoch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    # Row 0 of rank 1 in the small calls lies where the large one's flag of rank 1 is.
    large, small = (1, world * (world + 8), 1, 16), (1, world, 1, 16)
    for shape in (large, large):
        merge(
            *(x[rank] for x in all_parts(shape, 0, rank_device)),
            torch.float32,
            group,
            "push_tiled",
            False,
        )
    wait(rank_device)
    epoch = int(last_channel("push_tiled").state[0]) + 2
    part = torch.zeros(small, device=rank_device)
    part.view(torch.int32)[..., ::2] = epoch
    for _ in range(2):
        merge(part, part[..., 0].contiguous(), torch.float32, group, "push_tiled", False)
    wait(rank_device)
    outs, lses = all_parts(large, 1, rank_device)
    if rank == 1:
        time.sleep(0.5)
    found = merge(outs[rank], lses[rank], torch.float32, group, "push_tiled", False)
    expected = torch.ops.fdattn.merge_states_forward(outs, lses, torch.float32)
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_all_gather_of_a_slice(group, rank_device, dtype: torch.dtype) -> None:
    """A tensor that begins at an odd element, and is contiguous."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for count in (6, 20000):
        whole = (torch.arange(world * (count + 1), device=rank_device) % 1000).to(dtype)
        whole = whole.view(world, -1)
        found = one_sided_all_gather(whole[rank].clone()[1:], group)
        assert torch.equal(found, whole[:, 1:])


@pytest.mark.parametrize("strategy", ["fused", "push_tiled"])
def test_no_epoch_is_that_of_fresh_memory(group, rank_device, strategy: str) -> None:
    """The half that the first call after the wrap uses has not been written to, and a rank is late."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = (1, world, 1, 16)
    check_merge(strategy, group, rank_device, shape)
    set_epochs(strategy, 0xFFFFFFFF, rank_device)
    check_merge(strategy, group, rank_device, shape)
    if rank == 1:
        time.sleep(0.3)
    check_merge(strategy, group, rank_device, shape, seed=1)
    set_epochs(strategy, 1, rank_device)


@pytest.mark.parametrize("module", [push, push_tiled], ids=lambda m: m.__name__.rpartition(".")[2])
def test_flags_come_after_the_rows(group, rank_device, monkeypatch, module) -> None:
    """Of a rank that takes its time between them (in the interpreter; a GPU does as it pleases)."""
    shape, strategy = (1, dist.get_world_size(), 1, 16), module.__name__.rpartition(".")[2]
    check_merge(strategy, group, rank_device, shape)
    if INTERPRET and dist.get_rank() == 1:
        write = module.push_rows

        def late(*arguments) -> None:
            time.sleep(0.2)
            write(*arguments)

        monkeypatch.setattr(module, "push_rows", late)
    for seed in (1, 2):
        check_merge(strategy, group, rank_device, shape, seed=seed)
