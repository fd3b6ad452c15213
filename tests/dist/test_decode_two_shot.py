"""Sharded decode's `two_shot`: what a Lamport exchange must not do to it. Kernels on CPUs with TRITON_INTERPRET=1.

That no word of an earlier call is taken, whatever the sizes of calls and however late ranks come; that zeros, empty
rows and NaN travel as they are; that a broken channel gives NaN.
"""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist

from tests.dist.test_one_sided import all_parts, check_merge
from tests.dist.test_signals import last_channel, mend, wait
from torch_fdattn.dist.decode import two_shot
from torch_fdattn.dist.decode.one_sided import merge
from torch_fdattn.dist.symm.lamport import bytes_per_buffer
from torch_fdattn.dist.symm.signals import BROKEN, CLOCK, OVER
from torch_fdattn.ops.library import INTERPRET


@pytest.fixture(autouse=True)
def _kernels(rank_device: torch.device) -> None:
    if dist.get_world_size() == 1:
        pytest.skip("needs 2 ranks")
    if rank_device.type == "cpu" and not INTERPRET:
        pytest.skip("tests a kernel: needs a CUDA device or TRITON_INTERPRET=1")


def shapes() -> list[tuple[int, ...]]:
    """Large, small and large again; rows that ranks share unevenly, and fewer of them than ranks."""
    large, small, odd = (3, 4, 1, 64), (1, 1, 1, 16), (1, 7, 1, 40)
    one_each = 1, dist.get_world_size(), 1, 24
    return [large, small, large, odd, small, small, small, large, one_each, odd, large, small]


def check_buffers(device: torch.device) -> None:
    """No call under way, only the last one's buffer holds anything, and no other rank writes behind the words in use."""
    wait(device)
    channel = last_channel("two_shot")
    nbytes = bytes_per_buffer(channel)
    thirds = channel.memory.local[: 3 * nbytes].view(3, nbytes)
    turn, before = (int(n) for n in channel.state[5:7])
    last = (turn + 2) % 3
    assert not thirds[turn].any()
    assert not thirds[(turn + 1) % 3].any()
    assert thirds[last].any()
    assert not thirds[last, 4 * before :].any()
    assert not channel.memory.local[3 * nbytes :].any()
    wait(device)


def test_sizes_in_turn_and_ranks_that_come_late(group, rank_device) -> None:
    rng = random.Random(dist.get_rank())
    for seed, shape in enumerate(shapes()):
        time.sleep(rng.random() * 0.02)
        dtype = torch.float32 if seed % 3 == 0 else torch.float16
        check_merge("two_shot", group, rank_device, shape, dtype, seed=seed)
    check_buffers(rank_device)


@pytest.mark.parametrize("late", ["send_parts", "clear_all", "receive_lamport_with_lses"])
def test_ranks_that_take_their_time_in_a_call(group, rank_device, monkeypatch, late: str) -> None:
    """In the interpreter; a GPU does as it pleases. No collective between the calls, which would bring ranks together."""
    rank, calls = dist.get_rank(), list(enumerate(shapes()))
    merge(*(x[rank] for x in all_parts(shapes()[0], 0, rank_device)), torch.float32, group, "two_shot", False)  # fmt: skip
    if INTERPRET:
        rng, run = random.Random(rank), getattr(two_shot, late)

        def slowly(*arguments):
            time.sleep(rng.choice([0.0, 0.0, 0.02]))
            return run(*arguments)

        monkeypatch.setattr(two_shot, late, slowly)
    found = []
    for seed, shape in calls:
        outs, lses = all_parts(shape, seed, rank_device)
        found.append(merge(outs[rank], lses[rank], torch.float16, group, "two_shot", False))
    for (seed, shape), ours in zip(calls, found, strict=True):
        parts = all_parts(shape, seed, rank_device)
        expected = torch.ops.fdattn.merge_states_forward(*parts, torch.float16)
        for x, exact in zip(ours, expected, strict=True):
            torch.testing.assert_close(x, exact)
    check_buffers(rank_device)


@pytest.mark.parametrize("rows", [1, 2])
def test_fewer_rows_than_ranks(group, rank_device, rows: int) -> None:
    """A rank that owns no row hears of all others through the owners."""
    rng = random.Random(dist.get_rank())
    for seed in range(8):
        time.sleep(rng.random() * 0.01)
        check_merge("two_shot", group, rank_device, (1, rows, 1, 16), torch.float16, seed=seed)
    check_buffers(rank_device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_zeros_and_rows_that_saw_no_key(group, rank_device, dtype: torch.dtype) -> None:
    """A value or an lse that is zero does not look as if it had not come."""
    rank, world = dist.get_rank(), dist.get_world_size()
    part = torch.zeros(1, 2 * world, 1, 16, device=rank_device)
    lse = torch.full((1, 2 * world, 1), float("-inf"), device=rank_device)
    if rank == 0:
        lse[:, world:] = 0.0  # of one rank alone: the merged lse is 0, too
        part[..., ::2] = -0.0
        part[0, -1, 0, 3] = 2.5
    else:
        part.fill_(float("nan"))  # of rows that saw no key
    found, found_lse = merge(part, lse, dtype, group, "two_shot", False)
    expected = torch.zeros(part.shape, dtype=dtype, device=rank_device)
    expected[0, -1, 0, 3] = 2.5
    assert torch.equal(found, expected)
    assert torch.equal(found_lse[:, world:], torch.zeros_like(lse[:, world:]))
    assert (found_lse[:, :world] == float("-inf")).all()
    for x in (found, found_lse):
        everywhere = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(everywhere, x)
        bits = [part.view(torch.uint8) for part in everywhere]
        assert all(torch.equal(part, bits[0]) for part in bits)


def test_a_broken_channel_takes_nothing(group, rank_device) -> None:
    """Not even from the buffer that the last whole call left its words in."""
    rank, world = dist.get_rank(), dist.get_world_size()
    outs, lses = all_parts((1, 2 * world, 1, 16), 0, rank_device)
    mine = outs[rank], lses[rank], torch.float32, group, "two_shot", False
    merge(*mine)
    wait(rank_device)
    channel = last_channel("two_shot")
    if rank == 0:
        channel.state[BROKEN.value] = 1  # as a wait that timed out leaves it
        channel.state[CLOCK.value] = OVER.value
        for _ in range(4):
            assert all(x.isnan().all() for x in merge(*mine))
    mend(channel)
