"""Tables of runs over ranks: in one line a test torch's time, ours, the speed-up; and of sharded decode."""

from __future__ import annotations

from collections.abc import Mapping

from ..metrics import METRICS
from ..results import Results
from ..shapes import FLOORS, LOCAL
from .tables import (
    Table,
    baseline_section,
    failures,
    heading,
    in_order,
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


#: Whom sharded decode is compared with, the first that was measured: the best stock way.
STOCK = ("nccl", "gloo")
_TIMES = ("graph_us", "eager_us")
_NOTE = (
    "In the first column of times, +local: what it adds to our decode of the shard alone, µs; "
    "×stock: its time over that of the stock way (nccl, or gloo on a CPU)."
)


def sharded_decode_table(results: Results) -> str:
    """A row for each way to compute a case, ordered ours, peers, floors, with what it adds to `local`."""
    values = {name: values_of(results, name) for name in (*_TIMES, "max_abs_err", "scaling")}
    measured = [name for name, found in values.items() if found]
    times = next((values[name] for name in _TIMES if name in measured), {})
    compared = any(name in by for by in times.values() for name in (*STOCK, LOCAL))
    columns = ["case", "impl", *(METRICS[name].title for name in measured)]
    columns += ["+local", "×stock"] if compared else []
    lines = []
    for case in dict.fromkeys(row.case for row in results.rows):
        found = {name: values[name].get(case, {}) for name in measured}
        for impl in in_order(impl for by in found.values() for impl in by):
            line = [METRICS[x].format(by[impl]) if impl in by else "–" for x, by in found.items()]
            line += _compared(impl, times.get(case, {})) if compared else []
            lines.append([case, impl, *line])
    made = heading(results, _NOTE if compared else ""), markdown_table(columns, lines)
    return join(*made, baseline_section(results), failures(results))


def _compared(impl: str, times: Mapping[str, float]) -> list[str]:
    us, local = times.get(impl), times.get(LOCAL)
    stock = next((times[name] for name in STOCK if name in times), None)
    return [
        "–" if us is None or local is None else f"{us - local:+.1f}",
        "–" if us is None or stock is None else f"{us / stock:.2f}",
    ]
