"""Where the host time of one eager decode call goes: finding the prepared launch, allocating, launching.

The parts are calls that anybody can make, each within the one before: `decode`; a prepared call (`plan_decode`), which
has nothing left to find; a prepared call that is given its outputs and workspace, which has nothing left to allocate.
Beside them the same call through torch's dispatcher, an op that does nothing, and an empty kernel through Triton's own
launcher. On a CPU the reference computes in place of a launch.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence

import torch
import triton

from .decode_inputs import make_inputs
from .ranks import Ranks
from .report.tables import failures, heading, join, markdown_table, spread_lines, values_of
from .results import Recorder, Results
from .runner import Run, chosen_cases
from .shapes import DecodeCase
from .timing import HOST_CALLS

ENTRY, PLAN, LAUNCH = "fdattn", "fdattn/plan", "fdattn/plan-out"
#: Each part's title, and of which call it is the time, less that of which other one.
PARTS = (
    ("checks, key of the metadata, the prepared launch found", ENTRY, PLAN),
    ("out, lse and workspace allocated", PLAN, LAUNCH),
    ("addresses, the driver's launches", LAUNCH, None),
    ("**the whole call**", ENTRY, None),
    ("beside: the same call as torch.ops.fdattn.decode", "op", None),
    ("beside: an op that does nothing", "empty_op", None),
    ("beside: an empty kernel through Triton's own launcher", "empty_kernel", None),
)


@triton.jit
def _empty_kernel(q_ptr, k_ptr, v_ptr, kv_lens_ptr):
    pass


def run(options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> bool:
    cases = chosen_cases(options)
    measure(Run.of(options, ranks, recorder), cases if options.cases else cases[:1])
    return True


def measure(run: Run, cases: Sequence[DecodeCase]) -> None:
    threads = torch.get_num_threads()
    if run.timer.device.type == "cpu":
        torch.set_num_threads(1)  # waking others takes longer than all that is measured here
    try:
        with torch.no_grad():
            run.cases(cases, lambda case, impls: _measure_case(run, case))
    finally:
        torch.set_num_threads(threads)


def _measure_case(run: Run, case: DecodeCase) -> None:
    samplers = {}
    for name, call in _calls(case, run.timer.device).items():
        with run.guard(case.name, name, "first call"):
            for _ in range(3):
                call()
            samplers[name] = functools.partial(run.timer.host_us, [call], HOST_CALLS)
    run.record(case.name, "host_us", samplers)


def _calls(case: DecodeCase, device: torch.device) -> dict[str, Callable[[], object]]:
    import torch_fdattn

    (x,) = make_inputs(case, device, 1)
    arguments = x.q, x.k, x.v, x.kv_lens
    plan = torch_fdattn.plan_decode(*arguments)
    given = dict(out=plan(*arguments), workspace=torch_fdattn.decode_workspace(x.q, x.k, x.v))
    calls: dict[str, Callable[[], object]] = {
        ENTRY: functools.partial(torch_fdattn.decode, *arguments),
        PLAN: functools.partial(plan, *arguments),
        LAUNCH: functools.partial(plan, *arguments, **given),
        "op": functools.partial(torch.ops.fdattn.decode, *arguments),
        "empty_op": functools.partial(_empty_op(), *arguments),
    }
    if x.q.is_cuda:
        calls["empty_kernel"] = functools.partial(_empty_kernel[(1,)], *arguments)
    return calls


@functools.cache
def _empty_op() -> Callable[..., object]:
    library = torch.library.Library("fdattn_benchmarks", "DEF")
    library.define("empty(Tensor q, Tensor k, Tensor v, Tensor? kv_lens) -> ()")
    for key in ("CPU", "CUDA"):
        library.impl("empty", lambda q, k, v, kv_lens: None, key)
    _empty_op.library = library  # an op lives as long as its library
    return torch.ops.fdattn_benchmarks.empty


def table(results: Results) -> str:
    """The host time of a call by parts, in Markdown."""
    parts = [heading(results, note="")]
    for case, times in values_of(results, "host_us").items():
        rows = []
        for title, name, less in PARTS:
            if name in times and (less is None or less in times) and ENTRY in times:
                own = times[name] - times.get(less, 0.0)
                bold = "**" if title.startswith("**") else ""
                share = f"{100 * own / times[ENTRY]:.0f}"
                rows.append([title, f"{bold}{own:.1f}{bold}", f"{bold}{share}{bold}"])
        parts.append(f"### {case}\n\n" + markdown_table(["part", "µs", "%"], rows))
    spreads = (f"- {line}" for line in spread_lines(results))
    return join(*parts, *spreads, failures(results))
