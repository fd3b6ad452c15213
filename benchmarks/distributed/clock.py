"""Times calls that all ranks make together: each call's time is its slowest rank's.

A call of one device is made by all ranks too where each has a GPU of its own. On a CPU they would take
each other's cores and memory: there rank 0 calls it `alone`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from ..ranks import Ranks
from ..results import Recorder
from ..timing import Sample, turns

Call = Callable[[], object]
TARGET_MS = 100.0  # of measuring, a round
WARM_UPS = 2


class Clock:
    """`prepare`, not timed, is called before each call: it takes back what the last one did."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def each_ms(
        self, call: Call, count: int, prepare: Call | None = None, alone: bool = False
    ) -> list[float]:
        """The times of `count` calls, of the slowest rank each; `alone`: of rank 0, the others wait."""
        times, waits = [], alone and self._ranks.rank > 0
        for _ in range(count):
            if prepare is not None:
                prepare()
            meet(self._ranks)
            # Who waits is at the next barrier already. 0 is never the largest: all get rank 0's time.
            times.append(0.0 if waits else self._one_ms(call))
        return slowest(self._ranks, times)

    def _one_ms(self, call: Call) -> float:
        if self._ranks.device.type == "cpu":
            begin = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - begin)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)


def meet(ranks: Ranks) -> None:
    """Returns when every rank is here and its device has nothing left to do."""
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier(ranks.group)
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()


def captured(ranks: Ranks, call: Call) -> torch.cuda.CUDAGraph:
    """The call, which all ranks have made before, as a graph."""
    stream = torch.cuda.Stream()
    meet(ranks)
    with torch.cuda.stream(stream):  # workspaces of this stream are made outside the capture
        call()
    meet(ranks)  # nothing of anybody else's is under way in the capture
    graph = torch.cuda.CUDAGraph()
    # Of this thread only: NCCL's watchdog may query events in its own meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        call()
    return graph


def slowest(ranks: Ranks, times: Sequence[float]) -> list[float]:
    """Each time's largest over the ranks."""
    found = torch.tensor(times, dtype=torch.float64, device=ranks.device)
    dist.all_reduce(found, dist.ReduceOp.MAX, ranks.group)
    return found.tolist()


def compare(
    ranks: Ranks, recorder: Recorder, case: str, calls: Mapping[str, Call], *, repeats: int,
    prepare: Mapping[str, Call] | None = None, alone: Collection[str] = (),
) -> dict[str, float]:  # fmt: skip
    """Times the calls in turns, as `Rounds.sample` does, and records `latency_ms`; the medians by name.

    Those named in `alone` communicate nothing: rank 0 makes them while the others wait.
    """
    clock, prepare = Clock(ranks), prepare or {}
    counts: dict[str, int] = {}
    for name, call in calls.items():
        clock.each_ms(call, WARM_UPS, prepare.get(name), name in alone)
        # The same on all ranks.
        estimate = min(clock.each_ms(call, 2, prepare.get(name), name in alone))
        counts[name] = max(3, min(50, round(TARGET_MS / max(estimate, 1e-3))))
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for order in turns(calls, repeats):
        for name in order:
            times = clock.each_ms(calls[name], counts[name], prepare.get(name), name in alone)
            rounds[name].append(statistics.median(times))
    medians = {}
    for name, values in rounds.items():
        sample = Sample(tuple(values))
        recorder.add_sample(case, name, "latency_ms", sample.median, sample.spread)
        medians[name] = sample.median
    return medians
