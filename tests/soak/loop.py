"""What all soaks share: groups, draws, delays, streams, graphs, epochs near their ends."""

from __future__ import annotations

import faulthandler
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tests.epochs import start_at
from torch_fdattn.dist import check
from torch_fdattn.dist.symm.channel import _channels
from torch_fdattn.dist.symm.copies import using

HANG_S = 300
ROUND = 40  # calls between two settings of the epochs
ENDS = (0xFFFFFFFF, 0x7FFFFFFF)
Call = TypeVar("Call")


class Group(NamedTuple):
    """A process group, as this rank sees it."""

    name: str
    rank: int
    size: int
    process_group: dist.ProcessGroup


class Work(Protocol[Call]):
    """What is called in one group. Made on each of its ranks with the same seed, it draws the same calls."""

    group: Group

    def __init__(self, group: Group, seed: str, device: torch.device) -> None: ...

    def warm_up(self) -> None:
        """Makes the channels, with room for every later call."""

    def draw(self, rng: random.Random) -> Call: ...

    def redraw(self, call: Call, rng: random.Random) -> Call:
        """A call that differs in its inputs' values alone: what a graph that holds `call` may replay."""

    def inputs(self, call: Call) -> tuple[Tensor, ...]: ...

    def run(self, call: Call, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]: ...

    def expect(self, call: Call, found: tuple[Tensor, ...]) -> None:
        """Raises where this is not what the call must give."""

    def replicated(self, call: Call, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What all ranks must hold with the same bits."""

    def kinds(self, call: Call) -> Iterable[str]:
        """What is counted."""


class Graph(Generic[Call]):
    """A captured call, whose inputs are written anew before each replay."""

    def __init__(self, work: Work[Call], call: Call) -> None:
        self.work, self.call = work, call
        self.inputs = tuple(x.clone() for x in work.inputs(call))
        work.run(call, self.inputs)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # Of this thread only: NCCL's watchdog may query events in its own meanwhile.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.found = work.run(call, self.inputs)

    def replay(self, call: Call) -> tuple[Tensor, ...]:
        for mine, new in zip(self.inputs, self.work.inputs(call), strict=True):
            mine.copy_(new)
        self.graph.replay()
        return tuple(x.clone() for x in self.found)


def groups() -> list[Group | None]:
    """All ranks, and once more the first two, which is another group where there are no more; None: not in it."""
    pair = dist.new_group([0, 1])
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = dist.group.WORLD
    return [
        Group(whole.group_name, rank, world, whole),
        Group(pair.group_name, rank, 2, pair) if rank < 2 else None,
    ]


def near_the_end(end: int, rng: random.Random, device: torch.device) -> None:
    """As if every channel were a few calls before its epochs' sign changes, or before they start again."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    epoch = end - rng.randint(0, 2)
    for channels in _channels.values():
        for (purpose, _), same in channels.items():
            for channel in same:
                start_at(epoch, purpose, channel)
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def come_late(rng: random.Random, device: torch.device) -> None:
    """Now and then this rank's host is late, or its device."""
    if rng.random() >= 0.1:
        return
    if device.type == "cuda" and rng.random() < 0.5:
        torch.cuda._sleep(int(rng.random() * 4e6))  # cycles: up to two milliseconds
    else:
        time.sleep(rng.random() * 0.004)


def same_everywhere(group: Group, call: object, found: tuple[Tensor, ...]) -> None:
    for x in found:
        everywhere = [torch.empty_like(x) for _ in range(group.size)]
        dist.all_gather(everywhere, x.contiguous(), group=group.process_group)
        assert all(torch.equal(part, x) for part in everywhere), f"ranks differ: {call}"


def soak(make: Callable[..., Work], count: int, seed: int, device: torch.device) -> Counter:
    """Counts of what was called, after `count` calls.

    Raises:
        RuntimeError: naming the seed and the call before which all was well.
    """
    counts: Counter = Counter()
    try:
        _soak(make, count, seed, device, counts)
    except Exception as failure:
        raise RuntimeError(
            f"soak with seed {seed} failed after {counts['calls']} calls: {type(failure).__name__}: {failure}"
        ) from failure
    finally:
        faulthandler.cancel_dump_traceback_later()
    return counts


def _soak(make, count: int, seed: int, device: torch.device, counts: Counter) -> None:
    rank, cuda = dist.get_rank(), device.type == "cuda"
    rng, own_rng = random.Random(seed), random.Random(1000 * seed + rank)
    works = [
        None if group is None else make(group, f"{seed} {i}", device)
        for i, group in enumerate(groups())
    ]
    for work in works:  # where all come
        if work is not None:
            work.warm_up()
    streams = [torch.cuda.Stream() for _ in range(3)] if cuda else []
    graphs = [Graph(works[0], works[0].draw(rng)) for _ in range(8 if cuda else 0)]
    start = shown = time.monotonic()
    done = 0
    while done < count:
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        if done % ROUND == 0:
            near_the_end(ENDS[done // ROUND % 2], rng, device)
        burst = min(rng.choice([1, 2, 4]), count - done, ROUND - done % ROUND)
        # The library does not see replays: with them a burst's calls are on one stream.
        replays = bool(graphs) and rng.random() < 0.3
        waiting = []
        for _ in range(burst):
            work = works[int(rng.random() < 0.3)]
            call_rng = random.Random(rng.getrandbits(32))  # the same number of draws on all ranks
            graph = call_rng.choice(graphs) if replays and call_rng.random() < 0.5 else None
            stream = 0 if replays else call_rng.randrange(max(1, len(streams)))
            if graph is not None:
                work = works[0]
            if work is None:
                counts["of others"] += 1
                continue
            call = work.draw(call_rng) if graph is None else work.redraw(graph.call, call_rng)
            with using(streams[stream] if cuda else None):
                come_late(own_rng, device)
                found = graph.replay(call) if graph else work.run(call, work.inputs(call))
            counts.update(work.kinds(call))
            counts["replays"] += graph is not None
            counts["in the pair"] += work is works[1]
            waiting.append((work, call, found))
        if cuda:
            torch.cuda.synchronize()
        for work, call, found in waiting:
            work.expect(call, found)
        if rng.random() < 0.05:
            for work, call, found in waiting:
                alike = work.replicated(call, found)
                same_everywhere(work.group, call, alike)
                counts["compared between ranks"] += bool(alike)
        done += burst
        counts["calls"] = done
        if rank == 0 and time.monotonic() - shown > 20:
            shown = time.monotonic()
            print(f"{done} of {count} calls, {done / (shown - start):.0f} a second", flush=True)
    check()
