"""Plots from a results file: decode bandwidth over KV length or another axis, prefill rates as bars,
times over ranks, loss curves.

Needs matplotlib (the extra `bench`). Every figure carries its machine, versions and commit, and the
pure read as the roofline where the file has it.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..cases import SWEEPS
from ..results import Results
from ..shapes import PURE_READ, Shape, parse_name
from . import plot_scaling, plot_training
from .tables import in_order, is_ours, values_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PREFILL = (("fwd_TFLOPs", "forward"), ("bwd_TFLOPs", "backward"))
PREFILL = "prefill"
RANKS = "ranks"
TRAINING = "training"


def _kilo(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


#: The axes of a decode plot: what each is called, and what its points are called.
AXES: dict[str, tuple[str, Callable[[Shape], str]]] = {
    "length": ("KV length", lambda s: _kilo(s.kv_len)),
    "batch": ("batch", lambda s: str(s.batch)),
    "gqa": ("query heads / KV heads", lambda s: f"{s.heads}/{s.kv_heads}"),
    "dim": ("head dim", lambda s: str(s.head_dim)),
    "page": ("tokens a page", lambda s: s.tags[-1].removeprefix("page")),
    "dtype": ("q, cache", lambda s: "\n".join(s.tags)),
    "ragged": ("lengths", lambda s: "\n".join((f"B{s.batch} to {_kilo(s.kv_len)}", *s.tags[1:]))),
}

_NUMERIC = ("length", "batch", "dim", "page")  # points of other axes are not joined by lines
# An implementation has one colour in all plots, whoever else is in them; a variant of it is dotted.
_COLOURS = {
    name: f"C{i}"
    for i, name in enumerate(("fdattn", "cudnn", "fa2", "fa3", "flashinfer", "flex", "eager"))
}

Series = list[tuple[str, Shape]]


def longest_series(cases: Sequence[str]) -> Series:
    """The largest family of cases that differ in their KV length alone, shortest first."""
    shapes = [(case, parse_name(case)) for case in cases]

    def family(shape: Shape) -> tuple[object, ...]:
        return (shape.batch, shape.heads, shape.kv_heads, shape.head_dim, shape.tags)

    wanted, _ = Counter(family(shape) for _, shape in shapes).most_common(1)[0]
    return sorted(
        ((case, shape) for case, shape in shapes if family(shape) == wanted),
        key=lambda pair: pair[1].kv_len,
    )


def series_of(axis: str, cases: Sequence[str]) -> Series:
    """The cases plotted over an axis: its sweep's, or for lengths all that differ in nothing else."""
    if axis == "length":
        return longest_series(cases)
    return [(c.name, parse_name(c.name)) for c in SWEEPS[axis] if c.name in cases]


def plottable(results: Results) -> list[str]:
    """The plots that a file's rows allow: axes with two cases or more, or PREFILL, or RANKS."""
    bandwidth = list(values_of(results, "GBps"))
    if bandwidth:
        return [axis for axis in AXES if axis == "length" or len(series_of(axis, bandwidth)) > 1]
    if any(values_of(results, name) for name, _ in _PREFILL):
        return [PREFILL]
    if values_of(results, "train_loss"):
        return [TRAINING]
    return [RANKS] if plot_scaling.lines_of(results)[1] else []


def plot(results: Results, path: str | Path, axis: str | None = None) -> Path:
    """Writes one plot, by default the first that the rows allow; `path`'s suffix is the format."""
    path = Path(path)
    _draw(results, path, path.suffix.removeprefix("."), axis)
    return path


def inline_svg(results: Results, axis: str) -> str:
    """The plot as an SVG element to stand in HTML, with nothing outside of it."""
    file = io.StringIO()
    _draw(results, file, "svg", axis)
    text = file.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)


def _draw(results: Results, to: Path | io.StringIO, form: str, axis: str | None) -> None:
    try:
        import matplotlib
    except ImportError as failure:
        raise RuntimeError("plots need matplotlib: pip install 'torch-fdattn[bench]'") from failure
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text that can be searched and read aloud
    from matplotlib import pyplot

    possible = plottable(results)
    if not possible:
        raise ValueError(
            "results must hold GBps, fwd_TFLOPs or bwd_TFLOPs rows, times over ranks, or losses, to plot; got none"
        )
    if axis is not None and axis not in possible:
        raise ValueError(f"--axis must be of {', '.join(possible)} for this file, got {axis!r}")
    axis = axis or possible[0]
    if axis == PREFILL:
        rates = [(values_of(results, name), title) for name, title in _PREFILL]
        rates = [(values, title) for values, title in rates if values]
        size = max(7.0, 1.1 * max(len(values) for values, _ in rates)), 3.6 * len(rates)
        figure, grid = pyplot.subplots(
            len(rates), 1, figsize=size, squeeze=False, layout="constrained"
        )
        for axes, (values, title) in zip(grid[:, 0], rates, strict=True):
            _bars(axes, values, title)
    elif axis == TRAINING:
        figure = pyplot.figure(figsize=(7, 6), layout="constrained")
        plot_training.draw(figure, results)
    else:
        figure, axes = pyplot.subplots(figsize=(7, 4.4), layout="constrained")
        if axis == RANKS:
            plot_scaling.draw(axes, results)
        else:
            _bandwidth(axes, values_of(results, "GBps"), axis)
    _caption(figure, results)
    figure.savefig(to, format=form, bbox_inches="tight", dpi=160)
    pyplot.close(figure)


def _bandwidth(axes: Axes, values: dict[str, dict[str, float]], axis: str) -> None:
    series = series_of(axis, list(values))
    places = [s.kv_len for _, s in series] if axis == "length" else list(range(len(series)))
    for impl in in_order(name for case, _ in series for name in values[case]):
        points = [
            (place, values[case][impl])
            for place, (case, _) in zip(places, series, strict=True)
            if impl in values[case]
        ]
        floor = impl == PURE_READ
        name, _, variant = impl.partition("/")
        line = "--" if floor else ":" if variant else "-"
        axes.plot(
            *zip(*points, strict=True),
            label="pure read (roofline)" if floor else impl,
            marker="_" if floor else "o",
            color="black" if floor else _COLOURS.get(name),
            linestyle=line if axis in _NUMERIC else "",
            linewidth=2.2 if is_ours(impl) else 1.2,
        )
    title, point = AXES[axis]
    if axis == "length":
        axes.set_xscale("log", base=2)
    axes.set_xticks(places, [point(s) for _, s in series])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(title)
    axes.set_ylabel("K and V read, GB/s")
    axes.set_title(f"Decode, {_common([s for _, s in series])}")
    axes.grid(alpha=0.3)
    axes.legend()


def _common(shapes: Sequence[Shape]) -> str:
    """What all points of a plot share."""
    properties = {
        "batch {}": {s.batch for s in shapes},
        "{} heads": {f"{s.heads}/{s.kv_heads}" for s in shapes},
        "head dim {}": {s.head_dim for s in shapes},
        "{} keys": {s.kv_len for s in shapes},
        "{}": {" ".join(s.tags) for s in shapes},
    }
    return ", ".join(text.format(*found) for text, found in properties.items() if len(found) == 1)


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
