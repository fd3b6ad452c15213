"""The figure of docs/notes/scaling.md: what was measured over GPUs, the model's line, and dashed what it predicts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..metrics import METRICS
from ..results import RESULTS_DIR
from .plot import new_figure, save
from .scaling import HOST, RACK, Curve, Measured, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PATH = RESULTS_DIR / "scaling.svg"
_CAPTION = (
    "Points: measured (hollow: at another commit than the line). Lines: the model of benchmarks/report/scaling.py; where no "
    "point stands nothing was measured.\nDashed, beyond 8 GPUs: a prediction, as if 72 GPUs were one host. "
)


def draw(path: str | Path = PATH, folder: Path = RESULTS_DIR) -> Path:
    """Writes the figure in the format of the path's suffix.

    Raises:
        RuntimeError: matplotlib is missing.
        ValueError: the folder lacks a run that a constant of the model is from.
    """
    measured = Measured(folder)
    try:
        subjects = panels(measured)
    except KeyError as missing:
        raise ValueError(f"folder must hold the runs that the model's constants are from, got none for {missing}") from None  # fmt: skip
    figure = new_figure((15, 5.2))
    for axes, (title, curves) in zip(figure.subplots(1, len(subjects)), subjects.items(), strict=True):  # fmt: skip
        _panel(axes, title, [curve for curve in curves if curve.drawn])
    figure.supxlabel(_CAPTION + runs_of(measured), fontsize=8)
    return save(figure, path)


def runs_of(measured: Measured) -> str:
    """What the caption says of the files it is made from."""
    dates = sorted(measured.sources.values())
    return f"{len(dates)} runs, {dates[0]} to {dates[-1]}."


def _panel(axes: Axes, title: str, curves: list[Curve]) -> None:
    colours: dict[str, str] = {}
    for curve in curves:
        case = curve.name.split(", commit")[0]
        colour = colours.setdefault(case, f"C{len(colours)}")
        points = {gpus: us / curve.us for gpus, us in curve.measured.items()}
        lines = curve.largest > 0
        axes.plot(
            list(points), list(points.values()), linestyle="", marker="o", color=colour,
            markerfacecolor=colour if lines else "none", label=None if lines else curve.name,
        )  # fmt: skip
        if lines:
            _line(axes, curve, HOST, colour, "-", curve.name)
            _line(axes, curve, (HOST[-1], *RACK), colour, "--")
    gpus = [n for n in (*HOST, *RACK) if n != 72]
    axes.axvline(HOST[-1], color="grey", linewidth=0.6)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(gpus, [str(n) for n in gpus])
    axes.minorticks_off()
    axes.set_xlabel("GPUs")
    axes.set_ylabel(METRICS[curves[0].metric].title)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.set_ylim(top=4 * axes.get_ylim()[1])  # space for the legend
    axes.legend(fontsize=7, loc="upper right")


def _line(axes: Axes, curve: Curve, gpus, colour: str, style: str, label: str | None = None) -> None:  # fmt: skip
    inside = [n for n in gpus if n <= curve.largest]
    times = [curve.predict(n) / curve.us for n in inside]
    axes.plot(inside, times, color=colour, linestyle=style, linewidth=1.3, label=label)
