"""Times what is compared in turns, on all ranks at once: CUDA graphs and eager calls, slowest rank."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence

import torch

from ..ranks import Ranks
from ..results import Recorder
from ..timing import RotatedGraph, Sample, Timer, calls_within, rounds_within, turns
from .clock import meet, slowest
from .together import together

GRAPH, EAGER = "graph_us", "eager_us"
_GRAPH_US, _EAGER_US = 5e3, 20e3  # of measuring: a replay, and a round of eager calls
_EAGER_CALLS = 40
_TURNS = 4  # of each graph, a repeat


class Rounds:
    """The samplers of one case; `timer` is this rank's alone."""

    def __init__(self, case: str, ranks: Ranks, recorder: Recorder) -> None:
        self.timer = Timer(ranks.device)
        self._case, self._ranks, self._recorder = case, ranks, recorder
        self._samplers: dict[str, dict[str, Callable[[], float]]] = {GRAPH: {}, EAGER: {}}

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
            meet(ranks)  # nothing of another implementation is under way in the capture
            graph = together(ranks, "graph", lambda: RotatedGraph(timer, calls, rounds=rounds))
            self.add(name, GRAPH, graph.next)
            last = graph.last
        self.add(name, EAGER, functools.partial(timer.eager_us, calls, count))
        return last

    def add(self, name: str, metric: str, sampler: Callable[[], float]) -> None:
        self._samplers[metric][name] = sampler

    def drop(self, name: str) -> None:
        for samplers in self._samplers.values():
            samplers.pop(name, None)

    def sample(self, repeats: int) -> dict[str, dict[str, float]]:
        """Records `repeats` rounds over all samplers; the medians by metric and name.

        Graphs take turns of one replay, so that all of them meet the same clocks; a first turn is for nothing.
        """
        medians: dict[str, dict[str, float]] = {}
        for metric, samplers in self._samplers.items():
            values: dict[str, list[float]] = {name: [] for name in samplers}
            count = 1 + repeats * (_TURNS if metric == GRAPH else 1)
            for turn, names in enumerate(turns(samplers, count)):
                for name in names:
                    meet(self._ranks)
                    found = slowest(self._ranks, [samplers[name]()])
                    values[name] += found if turn else []
            for name, found in values.items():
                sample = Sample(tuple(found))
                self._recorder.add_sample(self._case, name, metric, sample.median, sample.spread)
                medians.setdefault(metric, {})[name] = sample.median
        return medians

    def clear(self) -> None:
        """Gives memory back; graphs hold theirs in reference cycles, and must go before their buffers."""
        for samplers in self._samplers.values():
            samplers.clear()
        if self._ranks.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
