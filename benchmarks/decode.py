"""Decode: one query token against a cache. Time in a CUDA graph, eager, on the host; GB/s; error.

Memory-bound, so the floor is a kernel that only reads as many bytes of contiguous K and V, timed on
the same rotated inputs. Ours gets its lengths as a tensor on the device, as an engine calls it;
`fdattn/full` is given none, as SDPA's backends are. Errors are of one KV head of the longest sequence
against fp64. On a CPU there are no graphs and no floor: only eager and host time are recorded.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence

import torch

from . import peers
from .decode_inputs import ExactHead, Layouts, flat_bytes
from .exact import max_abs_err
from .floors import best_pure_read
from .peers import Implementation, first
from .profiling import in_session, named_range, trace_decode
from .ranks import Ranks
from .results import Recorder
from .runner import Run, chosen_cases
from .shapes import PURE_READ, DecodeCase
from .timing import HOST_CALLS, RotatedGraph, calls_within, copies_needed


def run(options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> bool:
    run, cases = Run.of(options, ranks, recorder, peers.chosen(options.vs)), chosen_cases(options)
    measure(run, cases)
    if options.trace is not None:
        count = trace_decode(run, cases, options.trace)
        print(f"Trace of {count} implementations of cases: {options.trace}", file=sys.stderr)
    return True


def file_name(options: argparse.Namespace) -> str:
    """The documents show the newest file of each name: a sweep does not take the baselines' place."""
    return "decode-sweep" if options.sweep else "decode"


def measure(run: Run, cases: Sequence[DecodeCase]) -> None:
    """Measures `cases`."""
    floors = (PURE_READ,) if run.timer.device.type == "cuda" else ()
    with torch.no_grad():
        run.cases(cases, lambda case, impls: _measure_case(run, case, impls), floors)


def _measure_case(run: Run, case: DecodeCase, implementations: Sequence[Implementation]) -> None:
    timer, recorder = run.timer, run.recorder
    on_gpu = timer.device.type == "cuda"
    layouts = Layouts(case, timer.device, copies_needed(case.kv_bytes, timer.l2_bytes))
    head = ExactHead(case, layouts.first[0])

    samplers: dict[str, dict[str, Callable[[], float]]] = {"graph": {}, "eager": {}, "host": {}}
    if on_gpu:
        with run.guard(case.name, PURE_READ, "floor"):
            floor = best_pure_read(timer, flat_bytes(case, layouts.first))
            samplers["graph"][PURE_READ] = floor.sample
    for impl in implementations:
        with run.guard(case.name, impl.name, "first call"), impl.session():
            calls = impl.decode(case, layouts.in_memory(impl.memory))
            out = first(calls[0]()).reshape(layouts.first[0].q.shape)
            error = max_abs_err(head.queries(out), head.exact.out)
            recorder.add(case.name, impl.name, "max_abs_err", error)
            timer.eager_us(calls, 3)
            count = calls_within(timer.eager_us(calls, 3), 50e3, 3, HOST_CALLS)
            timed = functools.partial(_timed, case, impl)
            for step, clock in (("eager", timer.eager_us), ("host", timer.host_us)):
                sample = functools.partial(clock, calls, count)
                samplers[step][impl.name] = functools.partial(timed, step, sample)
            if on_gpu:  # a call that no graph can hold keeps its other times
                graph = RotatedGraph(timer, calls)
                samplers["graph"][impl.name] = functools.partial(timed, "graph", graph.sample)

    for name, sample in run.record(case.name, "graph_us", samplers["graph"]).items():
        recorder.add(case.name, name, "GBps", case.kv_bytes / sample.median / 1e3)
    for step in ("eager", "host"):
        run.record(case.name, f"{step}_us", samplers[step])


def _timed(case: DecodeCase, impl: Implementation, step: str, sample: Callable[[], float]) -> float:
    """A sample in the implementation's session, and named for a profiler that watches the run."""
    with in_session(impl), named_range(case.name), named_range(f"{impl.name} {step}"):
        return sample()
