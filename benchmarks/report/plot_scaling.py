"""The plot of `dist_decode --case scaling`: time over ranks, a line for each context length, and the ideal."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..metrics import METRICS
from ..results import Results
from ..shapes import Shape, parse_name
from .tables import ours, values_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_RANKS = re.compile(r"ranks(\d+)")
#: In a graph where there is a device, and wall time on a CPU.
_TIMES = ("graph_us", "eager_us")

Lines = dict[Shape, dict[int, float]]  # a case without its ranks → ranks → time


def lines_of(results: Results) -> tuple[str, Lines]:
    """(the metric of times, our times of every case over ranks); no lines in a file of another kind."""
    for metric in _TIMES:
        lines: Lines = {}
        for case, by_impl in values_of(results, metric).items():
            own, found = ours(by_impl), _RANKS.search(case)
            if own is None or found is None:
                continue
            shape = parse_name(case.replace(f" {found[0]}", ""))
            lines.setdefault(shape, {})[int(found[1])] = by_impl[own]
        if lines:
            return metric, lines
    return _TIMES[0], {}


def draw(axes: Axes, results: Results) -> None:
    metric, lines = lines_of(results)
    for i, (shape, times) in enumerate(lines.items()):
        ranks = sorted(times)
        label = f"{shape.kv_len:,} tokens"
        axes.plot(ranks, [times[n] for n in ranks], marker="o", color=f"C{i}", label=label)
        ideal = [times[ranks[0]] * ranks[0] / n for n in ranks]
        axes.plot(ranks, ideal, linestyle="--", color=f"C{i}", linewidth=1)
    axes.plot([], [], linestyle="--", color="gray", linewidth=1, label="ideal")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    everywhere = sorted({n for times in lines.values() for n in times})
    axes.set_xticks(everywhere, [str(n) for n in everywhere])
    axes.minorticks_off()
    first = next(iter(lines))
    axes.set_xlabel("ranks that share the cache")
    axes.set_ylabel(METRICS[metric].title)
    axes.set_title(
        f"Decode over a sharded cache, batch {first.batch}, {first.heads}/{first.kv_heads} heads, "
        f"{' '.join(first.tags)}"
    )
    axes.grid(alpha=0.3)
    axes.legend()
