"""What floors and peers reached on published runs (`baselines.json`), and the check that a run is worth reading.

A run counts when its floors and peers are within 8 % of these figures, or faster: with a slow floor
or a peer called wrongly, a good ratio proves nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ..metrics import Metric, metric_named
from ..results import Results

TOLERANCE = 0.08
Figures = dict[tuple[str, str, str], float]  # (case, implementation, metric) → value


def _machines() -> list[tuple[str, int | None, Figures]]:
    """Part of a GPU's name, how many of them (None: any number), what was reached there."""
    document = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    found = []
    for machine in document["machines"]:
        figures = {
            (row["case"], impl, row["metric"]): value
            for row in machine["rows"]
            for impl, value in row["values"].items()
        }
        found.append((machine["gpu"], machine["count"], figures))
    return found


_MACHINES = _machines()
BASELINES = _MACHINES[0][2]


@dataclass(frozen=True)
class Check:
    """One floor or peer of a run beside its baseline."""

    case: str
    impl: str
    metric: Metric
    value: float
    baseline: float

    @property
    def speed(self) -> float:
        """The run's speed over the baseline's; below 1 it was slower."""
        return self.metric.speedup(self.value, self.baseline)

    @property
    def counts(self) -> bool:
        return self.speed >= 1 - TOLERANCE


def checks(results: Results) -> list[Check] | None:
    """Each row that has a baseline, or None for a machine that has no baselines."""
    gpu, size = str(results.meta["gpu"]), results.meta["count"]
    for name, count, figures in _MACHINES:
        if name in gpu and count in (None, size):
            return [
                Check(row.case, row.impl, metric_named(row.metric), float(row.value), figures[key])
                for row in results.rows
                if (key := (row.case, row.impl, row.metric)) in figures
            ]
    return None
