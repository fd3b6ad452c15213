"""Plots from a results file: decode bandwidth against KV length, prefill rates as bars.

Needs matplotlib (the extra `bench`). Every figure carries its machine, versions and commit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .cases import PURE_READ, Shape, parse_name
from .results import Results
from .tables import in_order, values_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PREFILL = (("fwd_TFLOPs", "forward"), ("bwd_TFLOPs", "backward"))


def longest_series(cases: Sequence[str]) -> list[tuple[str, Shape]]:
    """The largest family of cases that differ in their KV length alone, shortest first."""
    shapes = [(case, parse_name(case)) for case in cases]

    def family(shape: Shape) -> tuple[object, ...]:
        return (shape.batch, shape.heads, shape.kv_heads, shape.head_dim, shape.tags)

    wanted, _ = Counter(family(shape) for _, shape in shapes).most_common(1)[0]
    return sorted(
        ((case, shape) for case, shape in shapes if family(shape) == wanted),
        key=lambda pair: pair[1].kv_len,
    )


def plot(results: Results, path: str | Path) -> Path:
    """Writes the plot that fits the file's rows; the suffix of `path` chooses the format."""
    try:
        import matplotlib
    except ImportError as failure:
        raise RuntimeError("plots need matplotlib: pip install 'torch-fdattn[bench]'") from failure
    matplotlib.use("Agg")
    from matplotlib import pyplot

    bandwidth = values_of(results, "GBps")
    rates = [(name, title) for name, title in _PREFILL if values_of(results, name)]
    if bandwidth:
        figure, axes = pyplot.subplots(figsize=(7, 4.4), layout="constrained")
        _bandwidth(axes, bandwidth)
    elif rates:
        cases = max(len(values_of(results, name)) for name, _ in rates)
        figure, grid = pyplot.subplots(
            len(rates),
            1,
            figsize=(max(7.0, 1.1 * cases), 3.6 * len(rates)),
            squeeze=False,
            layout="constrained",
        )
        for axes, (name, title) in zip(grid[:, 0], rates, strict=True):
            _bars(axes, values_of(results, name), title)
    else:
        raise ValueError("results must hold GBps, fwd_TFLOPs or bwd_TFLOPs rows to plot, got none")
    _caption(figure, results)
    path = Path(path)
    figure.savefig(path, bbox_inches="tight", dpi=160)
    pyplot.close(figure)
    return path


def _bandwidth(axes: Axes, values: dict[str, dict[str, float]]) -> None:
    series = longest_series(list(values))
    for impl in in_order(name for case, _ in series for name in values[case]):
        points = [(s.kv_len, values[case][impl]) for case, s in series if impl in values[case]]
        floor = impl == PURE_READ
        axes.plot(
            *zip(*points, strict=True),
            label="pure read (roofline)" if floor else impl,
            marker=None if floor else "o",
            color="black" if floor else None,
            linestyle="--" if floor else "-",
            linewidth=2.2 if impl.startswith("fdattn") else 1.2,
        )
    shape = series[0][1]
    axes.set_xscale("log", base=2)
    ticks = [s.kv_len for _, s in series]
    axes.set_xticks(ticks, [f"{n // 1024}k" if n >= 1024 else str(n) for n in ticks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("KV length")
    axes.set_ylabel("K and V read, GB/s")
    axes.set_title(
        f"Decode, batch {shape.batch}, {shape.heads}/{shape.kv_heads} heads of {shape.head_dim}, "
        f"{' '.join(shape.tags)}"
    )
    axes.grid(alpha=0.3)
    axes.legend()


def _bars(axes: Axes, values: dict[str, dict[str, float]], title: str) -> None:
    implementations = in_order(name for by_impl in values.values() for name in by_impl)
    width = 0.85 / len(implementations)
    for i, impl in enumerate(implementations):
        points = [(x + i * width, by[impl]) for x, by in enumerate(values.values()) if impl in by]
        axes.bar(*zip(*points, strict=True), width=width, label=impl)
    middle = width * (len(implementations) - 1) / 2
    shapes = [parse_name(case) for case in values]
    labels = [
        f"B{s.batch} H{s.heads}/{s.kv_heads}\nN{s.kv_len} D{s.head_dim}\n{' '.join(s.tags)}"
        for s in shapes
    ]
    axes.set_xticks([x + middle for x in range(len(values))], labels, fontsize=7)
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"Attention {title}")
    axes.grid(alpha=0.3, axis="y")
    axes.set_ylim(top=1.18 * axes.get_ylim()[1])  # room for the legend
    axes.legend(ncols=len(implementations), fontsize=8, loc="upper center")


def _caption(figure: Figure, results: Results) -> None:
    meta = results.meta
    text = (
        f"{meta['count']} × {meta['gpu']}, torch {meta['torch']}, triton {meta['triton']}, "
        f"commit {meta['commit']}, {meta['date']}"
    )
    if meta["gpu"] == "cpu":
        text += "; a CPU run: not a result"
    figure.supxlabel(text, fontsize=7)
