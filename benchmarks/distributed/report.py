"""The table of a run in one line a test: what, its parameters, torch's time, ours, the speed-up."""

from __future__ import annotations

from ..metrics import METRICS
from ..results import Results
from ..tables import ours, values_of

TORCH = "eager"
#: Whom a test is compared with: the first of these that it measured. Ring attention has no eager form.
PEERS = (TORCH, "torch_cp", "single_device")
HEAD = ["| test | parameters | torch | ours | speed-up |", "| --- | --- | --- | --- | --- |"]


def lines_of(results: Results) -> list[str]:
    """One Markdown row for each test that has both times; tokens/s beside the time where measured."""
    lines = []
    metric, tokens = METRICS["latency_ms"], METRICS["tokens_per_s"]
    rates = values_of(results, "tokens_per_s")
    for case, by_impl in values_of(results, "latency_ms").items():
        own = ours(by_impl)
        peer = next((name for name in PEERS if name in by_impl), None)
        if own is None or peer is None:
            continue
        test, _, parameters = case.partition(" ")
        cells = []
        for impl in (peer, own):
            cell = f"{metric.format(by_impl[impl])} ms"
            if impl in rates.get(case, {}):
                cell += f", {tokens.format(rates[case][impl])} tokens/s"
            cells.append(cell)
        speedup = metric.speedup(by_impl[own], by_impl[peer])
        ratio = f"{speedup:.2f}×" if speedup >= 1 else f"**{speedup:.2f}×**"
        compared = "" if peer == TORCH else f" ({peer})"
        strategy = own.partition("/")[2]
        lines.append(
            f"| {test} {strategy} | {parameters}{compared} | {cells[0]} | {cells[1]} | {ratio} |"
        )
    return lines


def table(results: Results) -> str:
    """Markdown; empty where no test has both times."""
    lines = lines_of(results)
    return "\n".join([*HEAD, *lines]) if lines else ""
