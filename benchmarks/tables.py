"""Markdown tables from a results file, and the comparison of two files.

Ratios are formed within a file only, as speed: above 1 ours is faster than that peer, whatever the
metric's direction. Where we lose, the ratio is bold. Errors and cases that were not measured are
listed with their reasons.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from .baselines import TOLERANCE, checks
from .cases import FLOORS, PURE_READ
from .metrics import METRICS, SPREAD_SUFFIX, TEXT_METRICS, Metric, metric_named
from .results import Results

Values = dict[str, dict[str, float]]  # case → impl → value


def values_of(results: Results, metric: str) -> Values:
    """What was measured of one metric, cases and implementations in the file's order."""
    found: Values = {}
    for row in results.rows:
        if row.metric == metric:
            found.setdefault(row.case, {})[row.impl] = float(row.value)
    return found


def ours(implementations: Iterable[str]) -> str | None:
    """What ratios are formed for: `fdattn`, else its strategy `auto`, else its first."""
    own = [name for name in implementations if name.split("/")[0] == "fdattn"]
    for wanted in ("fdattn", "fdattn/auto"):
        if wanted in own:
            return wanted
    return own[0] if own else None


def ratios(results: Results, metric: str) -> Values:
    """case → peer → how many times faster ours is than that peer."""
    quantity = metric_named(metric)
    found: Values = {}
    for case, by_impl in values_of(results, metric).items():
        own = ours(by_impl)
        if own is not None:
            found[case] = {
                impl: quantity.speedup(by_impl[own], value)
                for impl, value in by_impl.items()
                if impl != own
            }
    return found


def render(results: Results) -> str:
    """The whole file as Markdown."""
    parts = [_heading(results)]
    for metric in METRICS.values():
        values = values_of(results, metric.name)
        if values:
            parts.append(_metric_table(results, metric, values))
    parts += [_spreads(results), _baseline_table(results), _failures(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def render_summary(results: Results) -> str:
    """The speeds alone, one level of headings lower, for the README."""
    parts = [_heading(results)]
    for metric in METRICS.values():
        values = values_of(results, metric.name)
        if values and metric.higher is not None:
            parts.append("#" + _metric_table(results, metric, values))
    parts += [_baseline_table(results), _failures(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _heading(results: Results) -> str:
    meta = results.meta
    lines = [
        f"{meta['count']} × {meta['gpu']}, torch {meta['torch']}, triton {meta['triton']}, "
        f"commit {meta['commit']}, {meta['date']}",
        "",
        f"`{meta['command']}`",
        "",
        "(n×): how many times faster ours is than that one; **bold** where ours is slower.",
    ]
    if meta["gpu"] == "cpu":
        lines += ["", "**Measured on a CPU: shows that the machinery runs, is not a result.**"]
    return "\n".join(lines)


def _metric_table(results: Results, metric: Metric, values: Values) -> str:
    implementations = in_order(name for by_impl in values.values() for name in by_impl)
    rows = []
    for case, by_impl in values.items():
        own = ours(by_impl)
        cells = []
        for impl in implementations:
            value = by_impl.get(impl)
            if value is None:
                cells.append("–")
                continue
            cell = metric.format(value)
            if metric.higher is not None and own is not None and impl != own:
                ratio = metric.speedup(by_impl[own], value)
                cell += f" ({_ratio(ratio)})" if ratio >= 1 else f" (**{_ratio(ratio)}**)"
            if metric.name == "graph_us" and PURE_READ in by_impl and impl != PURE_READ:
                cell += f", {100 * by_impl[PURE_READ] / value:.0f} %"
            cells.append(cell)
        rows.append([case, *cells])
    note = "; %: of the pure read's speed" if metric.name == "graph_us" else ""
    return f"### {metric.title}{note}\n\n" + _table(["case", *implementations], rows)


def _spreads(results: Results) -> str:
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
                f"- {metric}: spread over repeats {middle:.1f} % in the middle, "
                f"{largest:.1f} % at most ({case}, {impl})"
            )
    return "\n".join(lines)


def _baseline_table(results: Results) -> str:
    found = checks(results)
    if found is None:
        return "" if results.meta["gpu"] == "cpu" else "No baselines for this GPU."
    if not found:
        return "No floor or peer of this run has a baseline."
    slow = [check for check in found if not check.counts]
    limit = f"{100 * TOLERANCE:.0f} %"
    if not slow:
        return f"This run counts: {len(found)} floors and peers within {limit} of baseline."
    rows = []
    for check in slow:
        figures = (check.metric.format(value) for value in (check.value, check.baseline))
        rows.append([check.case, check.impl, check.metric.name, *figures, _ratio(check.speed)])
    head = f"### {len(slow)} of {len(found)} floors and peers over {limit} slower than baseline"
    advice = "Their cases do not count."
    columns = ["case", "impl", "metric", "here", "baseline", "speed"]
    return f"{head}\n\n{advice}\n\n" + _table(columns, rows)


def _failures(results: Results) -> str:
    rows = [
        [row.case, row.impl, row.metric.replace("_", " "), str(row.value).replace("|", "\\|")]
        for row in results.rows
        if row.metric in TEXT_METRICS
    ]
    if not rows:
        return ""
    return "### Without a figure\n\n" + _table(["case", "impl", "what", "why"], rows)


def compare(before: Results, after: Results) -> str:
    """Two runs side by side; `change` is after's speed over before's.

    Machines drift by several percent, so the change of floors and peers in the same case stands
    beside ours: what is left when it is divided out is the change that our code made.
    """
    lines = [
        f"{label}: {r.meta['count']} × {r.meta['gpu']}, torch {r.meta['torch']}, "
        f"triton {r.meta['triton']}, commit {r.meta['commit']}, {r.meta['date']}"
        for label, r in (("a", before), ("b", after))
    ]
    if any(before.meta[key] != after.meta[key] for key in ("gpu", "count")):
        lines.append("**Different machines: only the net changes mean anything.**")
    rows = []
    for metric in METRICS.values():
        if metric.higher is None:
            continue
        old, new = values_of(before, metric.name), values_of(after, metric.name)
        for case in old:
            shared = [impl for impl in old[case] if impl in new.get(case, {})]
            changes = {i: metric.speedup(new[case][i], old[case][i]) for i in shared}
            others = [changes[impl] for impl in shared if impl.split("/")[0] != "fdattn"]
            drift = statistics.median(others) if others else None
            for impl in shared:
                if impl.split("/")[0] == "fdattn":
                    net = _ratio(changes[impl] / drift) if drift else "–"
                    rows.append(
                        [case, impl, metric.name, metric.format(old[case][impl]),
                         metric.format(new[case][impl]), _ratio(changes[impl]),
                         _ratio(drift) if drift else "–", net]
                    )  # fmt: skip
    if not rows:
        return "\n\n".join([*lines, "No figure of ours is in both files."]) + "\n"
    columns = ["case", "impl", "metric", "a", "b", "change", "floors and peers", "net"]
    return "\n\n".join([*lines, _table(columns, rows)]) + "\n"


def _ratio(value: float) -> str:
    return f"{value:.2f}×"


def in_order(names: Iterable[str]) -> list[str]:
    """Ours first, floors last, the rest as they come."""
    unique = list(dict.fromkeys(names))
    return sorted(unique, key=lambda n: (n.split("/")[0] != "fdattn", n in FLOORS))


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
