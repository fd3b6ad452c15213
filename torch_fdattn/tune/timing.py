"""How long calls take that are compared with each other, on one device or on all ranks of a group at once.

On GPUs the calls of a name are captured in one CUDA graph, so that no host time is counted, and the graphs are replayed in
turns, so that a drift of the clock meets all of them alike. Calls that rotate through copies of what they read find the L2
cold. On a CPU each is made once by the wall clock, which says nothing of GPUs. Over ranks a figure is the slowest rank's,
and what fails on one rank is left out on all.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

Call = Callable[[], object]
Result = TypeVar("Result")
#: Calls of a graph at least, turns of each graph, and times the L2 that copies of what is read hold.
CALLS, TURNS, L2_FACTOR = 20, 5, 4
#: Copies at most: each is a call of the graph, and without a bound what is a few KB large would have tens of thousands.
MAX_COPIES = 256


class Clock:
    """Compares calls on this rank's device."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.device, self.group = device, group
        self.on_gpu = device.type == "cuda"

    def compare(self, calls: Mapping[str, Sequence[Call]]) -> dict[str, float]:
        """µs a call by name, without those that raised; each name's calls are alike, but for copies of what they read."""
        timed: dict[str, Callable[[], float]] = {}
        for name, each in calls.items():
            # In two steps: a capture begins when nothing is under way on any rank.
            warm = self.together(lambda each=each: self._warmed(each))
            self.wait()
            ready = self.together(lambda each=each: self._prepared(each)) if warm else None
            self.wait()
            if ready is not None:
                timed[name] = ready
        times: dict[str, list[float]] = {name: [] for name in timed}
        for _ in range(TURNS if self.on_gpu else 1):
            for name, sample in timed.items():
                self.wait()
                times[name].append(sample())
        timed.clear()
        if self.on_gpu:  # graphs hold their memory in reference cycles
            gc.collect()
            torch.cuda.empty_cache()
        medians = [statistics.median(taken) for taken in times.values()]
        return dict(zip(times, self._slowest(medians), strict=True))

    def together(self, function: Callable[[], Result]) -> Result | None:
        """The function's result, None where it raised on any rank; it must not wait for a rank that raised."""
        result, failed = None, False
        try:
            result = function()
        except Exception:
            # The compiler's and the driver's refusals have no class in common.
            failed = True
        return None if self.any_rank(failed) else result

    def any_rank(self, value: bool) -> bool:
        """Whether it is true on any rank."""
        return self._slowest([float(value)])[0] > 0

    def wait(self) -> None:
        """Until all ranks are here, and their devices have nothing left to do."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        if self.group is not None:
            dist.barrier(self.group)
            if self.on_gpu:
                torch.cuda.synchronize(self.device)

    def copies(self, read_bytes: int) -> int:
        """How many copies of what a call reads hold several times the L2, MAX_COPIES at most."""
        if not self.on_gpu:
            return 1
        l2 = torch.cuda.get_device_properties(self.device).L2_cache_size
        return min(MAX_COPIES, max(1, -(-L2_FACTOR * l2 // max(read_bytes, 1))))

    def _slowest(self, values: list[float]) -> list[float]:
        if self.group is None or not values:
            return values
        found = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, self.group)
        return found.tolist()

    def _warmed(self, calls: Sequence[Call]) -> bool:
        """Compiles, and makes workspaces, on a stream of its own as a capture does."""
        if not self.on_gpu:
            calls[0]()
            return True
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for call in [*calls, *calls][:3]:
                call()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return True

    def _prepared(self, calls: Sequence[Call]) -> Callable[[], float]:
        """What makes the calls and says how many µs one took."""
        if not self.on_gpu:
            return lambda: _wall_us(calls[0])
        rounds = -(-CALLS // len(calls))
        graph = torch.cuda.CUDAGraph()
        # Of this thread only: NCCL's watchdog may query events in its own meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(rounds):
                for call in calls:
                    call()
        return lambda: _replay_us(graph) / (rounds * len(calls))


def _wall_us(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - begin)


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Of the second of two replays, whose launch is not waited for."""
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)
