"""Two results files side by side, and whether the second is a regression.

Machines drift by several percent, so the change of floors and peers in the same case stands beside
ours: what is left when it is divided out is the change that our code made. Figures of ours that the
second file lacks are listed: a call that fails now must not look like no news.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass

from ..metrics import METRICS, Metric
from ..results import Results
from .tables import in_order, is_ours, markdown_table, ratio_text, values_of


@dataclass(frozen=True)
class Change:
    """One figure of both files; changes are speeds, b's over a's, above 1 is faster."""

    case: str
    impl: str
    metric: Metric
    before: float
    after: float
    drift: float | None  # the median change of the case's floors and peers

    @property
    def change(self) -> float:
        return self.metric.speedup(self.after, self.before)

    @property
    def net(self) -> float:
        """Without the machine's drift, where the case has a floor or peer to tell it."""
        return self.change / self.drift if self.drift else self.change


@dataclass(frozen=True)
class Comparison:
    before: Results
    after: Results
    changes: tuple[Change, ...]
    lost: tuple[tuple[str, str, str, str], ...]  # case, impl, metric, why: ours of a, not in b

    def regressions(self, percent: float) -> list[Change]:
        """Ours that became slower by more than `percent`, drift divided out."""
        return [c for c in self.changes if is_ours(c.impl) and c.net < 1 - percent / 100]

    @property
    def failures(self) -> list[tuple[str, str, str, str]]:
        """Of the lost ones, those that b tried and that failed there."""
        return [row for row in self.lost if row[3].startswith("error: ")]

    def render(self, percent: float | None = None) -> str:
        """Markdown; with `percent`, regressions beyond it are bold and counted at the end."""
        parts = [
            f"{label}: {r.meta['count']} × {r.meta['gpu']}, torch {r.meta['torch']}, "
            f"triton {r.meta['triton']}, commit {r.meta['commit']}, {r.meta['date']}"
            for label, r in (("a", self.before), ("b", self.after))
        ]
        if any(self.before.meta[key] != self.after.meta[key] for key in ("gpu", "count")):
            parts.append("**Different machines: only the net changes mean anything.**")
        slower = self.regressions(percent) if percent is not None else []
        if any(is_ours(change.impl) for change in self.changes):
            columns = ["case", "impl", "metric", "a", "b", "change", "floors and peers", "net"]
            parts.append(markdown_table(columns, [_row(c, c in slower) for c in self.changes]))
        else:
            parts.append("No figure of ours is in both files.")
        if self.lost:
            columns = ["case", "impl", "metric", "in b"]
            parts.append("### Ours in a, without a figure in b")
            parts.append(markdown_table(columns, self.lost))
        if percent is not None:
            text = f"{len(slower)} of ours slower by more than {percent:g} %"
            parts.append(f"{text}, {len(self.failures)} fail in b.")
        return "\n\n".join(parts) + "\n"


def compare(before: Results, after: Results, metrics: Collection[str] | None = None) -> Comparison:
    """Every speed that both files hold, of `metrics` alone where given."""
    unknown = [name for name in metrics or () if name not in METRICS]
    if unknown:
        raise ValueError(f"--metrics must be of {', '.join(METRICS)}, got {', '.join(unknown)}")
    chosen = [
        metric
        for metric in METRICS.values()
        if metric.higher is not None and (metrics is None or metric.name in metrics)
    ]
    changes: list[Change] = []
    lost: list[tuple[str, str, str, str]] = []
    for metric in chosen:
        old, new = values_of(before, metric.name), values_of(after, metric.name)
        for case, by_impl in old.items():
            found = new.get(case, {})
            shared = in_order(impl for impl in by_impl if impl in found)
            speeds = {impl: metric.speedup(found[impl], by_impl[impl]) for impl in shared}
            others = [speed for impl, speed in speeds.items() if not is_ours(impl)]
            drift = statistics.median(others) if others else None
            changes += [
                Change(case, impl, metric, by_impl[impl], found[impl], drift) for impl in shared
            ]
            lost += [
                (case, impl, metric.name, _reason(after, case, impl))
                for impl in by_impl
                if is_ours(impl) and impl not in found
            ]
    return Comparison(before, after, tuple(changes), tuple(lost))


def _row(change: Change, slower: bool) -> list[str]:
    own = is_ours(change.impl)
    drift = ratio_text(change.drift) if own and change.drift else "–"
    net = ratio_text(change.net) if own and change.drift else "–"
    speed = ratio_text(change.change)
    if slower:
        net, speed = (f"**{x}**" if x != "–" else x for x in (net, speed))
    figures = (change.metric.format(value) for value in (change.before, change.after))
    return [change.case, change.impl, change.metric.name, *figures, speed, drift, net]


def _reason(results: Results, case: str, impl: str) -> str:
    """Why an implementation has no figure: its own words, or that nobody asked."""
    for row in results.rows:
        if (row.case, row.impl) == (case, impl) and isinstance(row.value, str):
            return f"{row.metric.replace('_', ' ')}: {row.value}".replace("|", "\\|")
    return "not asked for"
