"""A timeline of one call of each implementation: a panel for each, in it a row for each stream of rank 0's device.

What overlaps stands above each other. On a CPU the rows are threads and show ops alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import DeviceType

from ..ranks import Ranks, barrier
from ..report.plot import caption, save
from ..results import Results

#: Parts of kernels' names, in the order of looking; what has none is "other".
KINDS = {
    "copy": ("memcpy", "copy_", "aten::copy", "dma"),
    "communication": (
        "nccl",
        "gloo",
        "c10d",
        "symm",
        "shot",
        "lamport",
        "all_reduce",
        "_gather_",
        "push",
        "send",
        "barrier",
    ),
    "wait": ("_start_kernel", "_await_kernel", "_finish_kernel"),
    "matmul": ("gemm", "nvjet", "cutlass", "xmma", "aten::mm", "aten::addmm", "matmul", "linear"),
}
#: About 30 ms.
_QUEUEING_CYCLES = 50_000_000
#: The kernel of `torch.cuda._sleep`.
_SLEEP = "spin_kernel"
#: Colour and legend.
_COLOURS = {
    "matmul": ("C0", "matmul"),
    "copy": ("C1", "copy"),
    "communication": ("C2", "communication"),
    "wait": ("C3", "wait for other ranks"),
    "other": ("0.7", "all else: attention, norms, rope, SwiGLU, sums"),
}


class Span(NamedTuple):
    """Something that ran: its row, and µs since the first one's start."""

    name: str
    row: int
    start: float
    duration: float

    @property
    def kind(self) -> str:
        # Ours that multiply and communicate are matmuls here: that they do both is what is to be seen.
        lowered = self.name.lower()
        if "gemm" in lowered:
            return "matmul"
        found = (kind for kind, parts in KINDS.items() if any(part in lowered for part in parts))
        return next(found, "other")


def watch(ranks: Ranks, call: Callable[[], object]) -> list[Span]:
    """What one call runs on this rank; all ranks make it together, once before it is watched.

    On a GPU the call is queued behind a kernel that does nothing for as long as the slowest host may take: a profiler
    slows the host down, and starts on each rank at another time, which is not what is to be seen.
    """
    on_gpu = ranks.device.type == "cuda"
    activities = torch.profiler.ProfilerActivity
    call()
    barrier(ranks)
    with torch.profiler.profile(
        activities=[activities.CUDA if on_gpu else activities.CPU]
    ) as profile:
        if on_gpu:
            call()  # the first launches under a profiler take milliseconds each
            barrier(ranks)
            torch.cuda._sleep(_QUEUEING_CYCLES)
            together = torch.zeros(1, device=ranks.device)
            dist.all_reduce(together, group=ranks.group)  # all wake at once
            torch.cuda._sleep(1)
        call()
        if on_gpu:
            torch.cuda.synchronize()
    barrier(ranks)
    return spans(profile.events(), on_gpu)


def spans(events: Sequence, on_gpu: bool) -> list[Span]:
    """The device's events after the last `_SLEEP` of `watch`, or, on a CPU, those that no other contains."""
    device_type = DeviceType.CUDA if on_gpu else DeviceType.CPU
    found = [
        (event.name, event.device_resource_id if on_gpu else event.thread, event.time_range)
        for event in events
        if event.device_type == device_type and (on_gpu or event.cpu_parent is None)
    ]
    woken = _woken([time for name, _, time in found if _SLEEP in name])
    if on_gpu and found and woken < 0:
        raise ValueError(
            f"no {_SLEEP} among {len(found)} events: the kernel of torch.cuda._sleep has another name"
        )
    found = [event for event in found if event[2].start >= woken]
    if not found:
        return []
    begin = min(time.start for _, _, time in found)
    return sorted(
        (Span(name, row, time.start - begin, time.elapsed_us()) for name, row, time in found),
        key=lambda span: (span.row, span.start),
    )


def _woken(sleeps: Sequence) -> float:
    """When the watched call may begin: at the end of the first sleep behind the longest, or of that where it is alone.

    torch's fused ops sleep for a moment themselves, in a call as in the one before it.
    """
    if not sleeps:
        return -math.inf
    queueing = max(sleeps, key=lambda time: time.elapsed_us()).end
    return min((time.end for time in sleeps if time.start >= queueing), default=queueing)


def draw(path: str, title: str, results: Results, watched: Mapping[str, Sequence[Span]]) -> None:
    """Writes the plot of a run's case; its format is that of the file's name."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = {name: found for name, found in watched.items() if found}
    if not shown:
        raise ValueError(f"--timeline {path}: the profiler saw nothing run")
    rows = {name: sorted({span.row for span in found}) for name, found in shown.items()}
    heights = [len(of_one) for of_one in rows.values()]
    figure = Figure(figsize=(11, 1.2 + 0.35 * sum(heights) + 0.6 * len(heights)), layout="constrained")  # fmt: skip
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (name, found) in zip(panels, shown.items(), strict=True):
        places = {row: i for i, row in enumerate(rows[name])}
        for span in found:
            panel.broken_barh(
                [(span.start, span.duration)], (places[span.row] - 0.4, 0.8),
                color=_COLOURS[span.kind][0], edgecolor="white", linewidth=0.3,
            )  # fmt: skip
        end = max(span.start + span.duration for span in found)
        panel.set_title(f"{name}: {end:.0f} µs", loc="left", fontsize=9)
        panel.set_yticks(range(len(places)), [f"stream {row}" for row in places], fontsize=8)
        panel.set_ylim(len(places) - 0.5, -0.5)
    panels[-1].set_xlabel("µs since the first kernel's start")
    kinds = [kind for kind in _COLOURS if any(s.kind == kind for f in shown.values() for s in f)]
    handles = [Patch(color=_COLOURS[kind][0], label=_COLOURS[kind][1]) for kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    figure.suptitle(f"{title}\n{caption(results)}", fontsize=9)
    save(figure, path)
