"""Strong scaling: one cache on 1, 2, …, W ranks, for every context length.

On k ranks the first k make a group of their own, and the others wait. On one it is our decode alone,
with nothing around it: that is what more ranks must be compared with. A row's case ends in `ranks<k>`;
the metric `scaling` is how many times faster k ranks are than one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time

import torch
import torch.distributed as dist

from ..ranks import Ranks, meet
from ..results import Recorder
from ..shapes import DecodeCase
from ..timing import EAGER, GRAPH
from . import ways
from .case_run import CaseRun

LENGTHS = (32768, 131072, 1048576)
CPU_LENGTHS = (32, 64)


def measure(
    options: argparse.Namespace, ranks: Ranks, recorder: Recorder, cases: list[DecodeCase]
) -> bool:
    """Whether every result was right."""
    strategies = options.strategies or ["auto"]
    groups = [_first(ranks, size) for size in range(1, ranks.size + 1)]
    holds = True
    for case in cases:
        alone: dict[str, float] = {}  # by strategy
        for size, members in enumerate(groups, 1):
            begin = time.monotonic()
            if members is not None:
                holds &= _measure(case, members, recorder, strategies, options.repeats, alone)
            meet(ranks)  # who is not among them waits here
            recorder.save()
            if ranks.rank == 0:
                taken = time.monotonic() - begin
                print(f"{case.name} on {size}: {taken:.1f} s", file=sys.stderr, flush=True)
    return holds


def default_cases(device: torch.device) -> list[DecodeCase]:
    """What is measured where no case or shape is given: one request at several lengths."""
    if device.type == "cpu":
        return [DecodeCase(1, 4, 2, length, 32, "fp32", tiny=True) for length in CPU_LENGTHS]
    return [DecodeCase(1, 64, 8, length) for length in LENGTHS]


def _first(ranks: Ranks, size: int) -> Ranks | None:
    """The first `size` ranks, if this one is among them; every rank takes part in making the group."""
    if size == ranks.size:
        return ranks
    group = dist.new_group(list(range(size)))
    if ranks.rank >= size:
        return None
    return Ranks(ranks.rank, size, ranks.device, group.group_name)


def _measure(
    case: DecodeCase, members: Ranks, recorder: Recorder, strategies: list[str], repeats: int,
    alone: dict[str, float],
) -> bool:  # fmt: skip
    name = f"{case.name} ranks{members.size}" + (" cpu" if members.device.type == "cpu" else "")
    run = CaseRun(case, name, members, recorder, timed=True)
    with contextlib.ExitStack() as stack:
        for strategy in strategies:
            way = ways.ours(strategy, members)
            if members.size == 1:
                way = dataclasses.replace(ways.LOCAL_WAY, name=way.name, ours=True, whole=True)
            run.take(way, stack)
        medians = run.sample(repeats)
        run.rounds.clear()
    for impl, taken in medians.get(GRAPH, medians.get(EAGER, {})).items():
        first = alone.setdefault(impl, taken)
        recorder.add(name, impl, "scaling", first / taken)
    return run.holds
