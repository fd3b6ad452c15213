"""The ladder's tables, made from a results file; and the results section of this folder's README."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.metrics import metric_named
from benchmarks.report import documents
from benchmarks.results import RESULTS_DIR, Results

from . import RUNGS

README = Path(__file__).resolve().parent / "README.md"
COPIED = "/contiguous"  # behind a rung's name: K and V copied before each call

# Heading, kind of case, metrics of which a file has one. `graph_us` on a GPU, `eager_us` on a CPU.
_COLUMNS = (
    ("first call, ms", "prefill", ("first_call_ms",)),
    ("prefill, ms", "prefill", ("latency_ms",)),
    ("decode, ms/token", "decode", ("latency_ms",)),
    ("prefill attention, TFLOP/s", "prefill", ("fwd_TFLOPs",)),
    ("decode attention, µs", "decode", ("graph_us", "eager_us")),
    ("error, prefill", "prefill", ("max_abs_err",)),
    ("error, decode", "decode", ("max_abs_err",)),
)


def tables(results: Results) -> str:
    """The ladder, and below it, where it was measured, slices against copies."""
    parts = [_ladder(results)]
    if any(row.impl.endswith(COPIED) for row in results.rows):
        parts.append(_strides(results))
    parts += [f"- {row.impl}: {row.value}" for row in results.rows if row.metric == "error"]
    return "\n\n".join(parts)


def _ladder(results: Results) -> str:
    rungs = [rung for rung in RUNGS if any(row.impl == rung for row in results.rows)]
    lines = []
    for below, rung in zip([None, *rungs], rungs, strict=False):
        cells = [rung]
        for _, kind, metrics in _COLUMNS:
            value, metric = _value(results, rung, kind, metrics)
            cells.append("–" if value is None else metric.format(value))
            before = below and _value(results, below, kind, metrics)[0]
            if value and before and metric.higher is not None and results.meta["gpu"] != "cpu":
                cells[-1] += f" ({metric.speedup(value, before):.2f}×)"
        lines.append(cells)
    note = "(n×): how many times as fast as the row above. Error: the largest against fp64."
    return _table(["kernel", *(heading for heading, _, _ in _COLUMNS)], lines) + f"\n\n{note}"


def _strides(results: Results) -> str:
    """Each rung on the slices as they are, and on copies made in every call."""
    columns = _COLUMNS[1:5]
    lines = []
    for rung in RUNGS:
        cells = [rung]
        for _, kind, metrics in columns:
            sliced, metric = _value(results, rung, kind, metrics)
            copied, _ = _value(results, rung + COPIED, kind, metrics)
            if sliced and copied:
                ratio = metric.speedup(sliced, copied)
                cells.append(f"{metric.format(sliced)} : {metric.format(copied)} ({ratio:.2f}×)")
        if len(cells) > 1:
            lines.append(cells)
    note = (
        "As they are : copied first, the copy included. (n×): how many times as fast as they are."
    )
    return _table(["kernel", *(heading for heading, _, _ in columns)], lines) + f"\n\n{note}"


def _value(results: Results, impl: str, kind: str, metrics: Sequence[str]):
    for row in results.rows:
        if row.impl == impl and row.metric in metrics and kind in row.case.split():
            return float(row.value), metric_named(row.metric)
    return None, None


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def heading(results: Results) -> str:
    meta = results.meta
    cases = list(dict.fromkeys(row.case for row in results.rows))
    return (
        f"{meta['gpu']}, torch {meta['torch']}, triton {meta['triton']}, commit {meta['commit']}, "
        f"{meta['date']}: `{meta['command']}` ({'; '.join(cases)})"
    )


def updated(text: str, folder: Path = RESULTS_DIR) -> str:
    """The README's text with its results section made anew from the newest `--kernel all` runs."""
    parts = []
    for name in ("ladder", "ladder-contiguous"):
        if files := sorted(folder.glob(f"*_{name}.json")):
            results = Results.load(files[-1])
            link = f"From [`{files[-1].name}`](../../benchmarks/results/{files[-1].name})."
            parts.append(f"{heading(results)}\n\n{tables(results)}\n\n{link}\n")
    section = "\n".join(parts) or "Not measured on a GPU yet.\n"
    return documents.updated(text, "results", section)
