"""Decode: one query token against a cache. Time in a CUDA graph, eager, on the host; GB/s; error.

Memory-bound, so the floor is a kernel that only reads as many bytes of contiguous K and V, timed on
the same rotated inputs. Ours gets its lengths as a tensor on the device, as an engine calls it;
`fdattn/full` is given none, as SDPA's backends are. Errors are of one KV head of the longest sequence
against fp64. On a CPU there are no graphs and no floor: only eager and host time are recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from .decode_inputs import ExactHead, Layouts, flat_bytes
from .exact import max_abs_err
from .floors import best_pure_read
from .peers import Implementation, first
from .profiling import in_session, named_range
from .runner import Run
from .shapes import PURE_READ, DecodeCase
from .timing import RotatedGraph, calls_within, copies_needed

HOST_CALLS = 40  # few enough never to fill the launch queue


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

    graphs: dict[str, Callable[[], float]] = {}
    if on_gpu:
        with recorder.guard(case.name, PURE_READ, "floor", timer.check_device):
            floor = best_pure_read(timer, flat_bytes(case, layouts.first))
            graphs[PURE_READ] = floor.sample
    eager: dict[str, Callable[[], float]] = {}
    host: dict[str, Callable[[], float]] = {}
    for impl in implementations:
        with recorder.guard(case.name, impl.name, "first call", timer.check_device), impl.session():
            calls = impl.decode(case, layouts.in_memory(impl.memory))
            out = first(calls[0]()).reshape(layouts.first[0].q.shape)
            recorder.add(
                case.name, impl.name, "max_abs_err", max_abs_err(head.queries(out), head.exact.out)
            )
            timer.eager_us(calls, 3)
            count = calls_within(timer.eager_us(calls, 3), 50e3, 3, HOST_CALLS)
            timed = functools.partial(_timed, case, impl)
            eager[impl.name] = timed("eager", functools.partial(timer.eager_us, calls, count))
            host[impl.name] = timed("host", functools.partial(timer.host_us, calls, count))
            if on_gpu:
                graphs[impl.name] = timed("graph", RotatedGraph(timer, calls).sample)

    for name, sample in run.interleave(case.name, graphs, "graph_us").items():
        recorder.add_sample(case.name, name, "graph_us", sample.median, sample.spread)
        recorder.add(case.name, name, "GBps", case.kv_bytes / sample.median / 1e3)
    for metric, samplers in (("eager_us", eager), ("host_us", host)):
        for name, sample in run.interleave(case.name, samplers, metric).items():
            recorder.add_sample(case.name, name, metric, sample.median, sample.spread)


def _timed(
    case: DecodeCase, impl: Implementation, step: str, sample: Callable[[], float]
) -> Callable[[], float]:
    """`sample` in the implementation's session, and named for a profiler that watches the run."""

    def sampled() -> float:
        with in_session(impl), named_range(case.name), named_range(f"{impl.name} {step}"):
            return sample()

    return sampled
