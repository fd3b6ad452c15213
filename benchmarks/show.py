"""The commands that show results files: table, html, compare, plot, scaling, readme. They need no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from .registry import BENCHMARKS, SWEEP, cases_of
from .report.compare import compare
from .report.tables import render
from .results import ROOT, Results


def add_commands(names) -> None:
    """Adds the parsers to argparse's subparsers `names`."""
    command = _command(names, "list", "the cases of a benchmark", _list)
    command.add_argument("benchmark", choices=sorted(x for x in BENCHMARKS if BENCHMARKS[x].cases))
    command.add_argument(SWEEP.flag, **SWEEP.keywords)

    command = _command(names, "table", "a results file as Markdown", _table)
    command.add_argument("file")

    command = _command(names, "html", "a results file as one HTML page", _html)
    command.add_argument("file")
    command.add_argument("--output", "-o", metavar="FILE", help="default: beside the file, .html")

    command = _command(names, "compare", "two results files side by side", _compare)
    command.add_argument("before", metavar="A.json")
    command.add_argument("after", metavar="B.json")
    command.add_argument(
        "--threshold", type=float, metavar="PERCENT",
        help="exit 1 where ours is slower by more, the machine's drift divided out, or fails in B",
    )  # fmt: skip
    command.add_argument("--metrics", metavar="A,B", help="only these, e.g. graph_us,host_us")

    command = _command(names, "plot", "a results file as a plot (needs matplotlib)", _plot)
    command.add_argument("file")
    command.add_argument("--output", "-o", metavar="FILE", help="default: beside the file, .svg")
    command.add_argument(
        "--axis", metavar="NAME", help="of a decode sweep: length (default), batch, gqa, dim, …"
    )

    command = _command(
        names, "scaling", "the figure of times over GPUs, measured and by a model", _scaling
    )
    command.add_argument("--output", "-o", metavar="FILE", help="default: benchmarks/results/scaling.svg")  # fmt: skip

    command = _command(
        names,
        "readme",
        "the generated tables of README.md, docs/performance.md and docs/notes/scaling.md, from the newest files",
        _readme,
    )
    command.add_argument("--check", action="store_true", help="only say whether it is up to date")


def _command(
    names, name: str, text: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    command = names.add_parser(name, help=text)
    command.set_defaults(run=lambda options, _: run(options))
    return command


def _list(options: argparse.Namespace) -> int:
    cases = cases_of(options, options.benchmark)
    return _say("".join(f"{case.name:56}{case.label}\n" for case in cases))


def _table(options: argparse.Namespace) -> int:
    return _say(render(Results.load(options.file)))


def _html(options: argparse.Namespace) -> int:
    from .report.html_page import write_html

    output = options.output or Path(options.file).with_suffix(".html")
    return _say(f"Written to {write_html(Results.load(options.file), output)}\n")


def _compare(options: argparse.Namespace) -> int:
    if options.threshold is not None and not options.threshold >= 0:
        raise ValueError(f"--threshold must be 0 or more percent, got {options.threshold:g}")
    metrics = None
    if options.metrics is not None:
        metrics = [word.strip() for word in options.metrics.split(",")]
    found = compare(Results.load(options.before), Results.load(options.after), metrics)
    _say(found.render(options.threshold))
    if options.threshold is None:
        return 0
    return int(bool(found.regressions(options.threshold) or found.failures))


def _plot(options: argparse.Namespace) -> int:
    from .report.plot import plot

    output = options.output or Path(options.file).with_suffix(".svg")
    try:
        written = plot(Results.load(options.file), output, options.axis)
    except RuntimeError as failure:
        raise ValueError(str(failure)) from failure
    return _say(f"Written to {written}\n")


def _scaling(options: argparse.Namespace) -> int:
    from .report.scaling_figure import PATH, draw

    try:
        written = draw(options.output or PATH)
    except RuntimeError as failure:
        raise ValueError(str(failure)) from failure
    return _say(f"Written to {written}\n")


def _readme(options: argparse.Namespace) -> int:
    from .report import documents as readme

    stale = False
    for path, updated in readme.documents().items():
        text = path.read_text(encoding="utf-8")
        new = updated(text)
        stale |= new != text
        if not options.check:
            path.write_text(new, encoding="utf-8")
        else:
            name = path.relative_to(ROOT)
            _say(f"{name} {'is up to date' if new == text else 'has stale results'}\n")
    return int(options.check and stale)


def _say(text: str) -> int:
    sys.stdout.write(text)
    return 0
