"""Timing: medians of repeats, CUDA events behind a flushed L2, CUDA graphs over rotated inputs.

Two situations, two methods:

- Calls of hundreds of microseconds (prefill): one pair of CUDA events around each call, the L2
  flushed before it, as `triton.testing.do_bench` does. The flush is long enough that the host has
  issued the whole call before the GPU is done flushing, so host time is not charged to the kernel.
- Calls of a few microseconds (decode): a flush by writing leaves tens of MB of dirty lines whose
  write-back the timed kernel pays for. Inputs rotate through copies of at least four times the L2
  instead, and all calls sit in one CUDA graph: the L2 is cold and clean, no launch cost is counted.

Every implementation of a case is sampled in turn, several rounds over in orders that are drawn, so that a drift of the
clock meets all of them alike. Clocks are arguments: tests pass a fake one.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]
FLUSH_BYTES = 512 * 2**20  # about 180 µs of writing on an H100: hides the host time of one call
HOST_CALLS = 40  # of a host timing: few enough never to fill the launch queue
ROTATION_FACTOR = 4  # input copies hold at least this many times the L2


@dataclass(frozen=True)
class Sample:
    """Repeats of one measurement."""

    repeats: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.repeats)

    @property
    def spread(self) -> float:
        """(max − min) / median."""
        return (max(self.repeats) - min(self.repeats)) / self.median if self.median else 0.0


def turns(names: Iterable[str], count: int) -> Iterator[list[str]]:
    """All names, each time in an order that is drawn anew, the same in every process.

    Under load a GPU's clocks fall within tenths of a second, to what its power allows: who always came behind what
    waits for the wire was up to 10 % faster than who came behind BLAS.
    """
    drawn, names = random.Random(0), list(names)
    for _ in range(count):
        drawn.shuffle(names)
        yield list(names)


def interleave(
    samplers: Mapping[str, Callable[[], float]], repeats: int
) -> tuple[dict[str, Sample], dict[str, Exception]]:
    """`repeats` rounds over all samplers; one that raises is left out, its exception returned."""
    values: dict[str, list[float]] = {name: [] for name in samplers}
    failures: dict[str, Exception] = {}
    for order in turns(samplers, repeats):
        for name in order:
            if name not in failures:
                try:
                    values[name].append(samplers[name]())
                except Exception as failure:
                    failures[name] = failure
    samples = {name: Sample(tuple(values[name])) for name in samplers if name not in failures}
    return samples, failures


def calls_within(estimate_us: float, target_us: float, low: int, high: int) -> int:
    """How many calls of `estimate_us` fill `target_us`, kept within [low, high]."""
    return max(low, min(high, round(target_us / max(estimate_us, 1e-3))))


def rounds_within(estimate_us: float, target_us: float, calls: int) -> int:
    """How many rounds over `calls` calls of a graph fill `target_us`, within sensible sizes of graphs."""
    return -(-calls_within(estimate_us, target_us, 2, 200) // calls)


def copies_needed(bytes_per_copy: int, l2_bytes: int) -> int:
    """Copies that together hold ROTATION_FACTOR times the L2; at least two, or nothing rotates."""
    return max(2, -(-ROTATION_FACTOR * l2_bytes // bytes_per_copy))


class DeviceLost(RuntimeError):
    """The device answers no more (a sticky CUDA error): nothing after this can be measured."""


class Timer:
    """Times calls on one device: CUDA events and graphs there, the wall clock on a CPU."""

    def __init__(
        self, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.device = device
        self.clock = clock
        self._flush: torch.Tensor | None = None

    @property
    def l2_bytes(self) -> int:
        if self.device.type == "cpu":
            return 0
        return torch.cuda.get_device_properties(self.device).L2_cache_size

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)

    def check_device(self, failure: BaseException) -> None:
        """Raise DeviceLost if `failure` took the device with it."""
        try:
            self.synchronize()
        except Exception as lost:
            raise DeviceLost(f"after {type(failure).__name__}: {lost}") from failure

    def each_us(self, call: Call, calls: int) -> list[float]:
        """The device time of each of `calls` calls, the L2 flushed before every one."""
        if self.device.type == "cpu":
            return [self.eager_us([call], 1) for _ in range(calls)]
        if self._flush is None:
            self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=self.device)
        events = []
        for _ in range(calls):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            start.record()
            call()
            end.record()
            events.append((start, end))
        self.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in events]

    def sampler(self, call: Call, target_us: float = 60e3) -> Callable[[], float]:
        """A function that times `call` for about `target_us` and gives the median of its calls.

        Warms up and estimates at once, so that rounds of several samplers are equally long.
        """
        self.each_us(call, 2)
        calls = calls_within(min(self.each_us(call, 3)), target_us, 3, 100)
        return lambda: statistics.median(self.each_us(call, calls))

    def eager_us(self, calls: Sequence[Call], count: int) -> float:
        """Wall time per call of `count` calls, rotating through `calls`, device work included."""
        self.synchronize()
        begin = self.clock()
        for call in itertools.islice(itertools.cycle(calls), count):
            call()
        self.synchronize()
        return 1e6 * (self.clock() - begin) / count

    def host_us(self, calls: Sequence[Call], count: int) -> float:
        """Wall time per call until the call returns; `count` must not fill the launch queue."""
        self.synchronize()
        begin = self.clock()
        for call in itertools.islice(itertools.cycle(calls), count):
            call()
        taken = self.clock() - begin
        self.synchronize()
        return 1e6 * taken / count


class RotatedGraph:
    """One CUDA graph of calls on rotated inputs; `sample` gives the time per call.

    The first call of a replay reads the copy that was used longest ago, like every other. `rounds` over
    the calls are captured: given where they communicate, since all ranks must capture equally many.
    `last` is what the last call gave: each replay writes it anew.
    """

    def __init__(
        self, timer: Timer, calls: Sequence[Call], target_us: float = 20e3,
        rounds: int | None = None,
    ) -> None:  # fmt: skip
        self._timer = timer
        self._calls = calls  # what they hold besides their inputs is the graph's as well
        stream = torch.cuda.Stream(timer.device)
        stream.wait_stream(torch.cuda.current_stream(timer.device))
        with torch.cuda.stream(stream):  # compiles, and allocates workspaces outside the capture
            for call in calls[:2]:
                call()
        torch.cuda.current_stream(timer.device).wait_stream(stream)
        if rounds is None:
            rounds = rounds_within(timer.eager_us(calls, len(calls)), target_us, len(calls))
        self._count = rounds * len(calls)
        self._graph = torch.cuda.CUDAGraph()
        # Of this thread only: NCCL's watchdog may query events in its own meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            for _ in range(rounds):
                for call in calls:
                    self.last = call()
        self._graph.replay()
        timer.synchronize()

    def sample(self, replays: int = 5) -> float:
        """Median over replays of the time per call, in µs."""
        return statistics.median(self._times(replays))

    def next(self) -> float:
        """The time per call of one replay, in µs: the second of two, whose launch is not waited for."""
        return self._times(2)[-1]

    def _times(self, replays: int) -> list[float]:
        events = []
        for _ in range(replays):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self._graph.replay()
            end.record()
            events.append((start, end))
        self._timer.synchronize()
        return [1e3 * start.elapsed_time(end) / self._count for start, end in events]
