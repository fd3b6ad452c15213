"""Plots from a results file: decode bandwidth over KV length or another axis, prefill rates as bars,
times over ranks, loss curves.

Needs matplotlib (the extra `bench`). Every figure carries its machine, versions and commit, and the
pure read as the roofline where the file has it.
"""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..cases import SWEEPS
from ..metrics import METRICS
from ..results import Results
from ..shapes import PURE_READ, Shape, parse_name
from .tables import in_order, is_ours, machine_of, ours, values_of, versions_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PREFILL = (("fwd_TFLOPs", "forward"), ("bwd_TFLOPs", "backward"))
_RANKS = re.compile(r"ranks(\d+)")
_STEP = re.compile(r"(.*) step (\d+)")
_TORCH = "sdpa"  # whose losses the others' distance is taken to
#: Of a plot over ranks: in a graph where there is a device, and wall time on a CPU.
_TIMES = ("graph_us", "eager_us")
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
Lines = dict[Shape, dict[int, float]]  # a case without its ranks → ranks → time


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
    return [RANKS] if lines_of(results)[1] else []


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
    figure = pyplot.figure(figsize=(7, 4.4), layout="constrained")
    draw = {PREFILL: _rates, TRAINING: _training, RANKS: _scaling}.get(axis)
    if draw is not None:
        draw(figure, results)
    else:
        _bandwidth(figure.subplots(), values_of(results, "GBps"), axis)
    text = f"{machine_of(results)}, {versions_of(results)}"
    text += "; a CPU run: not a result" if results.meta["gpu"] == "cpu" else ""
    figure.supxlabel(text, fontsize=7)
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


def _rates(figure: Figure, results: Results) -> None:
    rates = [(values_of(results, name), title) for name, title in _PREFILL]
    rates = [(values, title) for values, title in rates if values]
    widest = max(len(values) for values, _ in rates)
    figure.set_size_inches(max(7.0, 1.1 * widest), 3.6 * len(rates))
    grid = figure.subplots(len(rates), 1, squeeze=False)
    for axes, (values, title) in zip(grid[:, 0], rates, strict=True):
        _bars(axes, values, title)


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


def _scaling(figure: Figure, results: Results) -> None:
    """Time over ranks, a line for each context length, and the ideal."""
    axes = figure.subplots()
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


def curves(results: Results) -> tuple[str, dict[str, dict[int, float]]]:
    """(what was trained, loss by implementation and step); of several seeds the first."""
    title, found = "", {}
    for case, by_impl in values_of(results, "train_loss").items():
        match = _STEP.fullmatch(case)
        title = title or match[1]
        if match[1] != title:
            continue
        for impl, loss in by_impl.items():
            found.setdefault(impl, {})[int(match[2])] = loss
    return title, {impl: found[impl] for impl in in_order(found)}


def _training(figure: Figure, results: Results) -> None:
    """Loss curves over steps, all ways to attend in one panel, and their distance to torch's below it."""
    figure.set_size_inches(7, 6)
    title, found = curves(results)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    differ = False
    for index, (impl, losses) in enumerate(found.items()):
        style = dict(color=f"C{index}", linewidth=2.2 if is_ours(impl) else 1.2)
        dashes = (0, (4, 2 * index)) if index else "-"  # curves that lie on each other all show
        above.plot(list(losses), list(losses.values()), label=impl, linestyle=dashes, **style)
        if impl != _TORCH and _TORCH in found:
            apart = [abs(loss - found[_TORCH][step]) or math.nan for step, loss in losses.items()]
            below.plot(list(losses), apart, **style)
            differ |= not all(map(math.isnan, apart))
    above.set_ylabel("loss, nats a byte")
    above.set_title(f"Training, {title}")
    above.legend()
    below.set_ylabel(f"|loss - {_TORCH}'s|")
    below.set_xlabel("step")
    below.set_yscale("log" if differ else "linear")
    for axes in (above, below):
        axes.grid(alpha=0.3)
