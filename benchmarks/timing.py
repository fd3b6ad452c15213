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

import functools
import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from .ranks import Ranks, barrier, slowest, together
from .results import Recorder

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
    samplers: Mapping[str, Callable[[], float]], repeats: int, unused: int = 0,
    catch: type[Exception] | tuple[()] = Exception,
) -> tuple[dict[str, Sample], dict[str, Exception]]:  # fmt: skip
    """`repeats` rounds over all samplers, behind `unused` ones; one that raises what is to be caught is left out, its
    exception returned."""
    values: dict[str, list[float]] = {name: [] for name in samplers}
    failures: dict[str, Exception] = {}
    for order in turns(samplers, unused + repeats):
        for name in order:
            if name not in failures:
                try:
                    values[name].append(samplers[name]())
                except catch as failure:
                    failures[name] = failure
    good = (name for name in samplers if name not in failures)
    samples = {name: Sample(tuple(values[name][unused:])) for name in good}
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


def release(device: torch.device) -> None:
    """Gives memory back; graphs hold theirs in reference cycles."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


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


def captured(ranks: Ranks, call: Call) -> torch.cuda.CUDAGraph:
    """The call, which all ranks have made before, as a graph."""
    stream = torch.cuda.Stream()
    barrier(ranks)
    with torch.cuda.stream(stream):  # workspaces of this stream are made outside the capture
        call()
    barrier(ranks)  # nothing of anybody else's is under way in the capture
    graph = torch.cuda.CUDAGraph()
    # Of this thread only: NCCL's watchdog may query events in its own meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        call()
    return graph


GRAPH, EAGER, LATENCY = "graph_us", "eager_us", "latency_ms"
_GRAPH_US, _EAGER_US, _LATENCY_MS = 5e3, 20e3, 100.0  # of measuring, a turn
_EAGER_CALLS, _WARM_UPS = 40, 2
#: Turns a repeat, and those before that are for nothing. Graphs take turns of one replay, so that all meet the same clocks.
_TURNS = {GRAPH: (4, 1), EAGER: (1, 1), LATENCY: (1, 0)}


class Rounds:
    """Times what is compared in one case in turns, on all ranks at once: each figure is the slowest rank's.

    In CUDA graphs and eager calls (`prepare`), and one call at a time from a barrier on (`prepare_latency`).
    `timer` is this rank's alone.
    """

    def __init__(self, case: str, ranks: Ranks, recorder: Recorder) -> None:
        self.timer = Timer(ranks.device)
        self._case, self._ranks, self._recorder = case, ranks, recorder
        self._samplers: dict[str, dict[str, Callable[[], float]]] = {x: {} for x in _TURNS}

    def prepare(self, name: str, calls: Sequence[Callable[[], object]], in_graph: bool) -> object:
        """Adds the samplers of calls that ran before; the result of the last one in the graph, or None.

        Raises:
            StepFailed: on all ranks, where it fails on one.
        """
        timer, ranks, last = self.timer, self._ranks, None
        on_gpu = ranks.device.type == "cuda"
        # The first of these may still allocate or compile for an input that was not called yet.
        for _ in range(2 if on_gpu else 1):
            taken = together(ranks, "eager", lambda: timer.eager_us(calls, len(calls)))
        estimate = slowest(ranks, [taken])[0]  # the same on all ranks, and so what follows from it
        count = calls_within(estimate, _EAGER_US, 1, _EAGER_CALLS)
        if in_graph and on_gpu:
            rounds = rounds_within(estimate, _GRAPH_US, len(calls))
            barrier(ranks)  # nothing of another implementation is under way in the capture
            graph = together(ranks, "graph", lambda: RotatedGraph(timer, calls, rounds=rounds))
            self.add(name, GRAPH, graph.next)
            last = graph.last
        self.add(name, EAGER, functools.partial(timer.eager_us, calls, count))
        return last

    def prepare_latency(
        self,
        name: str,
        call: Call,
        before: Call | None = None,
        alone: bool = False,
        queued: int = 1,
    ) -> None:
        """Adds the sampler of single calls; `before`, not timed, is made before each: it takes back what the last did.

        alone: it communicates nothing, and rank 0 makes it while the others wait. On a CPU they would take each other's
        cores and memory.
        queued: so many calls, one after another, make one time, which is theirs divided by their number.
        """

        def each_ms(count: int) -> list[float]:
            times = []
            for _ in range(count):
                if before is not None:
                    before()
                barrier(self._ranks)
                # Who waits is at the next barrier already. 0 is never the largest: all get rank 0's time.
                waits = alone and self._ranks.rank > 0
                times.append(0.0 if waits else self._each_ms(call, queued))
            return slowest(self._ranks, times)

        each_ms(_WARM_UPS)
        estimate = min(each_ms(2))  # the same on all ranks
        count = calls_within(estimate * queued, _LATENCY_MS, 3, 50)
        self.add(name, LATENCY, lambda: statistics.median(each_ms(count)))

    def _each_ms(self, call: Call, count: int) -> float:
        if self._ranks.device.type == "cpu":
            return self.timer.host_us([call], count) / 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / count

    def add(self, name: str, metric: str, sampler: Callable[[], float]) -> None:
        self._samplers[metric][name] = sampler

    def drop(self, name: str) -> None:
        for samplers in self._samplers.values():
            samplers.pop(name, None)

    def sample(self, repeats: int) -> dict[str, dict[str, float]]:
        """Records `repeats` rounds over all samplers; the medians by metric and name."""
        medians: dict[str, dict[str, float]] = {}
        for metric, samplers in self._samplers.items():
            together = {x: functools.partial(self._slowest, call) for x, call in samplers.items()}
            count, unused = _TURNS[metric]
            # A rank that went on behind a failure would wait for the others for ever.
            found, _ = interleave(together, repeats * count, unused, catch=())
            for name, sample in found.items():
                self._recorder.add_sample(self._case, name, metric, sample.median, sample.spread)
                medians.setdefault(metric, {})[name] = sample.median
        self._recorder.save()  # a run that is stopped later keeps what it has measured
        return medians

    def _slowest(self, sampler: Callable[[], float]) -> float:
        barrier(self._ranks)
        return slowest(self._ranks, [sampler()])[0]

    def clear(self) -> None:
        """Graphs must go before their buffers."""
        for samplers in self._samplers.values():
            samplers.clear()
        release(self._ranks.device)


def compare(
    ranks: Ranks, recorder: Recorder, case: str, calls: Mapping[str, Call], *, repeats: int,
    before: Mapping[str, Call] | None = None, alone: Collection[str] = (), queued: int = 1,
) -> dict[str, float]:  # fmt: skip
    """The latencies of single calls, or of `queued` ones one after another; the medians by name."""
    rounds = Rounds(case, ranks, recorder)
    for name, call in calls.items():
        rounds.prepare_latency(name, call, (before or {}).get(name), name in alone, queued)
    return rounds.sample(repeats).get(LATENCY, {})
