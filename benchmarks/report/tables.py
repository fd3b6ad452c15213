"""Tables from a results file, as Markdown; html_page.py shows the same cells.

Ratios are formed within a file only, as speed: above 1 ours is faster than that peer, whatever the
metric's direction. The ratio to a peer that is faster than ours is bold; a tie at two digits, a floor and
another of ours never are. Decode times have the percentage of the pure read's speed beside them. Errors and cases that were not measured are listed with their reasons.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..metrics import METRICS, SPREAD_SUFFIX, TEXT_METRICS, Metric, metric_named
from ..results import NO_GPU, Results
from ..shapes import FLOORS, PURE_READ
from .baselines import TOLERANCE, checks

ON_A_CPU = "Measured on a CPU: shows that the machinery runs, is not a result."
Values = dict[str, dict[str, float]]  # case → impl → value
PERCENT = "%"
#: Ours in fp8: what fp8 peers are compared with; `fdattn` of the same file, in bf16, is another of ours.
FP8 = "fdattn/fp8"
#: Errors that the published tables have beside the speeds.
PUBLISHED_ERRORS = ("rel_err",)
#: Ours without lengths, and the peers that know none: these are compared with the same call.
FULL, KNOW_NO_LENGTHS = "fdattn/full", ("cudnn", "fa2")
RATIO_NOTE = "(n×): how many times faster ours is than that one; **bold** where a peer is faster than ours (ties and floors are not bold)."
FP8_NOTE = f"Ours is `{FP8}` here; `fdattn`, in bf16, is another of ours. Errors in fp8 are of the quantised inputs."
FULL_NOTE = f"`{FULL}` is given no lengths; {' and '.join(KNOW_NO_LENGTHS)}, which know none, are compared with it."


def values_of(results: Results, metric: str) -> Values:
    """What was measured of one metric, cases and implementations in the file's order."""
    found: Values = {}
    for row in results.rows:
        if row.metric == metric:
            found.setdefault(row.case, {})[row.impl] = float(row.value)
    return found


def ours(implementations: Iterable[str]) -> str | None:
    """What ratios are formed for: fp8's `fdattn/fp8`, else `fdattn`, else its strategy `auto`, else its first."""
    own = [name for name in implementations if is_ours(name) and name != FULL]
    for name in (FP8, "fdattn", "fdattn/auto"):
        if name in own:
            return name
    return own[0] if own else None


def opposite(impl: str, by_impl: Iterable[str]) -> str | None:
    """Which of ours an implementation is compared with; None for ours itself."""
    own = FULL if impl in KNOW_NO_LENGTHS and FULL in by_impl else ours(by_impl)
    return None if impl in (own, FULL) else own


def ratios(results: Results, metric: str) -> Values:
    """case → peer → how many times faster ours is than that peer."""
    quantity = metric_named(metric)
    found: Values = {}
    for case, by_impl in values_of(results, metric).items():
        pairs = {impl: opposite(impl, by_impl) for impl in by_impl}
        if any(pairs.values()):
            found[case] = {
                impl: quantity.speedup(by_impl[own], by_impl[impl])
                for impl, own in pairs.items()
                if own is not None
            }
    return found


def peer_ratios(results: Results, metric: str) -> Values:
    """The ratios to peers alone: floors are faster by definition, and others of ours are no peers."""
    return {
        case: {x: ratio for x, ratio in by_impl.items() if x not in FLOORS and not is_ours(x)}
        for case, by_impl in ratios(results, metric).items()
    }


@dataclass(frozen=True)
class Table:
    """A table below its title; `note` stands between them."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    note: str = ""
    level: int = 3

    @property
    def markdown(self) -> str:
        rows = [
            [x.markdown if isinstance(x, Cell) else x.replace("|", "\\|") for x in row]
            for row in self.rows
        ]
        parts = [f"{'#' * self.level} {self.title}", self.note, markdown_table(self.columns, rows)]
        return "\n\n".join(part for part in parts if part)


def sections(results: Results, speeds_only: bool = False) -> Iterator[str | Table]:
    """What there is to say of a file: every metric, spreads, the check against baselines, what has no figure."""
    for metric in METRICS.values():
        values = values_of(results, metric.name)
        published = metric.higher is not None or metric.name in PUBLISHED_ERRORS
        if values and (published or not speeds_only):
            columns, cells = metric_cells(metric, values)
            rows = [[case, *found] for case, found in cells]
            level = 4 if speeds_only else 3
            yield Table(table_title(metric, columns), columns, rows, level=level)
    if not speeds_only:
        yield "\n".join(f"- {line}" for line in spread_lines(results))
    yield baseline_section(results)
    yield failures(results)


def render(results: Results) -> str:
    """The whole file as Markdown."""
    return join(heading(results), *sections(results))


def render_summary(results: Results) -> str:
    """The speeds, and errors of PUBLISHED_ERRORS, one level of headings lower, for docs/performance.md."""
    return join(heading(results), *sections(results, speeds_only=True))


def join(*parts: str | Table) -> str:
    texts = (part.markdown if isinstance(part, Table) else part for part in parts)
    return "\n\n".join(text for text in texts if text) + "\n"


def heading(results: Results, note: str = RATIO_NOTE) -> str:
    """What the run was, and how to read what follows."""
    meta = results.meta
    where = "Compiled only" if meta["gpu"] == NO_GPU else machine_of(results)
    lines = [f"{where}, {versions_of(results)}", "", f"`{meta['command']}`"]
    if note and any(row.impl == FULL for row in results.rows):
        note = f"{note} {FULL_NOTE}"
    if note and any(row.impl == FP8 for row in results.rows):
        note = f"{note} {FP8_NOTE}"
    lines += ["", note] if note else []
    lines += ["", f"**{ON_A_CPU}**"] if meta["gpu"] == "cpu" else []
    return "\n".join(lines)


def machine_of(results: Results) -> str:
    return "{count} × {gpu}".format(**results.meta)


def versions_of(results: Results) -> str:
    return "torch {torch}, triton {triton}, commit {commit}, {date}".format(**results.meta)


def table_title(metric: Metric, columns: Sequence[str]) -> str:
    return metric.title + ("; %: of the pure read's speed" if PERCENT in columns else "")


@dataclass(frozen=True)
class Cell:
    """A figure, and how many times faster ours is than it; loses: ours is behind a peer here."""

    text: str
    ratio: float | None = None
    loses: bool = False

    @property
    def markdown(self) -> str:
        if self.ratio is None:
            return self.text
        ratio = ratio_text(self.ratio)
        return f"{self.text} (**{ratio}**)" if self.loses else f"{self.text} ({ratio})"


def metric_cells(metric: Metric, values: Values) -> tuple[list[str], list[tuple[str, list[Cell]]]]:
    """(columns, lines of (case, cells)); a time has the percentage of the pure read's speed behind it."""
    implementations = in_order(name for by_impl in values.values() for name in by_impl)
    floor = metric.name == "graph_us" and PURE_READ in implementations
    columns = ["case"]
    for impl in implementations:
        columns += [impl, PERCENT] if floor and impl != PURE_READ else [impl]
    lines = []
    for case, by_impl in values.items():
        cells = []
        for impl in implementations:
            value = by_impl.get(impl)
            cells.append(_cell(metric, by_impl, impl))
            if floor and impl != PURE_READ:
                known = value is not None and PURE_READ in by_impl
                cells.append(Cell(f"{100 * by_impl[PURE_READ] / value:.0f}" if known else "–"))
        lines.append((case, cells))
    return columns, lines


