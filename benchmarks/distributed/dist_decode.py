"""Decode over a KV cache that is sharded over ranks: every strategy, stock variants, floors.

`correctness` calls each variant several times and checks it; `compare` also times it, in a CUDA graph over
rotated inputs, and eager; `scaling` does on ever more ranks, `latency` has a file of its own. All times are the slowest
rank's. On a CPU, where the kernels are interpreted, there is wall time alone, and the cases say `cpu`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time

import torch
import torch.distributed as dist

from ..cases import DIST_DECODE_CASES, select
from ..ranks import Ranks, barrier
from ..results import Recorder
from ..shapes import PURE_READ, DecodeCase
from ..timing import EAGER, GRAPH
from . import latency, variants
from .case_run import CaseRun

LENGTHS = {"full": None, "uniform": "uniform", "power": "power", "short": "short"}
_DEFAULT_LENGTHS = {"correctness": "full,uniform,short"}


def file_name(options: argparse.Namespace) -> str:
    return f"dist-decode-{options.case}"


def default_path(options: argparse.Namespace) -> str:
    """In the current folder; the two main runs have one name."""
    kind = options.case if options.case in ("latency", "scaling") else "compare"
    return f"{kind}_results.json"


def run(options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> bool:
    """Whether all that was measured is right."""
    _check_strategies(options.strategies)
    with torch.no_grad():
        if options.case == "latency":
            return latency.measure(options, ranks, recorder)
        cases = chosen_cases(options, ranks.device)
        if options.case == "scaling":
            return _scaling(options, ranks, recorder, cases)
        return _measure(options, ranks, recorder, cases)


def chosen_cases(options: argparse.Namespace, device: torch.device) -> list[DecodeCase]:
    """Those of --cases, or the one that the shape options make of the first; at every --lengths."""
    cases = select(DIST_DECODE_CASES, options.cases, tiny_only=device.type == "cpu")
    fields = ("batch", "heads", "kv_heads", "kv_len", "head_dim")
    given = {name: getattr(options, name) for name in fields if getattr(options, name)}
    if given:
        cases = [dataclasses.replace(cases[0], **given)]
    elif options.case == "scaling" and not options.cases:
        cases = _scaling_cases(device)
    if cases[0].heads % cases[0].kv_heads:
        raise ValueError(
            f"--heads must be a multiple of --kv-heads {cases[0].kv_heads}, got {cases[0].heads}"
        )
    lengths = (options.lengths or _DEFAULT_LENGTHS.get(options.case, "full")).split(",")
    if wrong := [word for word in lengths if word not in LENGTHS]:
        raise ValueError(f"--lengths must be of {', '.join(LENGTHS)}, got {wrong[0]!r}")
    return [
        dataclasses.replace(case, dtype=options.dtype, ragged=LENGTHS[word])
        for word in lengths
        for case in cases
    ]


def _check_strategies(names: list[str] | None) -> None:
    for name in names or ():
        if name not in variants.strategies():
            raise ValueError(
                f"--strategies must be of {', '.join(variants.strategies())}, got {name!r}"
            )


def _chosen_variants(options: argparse.Namespace, ranks: Ranks) -> list[variants.Variant]:
    strategies = options.strategies or [
        name
        for name in variants.strategies()
        if name != variants.HIERARCHICAL or options.case == "correctness"
    ]
    peers = [*options.vs, *([variants.NCCL_SYMMETRIC] if options.nccl_symmetric else [])]
    return [
        *(variants.ours(name, ranks) for name in strategies),
        *(variants.peer(name, ranks) for name in dict.fromkeys(peers)),
    ]


def _measure(
    options: argparse.Namespace, ranks: Ranks, recorder: Recorder, cases: list[DecodeCase]
) -> bool:
    holds = True
    chosen = _chosen_variants(options, ranks)
    on_cpu = ranks.device.type == "cpu"
    named = {f"{case.name} cpu" if on_cpu else case.name: case for case in cases}
    floors = [variants.LOCAL, *([] if on_cpu else [PURE_READ])] if options.case == "compare" else []
    recorder.expect(named, [*(variant.name for variant in chosen), *floors])
    recorder.save()
    for name, case in named.items():
        holds &= _measure_case(options, name, case, chosen, ranks, recorder)
        recorder.came(name)
        recorder.save()
    return holds


def _measure_case(
    options: argparse.Namespace, name: str, case: DecodeCase, chosen: list[variants.Variant], ranks: Ranks,
    recorder: Recorder,
) -> bool:  # fmt: skip
    begin = time.monotonic()
    timed = options.case == "compare"
    run = CaseRun(case, name, ranks, recorder, timed)
    with contextlib.ExitStack() as stack:
        for variant in [*chosen, *([variants.LOCAL_VARIANT] if timed else [])]:
            run.take(variant, stack)
        if timed:
            run.take_floor()
            run.sample(options.repeats)
        run.rounds.clear()
    if ranks.rank == 0:
        taken = f"{time.monotonic() - begin:.1f} s, auto is {run.auto}"
        print(f"{name}: {taken}", file=sys.stderr, flush=True)
    return run.holds


def _scaling(
    options: argparse.Namespace, ranks: Ranks, recorder: Recorder, cases: list[DecodeCase]
) -> bool:
    """Strong scaling: one cache on 1, 2, …, W ranks or on `--sizes`, for every context length; whether all was right.

    On k ranks the first k make a group of their own, and the others wait. On one it is our decode alone, with nothing
    around it: that is what more ranks must be compared with. A row's case ends in `ranks<k>`; the metric `scaling` is
    how many times faster k ranks are than the fewest.
    """
    strategies = options.strategies or ["auto"]
    sizes = options.sizes or range(1, ranks.size + 1)
    if wrong := [size for size in sizes if not 1 <= size <= ranks.size]:
        raise ValueError(
            f"--sizes must be from 1 to {ranks.size}, the number of ranks, got {wrong[0]}"
        )
    groups = {size: _first(ranks, size) for size in sorted(sizes)}
    holds = True
    for case in cases:
        alone: dict[str, float] = {}  # by strategy
        for size, members in groups.items():
            begin = time.monotonic()
            if members is not None:
                holds &= _scale(case, members, recorder, strategies, options.repeats, alone)
            barrier(ranks)  # who is not among them waits here
            recorder.save()
            if ranks.rank == 0:
                taken = time.monotonic() - begin
                print(f"{case.name} on {size}: {taken:.1f} s", file=sys.stderr, flush=True)
    return holds


def _scaling_cases(device: torch.device) -> list[DecodeCase]:
    """What is measured where no case or shape is given: one request at several lengths."""
    if device.type == "cpu":
        return [DecodeCase(1, 4, 2, length, 32, "fp32", tiny=True) for length in (32, 64)]
    return [DecodeCase(1, 64, 8, length) for length in (32768, 131072, 1048576)]


def _first(ranks: Ranks, size: int) -> Ranks | None:
    """The first `size` ranks, if this one is among them; every rank takes part in making the group."""
    if size == ranks.size:
        return ranks
    group = dist.new_group(list(range(size)))
    if ranks.rank >= size:
        return None
    return Ranks(ranks.rank, size, ranks.device, group.group_name)


def _scale(
    case: DecodeCase, members: Ranks, recorder: Recorder, strategies: list[str], repeats: int,
    alone: dict[str, float],
) -> bool:  # fmt: skip
    name = f"{case.name} ranks{members.size}" + (" cpu" if members.device.type == "cpu" else "")
    run = CaseRun(case, name, members, recorder, timed=True)
    with contextlib.ExitStack() as stack:
        for strategy in strategies:
            variant = variants.ours(strategy, members)
            if members.size == 1:
                variant = dataclasses.replace(
                    variants.LOCAL_VARIANT, name=variant.name, ours=True, all_keys=True
                )
            run.take(variant, stack)
        medians = run.sample(repeats)
        run.rounds.clear()
    for impl, taken in medians.get(GRAPH, medians.get(EAGER, {})).items():
        first = alone.setdefault(impl, taken)
        recorder.add(name, impl, "scaling", first / taken)
    return run.holds
