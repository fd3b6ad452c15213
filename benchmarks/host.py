"""Where the host time of one eager decode call goes: entry, plan, outputs, the two launches.

Each stage is timed alone with the arguments that it gets inside a real call: the Python entry holds the
eager kernel, which finds the plan of the call's metadata, allocates and launches; what the nested stages
leave over is the outer one's own. For comparison the same call through torch's dispatcher (a composite over
Python kernels), an op that does nothing, and an empty kernel through Triton's own launcher. On a CPU the
reference computes in place of a launch and every call is checked, so only the other stages mean anything.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence

import torch
import triton

from .decode_inputs import make_inputs
from .ranks import Ranks
from .report.tables import failures, heading, join, markdown_table, spread_lines, values_of
from .results import Recorder, Results
from .runner import Run, chosen_cases
from .shapes import DecodeCase
from .timing import HOST_CALLS

ENTRY, STAGE = "fdattn", "stage/"
_OP, _LAUNCH = "torch_fdattn.ops.decode.op", "torch_fdattn.ops.decode.launch"
_DIRECT = "torch_fdattn.ops.direct_launch"
# Where the stages inside the entry are found: the function of ours that the call runs, and which run of it.
_INSIDE_CPU = {
    "kernel": (_OP, "decode_eagerly", 0),
    "checks": (_OP, "check_decode", 0),
    "allocation": (_OP, "empty_state", 0),
    "launch": (_OP, "decode_reference", 0),
}
_INSIDE_CUDA = {
    "kernel": (_OP, "decode_eagerly", 0),
    "launch": (_LAUNCH, "Plan.launch", 0),
    "submission": (_DIRECT, "DirectLaunch.__call__", 0),
    "merge": (_DIRECT, "DirectLaunch.__call__", 1),
}
# Each line of the table: its title, the stage, and the stages inside it, which are taken off.
_ENTRY_LINE = ("Python entry: keywords, and whether anybody must see the op", ENTRY, ("kernel",))
_BESIDE = (
    ("beside: the same call as torch.ops.fdattn.decode", "composite", ()),
    ("beside: an op that does nothing", "empty_op", ()),
)
_PARTS_CPU = (
    _ENTRY_LINE,
    ("key of the metadata, decisions", "kernel", ("checks", "allocation", "launch")),
    ("checks", "checks", ()),
    ("allocation of out and lse", "allocation", ()),
    ("the reference in place of a launch", "launch", ()),
    *_BESIDE,
)
_PARTS_CUDA = (
    _ENTRY_LINE,
    ("plan of the metadata, allocation of out and lse", "kernel", ("launch",)),
    ("room for partial results, addresses", "launch", ("submission", "merge")),
    ("first kernel: writing addresses, the driver", "submission", ()),
    ("merge kernel: the same", "merge", ()),
    *_BESIDE,
    ("beside: an empty kernel through Triton's own launch", "empty_kernel", ()),
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
    import torch_fdattn

    (x,) = make_inputs(case, run.timer.device, 1)
    arguments = x.q, x.k, x.v, x.kv_lens
    entry = functools.partial(torch_fdattn.decode, *arguments)
    entry()
    stages: dict[str, Callable[[], object]] = {
        ENTRY: entry,
        f"{STAGE}composite": functools.partial(torch.ops.fdattn.decode, *arguments),
        f"{STAGE}empty_op": functools.partial(_empty_op(), *arguments),
    }
    if x.q.is_cuda:
        stages[f"{STAGE}empty_kernel"] = functools.partial(_empty_kernel[(1,)], *arguments)
    for name, call in _inner_stages(entry, _INSIDE_CUDA if x.q.is_cuda else _INSIDE_CPU).items():
        if isinstance(call, str):
            run.recorder.error(case.name, f"{STAGE}{name}", call)
        else:
            stages[f"{STAGE}{name}"] = call
    samplers = {}
    for name, call in stages.items():
        with run.guard(case.name, name, "first call"):
            for _ in range(3):
                call()
            samplers[name] = functools.partial(run.timer.host_us, [call], HOST_CALLS)
    run.record(case.name, "host_us", samplers)


@functools.cache
def _empty_op() -> Callable[..., object]:
    library = torch.library.Library("fdattn_benchmarks", "DEF")
    library.define("empty(Tensor q, Tensor k, Tensor v, Tensor? kv_lens) -> ()")
    for key in ("CPU", "CUDA"):
        library.impl("empty", lambda q, k, v, kv_lens: None, key)
    _empty_op.library = library  # an op lives as long as its library
    return torch.ops.fdattn_benchmarks.empty


def _inner_stages(
    entry: Callable[[], object], inside: dict[str, tuple[str, str, int]]
) -> dict[str, Callable[[], object] | str]:
    """What runs inside the entry, with the arguments of this call, or why it is not seen."""
    found: dict[str, Callable[[], object] | str] = {}
    for name, (module, function, which) in inside.items():
        with _watched(module, function) as calls:
            entry()
        if len(calls) > which:
            found[name] = calls[which]
        else:
            found[name] = f"not seen: the call runs no {'other ' * which}{module}.{function}"
    return found


@contextlib.contextmanager
def _watched(module_name: str, function: str) -> Iterator[list[Callable[[], object]]]:
    """The calls of a module's function or method while entered; none where there is none."""
    calls: list[Callable[[], object]] = []
    try:
        module = importlib.import_module(module_name)
        *classes, function = function.split(".")
        for name in classes:
            module = getattr(module, name)
        original = getattr(module, function)
    except (ImportError, AttributeError):
        yield calls
        return

    def watching(*args, **kwargs):
        calls.append(functools.partial(original, *args, **kwargs))
        return original(*args, **kwargs)

    setattr(module, function, watching)
    try:
        yield calls
    finally:
        setattr(module, function, original)


def table(results: Results) -> str:
    """The host time of a call by parts, in Markdown."""
    on_cpu = results.meta["gpu"] == "cpu"
    parts = [heading(results, note="")]
    for case, by_impl in values_of(results, "host_us").items():
        total, rows = by_impl.get(ENTRY), []
        times = {impl.removeprefix(STAGE): value for impl, value in by_impl.items()}
        for title, stage, inside in _PARTS_CPU if on_cpu else _PARTS_CUDA:
            if total is None or not {stage, *inside} <= set(times):
                rows.append([title, "–", "–"])
                continue
            own = times[stage] - sum(times[name] for name in inside)
            rows.append([title, f"{own:.1f}", f"{100 * own / total:.0f}"])
        if total is not None:
            rows.append(["**the whole call**", f"**{total:.1f}**", "100"])
        parts.append(f"### {case}\n\n" + markdown_table(["part", "µs", "%"], rows))
    spreads = (f"- {line}" for line in spread_lines(results))
    return join(*parts, *spreads, failures(results))