def _cell(metric: Metric, by_impl: dict[str, float], impl: str) -> Cell:
    value = by_impl.get(impl)
    if value is None:
        return Cell("–")
    text = metric.format(value)
    if metric.higher is None or ours(by_impl) is None:
        return Cell(text)
    own = opposite(impl, by_impl)
    if own is None:
        peers = [
            other
            for name, other in by_impl.items()
            if not is_ours(name) and name not in FLOORS and opposite(name, by_impl) == impl
        ]
        return Cell(text, loses=any(is_loss(metric.speedup(value, other)) for other in peers))
    ratio = metric.speedup(by_impl[own], value)
    return Cell(text, ratio, loses=is_loss(ratio) and impl not in FLOORS and not is_ours(impl))


def spread_lines(results: Results) -> list[str]:
    """One line per metric: the largest and the median spread over repeats."""
    lines = []
    for metric in METRICS:
        name = metric + SPREAD_SUFFIX
        spread = [
            (float(row.value), row.case, row.impl) for row in results.rows if row.metric == name
        ]
        if spread:
            largest, case, impl = max(spread)
            middle = statistics.median(value for value, _, _ in spread)
            lines.append(
                f"{metric}: spread over repeats {middle:.1f} % in the middle, "
                f"{largest:.1f} % at most ({case}, {impl})"
            )
    return lines


def baseline_section(results: Results) -> str | Table:
    found = checks(results)
    if found is None:
        return "" if results.meta["gpu"] in ("cpu", NO_GPU) else "No baselines for this GPU."
    if not found:
        return "No floor or peer of this run has a baseline."
    slow = [check for check in found if not check.counts]
    limit = f"{100 * TOLERANCE:.0f} %"
    if not slow:
        return f"This run counts: {len(found)} floors and peers within {limit} of baseline."
    rows = []
    for check in slow:
        figures = (check.metric.format(value) for value in (check.value, check.baseline))
        rows.append([check.case, check.impl, check.metric.name, *figures, ratio_text(check.speed)])
    title = f"{len(slow)} of {len(found)} floors and peers over {limit} slower than baseline"
    columns = ["case", "impl", "metric", "here", "baseline", "speed"]
    return Table(title, columns, rows, "Their cases do not count.")


def failures(results: Results) -> str | Table:
    """What was asked for and has no figure, with the reasons."""
    rows = failure_rows(results)
    return Table("Without a figure", ["case", "impl", "what", "why"], rows) if rows else ""


def failure_rows(results: Results) -> list[list[str]]:
    """(cases, implementation, what, why): cases with the same reason in one row."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in results.rows:
        if row.metric in TEXT_METRICS:
            key = row.impl, row.metric.replace("_", " "), str(row.value)
            found.setdefault(key, []).append(row.case)
    total = len({row.case for row in results.rows})

    def named(cases: list[str]) -> str:
        if len(set(cases)) == total > 1:
            return f"all {total}"
        return (
            ", ".join(cases) if len(cases) <= 3 else f"{len(set(cases))} of {total}, as {cases[0]}"
        )

    return [[named(cases), *key] for key, cases in found.items()]


def ratio_text(value: float) -> str:
    return f"{value:.2f}×"


def is_loss(ratio: float) -> bool:
    """Whether ours is slower, as far as `ratio_text` shows it: 1.00 is a tie."""
    return round(ratio, 2) < 1


def is_ours(impl: str) -> bool:
    return impl.split("/")[0] == "fdattn"


def in_order(names: Iterable[str]) -> list[str]:
    """Ours first, floors last, the rest as they come."""
    return sorted(dict.fromkeys(names), key=lambda n: (not is_ours(n), n in FLOORS))


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
