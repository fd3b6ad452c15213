"""Tables of runs over ranks: in one line a test torch's time, ours, the speed-up."""

from __future__ import annotations

from collections.abc import Mapping

from ..metrics import METRICS
from ..results import Results
from ..shapes import FLOORS
from .tables import (
    Table,
    failures,
    is_loss,
    is_ours,
    join,
    markdown_table,
    metric_cells,
    ours,
    values_of,
)

TORCH = "eager"
IN_GRAPH = "_graph"  # at the end of a peer's name: the same in a CUDA graph
#: Whom a test is compared with: the first of these that it measured. Ring attention has no eager form.
PEERS = (TORCH, "torch_cp", "single_device")
HEAD = ["| test | parameters | torch | ours | speed-up |", "| --- | --- | --- | --- | --- |"]


def lines_of(results: Results, every: bool = False) -> list[str]:
    """One Markdown row for each test that has both times; tokens/s beside the time where measured.

    `every`: a row for each of ours and of the others, not for the first ones alone, of ours what chooses by itself where
    that was measured.
    """
    lines = []
    rates = values_of(results, "tokens_per_s")
    for case, times in values_of(results, "latency_ms").items():
        peer = next((name for name in PEERS if name in times), None)
        chooses = (name for name in times if is_ours(name) and name.endswith("-auto"))
        own, others = [next(chooses, ours(times))], [peer]
        if every:
            own = [name for name in times if is_ours(name)]
            others += [x for x in times if not is_ours(x) and x not in (peer, *FLOORS)]
        lines += [
            _line(case, other, name, times, rates.get(case, {}))
            for other in others
            for name in own
            if other and name
        ]
    return lines


def _line(
    case: str, peer: str, own: str, times: Mapping[str, float], rates: Mapping[str, float]
) -> str:
    metric, tokens = METRICS["latency_ms"], METRICS["tokens_per_s"]
    test, _, parameters = case.partition(" ")
    cells = []
    for impl in (peer, own):
        cell = f"{metric.format(times[impl])} ms"
        if impl in rates:
            cell += f", {tokens.format(rates[impl])} tokens/s"
        cells.append(cell)
    speedup = metric.speedup(times[own], times[peer])
    ratio = f"**{speedup:.2f}×**" if is_loss(speedup) else f"{speedup:.2f}×"
    compared = "" if peer == TORCH else f" ({peer})"
    strategy = own.partition("/")[2]
    return f"| {f'{test} {strategy}'.rstrip()} | {parameters}{compared} | {cells[0]} | {cells[1]} | {ratio} |"


def table(results: Results) -> str:
    """Markdown, with times in CUDA graphs and what failed; empty where no test has both times."""
    lines = lines_of(results, every=True)
    if not lines:
        return ""
    parts: list[str | Table] = ["\n".join([*HEAD, *lines])]
    if in_graphs := values_of(results, "graph_us"):
        columns, rows = metric_cells(METRICS["graph_us"], in_graphs)
        cells = [[case, *(cell.markdown for cell in found)] for case, found in rows]
        parts.append("µs in a CUDA graph:\n\n" + markdown_table(columns, cells))
    return join(*parts, failures(results))
