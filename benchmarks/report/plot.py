"""Plots from a results file: decode bandwidth over KV length or another axis, attention's rates as bars,
times over ranks, how far loss curves are from torch's.

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

from torch_fdattn.extras import install_command

from ..cases import SWEEPS
from ..metrics import METRICS
from ..results import Results
from ..shapes import PURE_READ, Shape, parse_name
from .tables import (
    Values,
    in_order,
    is_ours,
    machine_of,
    ours,
    peer_ratios,
    ratio_text,
    values_of,
    versions_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PREFILL = (("fwd_TFLOPs", "forward (prefill)"), ("bwd_TFLOPs", "backward (training)"))
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
    for i, name in enumerate(
        ("fdattn", "cudnn", "fa2", "fa3", "flashinfer", "flex", "eager", "fa4")
    )
}

Series = list[tuple[str, Shape]]
Lines = dict[Shape, dict[int, float]]  # a case without its ranks → ranks → time


def longest_series(cases: Sequence[str]) -> Series:
    """The largest family of cases that differ in their KV length alone, shortest first."""
    shapes = [(case, parse_name(case)) for case in cases]

    def family(shape: Shape) -> tuple[object, ...]:
        return (shape.batch, shape.heads, shape.kv_heads, shape.head_dim, shape.tags)

    commonest, _ = Counter(family(shape) for _, shape in shapes).most_common(1)[0]
    return sorted(
        ((case, shape) for case, shape in shapes if family(shape) == commonest),
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
    return save(_draw(results, axis), path)


def new_figure(inches: tuple[float, float]) -> Figure:
    """An empty one of this size.

    Raises:
        RuntimeError: matplotlib is missing.
    """
    try:
        import matplotlib.figure
    except ImportError as failure:
        raise RuntimeError(f"plots need matplotlib: {install_command('bench')}") from failure
    return matplotlib.figure.Figure(figsize=inches, layout="constrained")


def save(figure: Figure, path: str | Path) -> Path:
    """Writes a figure in the format of the path's suffix."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".svg":
        path.write_text(_svg(figure), encoding="utf-8")
    else:
        figure.savefig(path, bbox_inches="tight", dpi=160)
    return path


def inline_svg(results: Results, axis: str) -> str:
    """The plot as an SVG element to stand in HTML, with nothing outside of it."""
    text = _svg(_draw(results, axis))
    return text[text.index("<svg") :]


def _svg(figure: Figure) -> str:
    """Text stays text, which can be searched and read aloud; coordinates have two decimals, lines no indentation."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "torch_fdattn"}):
        figure.savefig(file, format="svg", bbox_inches="tight")
    text = re.sub(r"<metadata>.*?</metadata>", "", file.getvalue(), flags=re.DOTALL)
    text = re.sub(
        r"-?\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), text
    )
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "sans-serif", text)
    return re.sub(r"\s*\n\s*", "\n", text)


def _draw(results: Results, axis: str | None) -> Figure:
    figure = new_figure((7, 4.4))
    possible = plottable(results)
    if not possible:
        raise ValueError(
            "results must hold GBps, fwd_TFLOPs or bwd_TFLOPs rows, times over ranks, or losses, to plot; got none"
        )
    if axis is not None and axis not in possible:
        raise ValueError(f"--axis must be of {', '.join(possible)} for this file, got {axis!r}")
    axis = axis or possible[0]
    draw = {PREFILL: _rates, TRAINING: _training, RANKS: _scaling}.get(axis)
    if draw is not None:
        draw(figure, results)
    else:
        _bandwidth(figure.subplots(), values_of(results, "GBps"), axis)
    figure.supxlabel(caption(results), fontsize=7)
    return figure


def caption(results: Results) -> str:
    """What the run was, below a plot."""
    text = f"{machine_of(results)}, {versions_of(results)}"
    return text + ("; a CPU run: not a result" if results.meta["gpu"] == "cpu" else "")


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
    named = [(name, title) for name, title in _PREFILL if values_of(results, name)]
    widest = max(len(values_of(results, name)) for name, _ in named)
    figure.set_size_inches(max(7.0, 1.0 * widest), 3.0 * len(named))
    grid = figure.subplots(len(named), 1, squeeze=False)
    for axes, (name, title) in zip(grid[:, 0], named, strict=True):
        _bars(axes, values_of(results, name), peer_ratios(results, name))
        axes.set_title(f"Attention {title}")


def _bars(axes: Axes, values: Values, compared: Values) -> None:
    """In the bar of ours stands its speed over that of the fastest peer."""
    implementations = in_order(name for by_impl in values.values() for name in by_impl)
    width = 0.85 / len(implementations)
    for i, impl in enumerate(implementations):
        points = [(x + i * width, by[impl]) for x, by in enumerate(values.values()) if impl in by]
        colour = _COLOURS.get(impl)
        axes.bar(*zip(*points, strict=True), width=width, label=impl, color=colour)
    for x, (case, by_impl) in enumerate(values.items()):
        if peers := compared.get(case):
            text, height = ratio_text(min(peers.values())), by_impl[ours(by_impl)] / 2
            axes.text(
                x, height, text, ha="center", va="center", rotation=90, fontsize=8, color="white"
            )
    middle = width * (len(implementations) - 1) / 2
    shapes = [parse_name(case) for case in values]
    labels = [
        f"B{s.batch} H{s.heads}/{s.kv_heads}\nN{s.kv_len} D{s.head_dim}\n{' '.join(s.tags)}"
        for s in shapes
    ]
    axes.set_xticks([x + middle for x in range(len(values))], labels, fontsize=7)
    axes.set_ylabel("TFLOP/s")
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
    """How far each loss curve is from torch's, over steps; the curves themselves where the file has none of torch's."""
    title, found = curves(results)
    axes = figure.subplots()
    others = {impl: losses for impl, losses in found.items() if impl != _TORCH}
    apart = _TORCH in found and others
    differ = False
    for index, (impl, losses) in enumerate((others if apart else found).items()):
        values = list(losses.values())
        if apart:
            values = [abs(loss - found[_TORCH][step]) or math.nan for step, loss in losses.items()]
            differ |= not all(map(math.isnan, values))
        width = 2.2 if is_ours(impl) else 0.9
        axes.plot(list(losses), values, label=impl, color=f"C{index}", linewidth=width)
    axes.set_title(f"Training, {title}")
    axes.set_ylabel(f"|loss − that of {_TORCH}|, nats a byte" if apart else "loss, nats a byte")
    axes.set_yscale("log" if differ else "linear")
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
