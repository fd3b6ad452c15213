"""What must hold on eight GPUs of one host, judged by the results files of a suite's folder."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ..results import Results, newest
from .tables import is_ours, markdown_table, values_of

#: Parts of cases → at most so much of the time of the best stock way of the same run.
DECODE = {"N32768": 0.5, "N131072": 0.6, "N1048576": 0.9}
#: At least so many times as fast as NCCL's collective beside the product; as torch's context_parallel.
MATMULS, RING = 1.2, 1.0
#: At most so many times as long as the best of our strategies.
AUTO = 1.03


class Bar(NamedTuple):
    """A ratio and its limit; upper: that it may not be above, else not below."""

    case: str
    what: str
    ratio: float
    limit: float
    upper: bool

    @property
    def holds(self) -> bool:
        return self.ratio <= self.limit if self.upper else self.ratio >= self.limit


def judged(runs: Iterable[Results]) -> Iterator[Bar]:
    """A bar for each ratio that the runs have."""
    for run in runs:
        for case, times in values_of(run, "graph_us").items():
            yield from _decode_bars(case, times)
            yield from _matmul_bars(case, times)
        for case, times in values_of(run, "latency_ms").items():
            if case.startswith("ring") and "torch_cp" in times:
                ours = _best(times)
                yield Bar(case, "context_parallel / ours", times["torch_cp"] / ours, RING, False)


def _decode_bars(case: str, times: Mapping[str, float]) -> Iterator[Bar]:
    if "fdattn/auto" not in times or "ranks" in case:
        return
    yield Bar(case, "auto / best of ours", times["fdattn/auto"] / _best(times), AUTO, True)
    limit = next((x for part, x in DECODE.items() if case.startswith("B1 ") and part in case), None)
    if limit is not None and "nccl" in times:
        yield Bar(case, "ours / stock", times["fdattn/auto"] / times["nccl"], limit, True)


def _matmul_bars(case: str, times: Mapping[str, float]) -> Iterator[Bar]:
    auto = times.get("fdattn/ag_rs")
    if auto is None or not case.startswith(("ag_gemm", "gemm_rs")):
        return
    yield Bar(case, "auto / best of ours", auto / _best(times), AUTO, True)
    if "eager" in times:
        yield Bar(case, "NCCL / ours", times["eager"] / auto, MATMULS, False)


def _best(times: Mapping[str, float]) -> float:
    return min((us for name, us in times.items() if is_ours(name)), default=math.nan)


def table(folder: Path) -> str:
    """The bars as Markdown, what does not hold in bold; empty where no run has one."""
    runs = (Results.load(path) for path in newest(folder))
    lines = []
    for bar in judged(runs):
        limit = f"{'at most' if bar.upper else 'at least'} {bar.limit:g}"
        ratio = f"{bar.ratio:.2f}" if bar.holds else f"**{bar.ratio:.2f}**"
        lines.append([bar.case, bar.what, ratio, limit])
    return markdown_table(["case", "ratio", "measured", "bar"], lines) if lines else ""
