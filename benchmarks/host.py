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
_OP = "torch_fdattn.ops.decode.op"
_DIRECT = "torch_fdattn.launch.driver_launch"
#: What a stage is in: the function of ours that the call runs, and which run of it; the other stages have calls of
#: their own. Then its title in the table, and the stages inside it, which are taken off there.
Stage = tuple[tuple[str, str, int] | None, str, tuple[str, ...]]
_COMMON: dict[str, Stage] = {
    ENTRY: (None, "Python entry: keywords, and whether anybody must see the op", ("kernel",)),
}
_BESIDE: dict[str, Stage] = {
    "composite": (None, "beside: the same call as torch.ops.fdattn.decode", ()),
    "empty_op": (None, "beside: an op that does nothing", ()),
}
STAGES: dict[str, dict[str, Stage]] = {
    "cpu": {
        **_COMMON,
        "kernel": (
            (_OP, "decode_eagerly", 0), "key of the metadata, decisions", ("checks", "allocation", "launch"),
        ),
        "checks": ((_OP, "checked_call", 0), "checks", ()),
        "allocation": ((_OP, "empty_state", 0), "allocation of out and lse", ()),
        "launch": ((_OP, "decode_reference", 0), "the reference in place of a launch", ()),
        **_BESIDE,
    },
    "cuda": {
        **_COMMON,
        "kernel": (
            (_OP, "decode_eagerly", 0), "plan of the metadata, allocation of out and lse", ("launch",),
        ),
        "launch": (
            (_OP, "PreparedDecode.run", 0), "room for partial results, addresses", ("submission", "merge"),
        ),
        "submission": (
            (_DIRECT, "DriverLaunch.__call__", 0), "first kernel: writing addresses, the driver", (),
        ),
        "merge": ((_DIRECT, "DriverLaunch.__call__", 1), "merge kernel: the same", ()),
        **_BESIDE,
        "empty_kernel": (None, "beside: an empty kernel through Triton's own launch", ()),
    },
}  # fmt: skip


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
    inside = {name: stage[0] for name, stage in STAGES[x.q.device.type].items() if stage[0]}
    for name, call in _inner_stages(entry, inside).items():
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
    stages = STAGES["cpu" if results.meta["gpu"] == "cpu" else "cuda"]
    parts = [heading(results, note="")]
    for case, by_impl in values_of(results, "host_us").items():
        total, rows = by_impl.get(ENTRY), []
        times = {impl.removeprefix(STAGE): value for impl, value in by_impl.items()}
        for stage, (_, title, inside) in stages.items():
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
