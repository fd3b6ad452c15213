"""Named ranges for profilers, and the trace of a few decode calls of every implementation.

A trace is Chrome's JSON, which https://ui.perfetto.dev opens. It is taken in a pass of its own after
everything is timed, one profiler session a case, because a profiler that watches costs host time; the
sessions' events are joined into one file. Ranges stand twice: as torch.profiler's record_function, and
as NVTX where there is CUDA, which nsys and ncu read (they find them in an ordinary run too, since
timing names its steps; torch's profiler and NVIDIA's cannot watch one process at the same time).
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .decode_inputs import Layouts
from .results import describe
from .shapes import DecodeCase
from .timing import DeviceLost

if TYPE_CHECKING:
    from .peers import DecodeCall, Implementation
    from .runner import Run

CALLS = 3  # of each implementation and case


@contextlib.contextmanager
def named_range(name: str) -> Iterator[None]:
    """A range of that name; `/` has a meaning in ncu's filters and becomes `:`."""
    name = name.replace("/", ":")
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.profiler.record_function(name))
        if torch.cuda.is_available():
            stack.enter_context(torch.cuda.nvtx.range(name))
        yield


def trace_decode(run: Run, cases: Sequence[DecodeCase], path: str | Path) -> int:
    """Writes the trace of `cases`; the number of (case, implementation) pairs in it.

    What cannot run is left out here: timing has given it a row that says why.
    """
    traced, events = 0, _Events()
    try:
        for case in cases:
            if run.budget.over:
                print(f"{case.name}: not traced, the budget was spent", file=sys.stderr)
                continue
            ready = _ready(run, case)
            with _profiler(run.timer.device) as profiler, named_range(case.name):
                for impl, calls in ready:
                    with in_session(impl), named_range(impl.name):
                        for i in range(CALLS):
                            with named_range(f"{impl.name} call {i}"):
                                calls[i % len(calls)]()
                        run.timer.synchronize()  # the next one's kernels do not queue behind these
            events.add(profiler)
            traced += len(ready)
    except DeviceLost as lost:
        print(f"trace ends here: {describe(lost)}", file=sys.stderr)
    events.save(path, run.recorder.results.meta)
    return traced


def _ready(run: Run, case: DecodeCase) -> list[tuple[Implementation, list[DecodeCall]]]:
    """The implementations that can run, each call made once: they compile outside of the trace."""
    device, found = run.timer.device, []
    usable = [impl for impl in run.implementations if impl.available(device) is None]
    layouts: Layouts | None = None
    for impl in usable:
        try:
            layouts = layouts or Layouts(case, device, 2)
            with in_session(impl):
                calls = impl.decode(case, layouts.in_memory(impl.memory))
                for call in calls:
                    call()
            run.timer.synchronize()
            found.append((impl, calls))
        except Exception as failure:
            print(f"{case.name}: {impl.name} not traced: {describe(failure)}", file=sys.stderr)
            run.timer.check_device(failure)
    return found


@contextlib.contextmanager
def in_session(impl: Implementation) -> Iterator[None]:
    """What a decode call of `impl` is made in."""
    with torch.no_grad(), impl.session():
        yield


def _profiler(device: torch.device) -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities)


class _Events:
    """The events of several profiler sessions; their clocks are the machine's, so they line up."""

    def __init__(self) -> None:
        self._kept: list[dict] = []
        self._header: dict[str, object] = {}

    def add(self, profiler: torch.profiler.profile) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(file))
            found = json.loads(file.read_text(encoding="utf-8"))
        self._kept += found.pop("traceEvents")
        if self._header.get("baseTimeNanoseconds") not in (None, found.get("baseTimeNanoseconds")):
            raise RuntimeError("profiler sessions of one process must share their time base")
        private = ("host_name", "traceName")
        self._header |= {key: value for key, value in found.items() if key not in private}

    def save(self, path: str | Path, meta: dict[str, object]) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {**self._header, "otherData": meta, "traceEvents": self._kept}
        path.write_text(json.dumps(document), encoding="utf-8")
