"""The table of a run in one line a test: what, its parameters, torch's time, ours, the speed-up."""

from __future__ import annotations

from ..metrics import METRICS
from ..results import Results
from ..tables import ours, values_of

TORCH = "eager"


def table(results: Results) -> str:
    """Markdown; empty where no test has both times."""
    lines = []
    for metric, unit in (("latency_ms", "ms"), ("tokens_per_s", "tokens/s")):
        for case, by_impl in values_of(results, metric).items():
            own, peer = ours(by_impl), by_impl.get(TORCH)
            if own is None or peer is None:
                continue
            test, _, parameters = case.partition(" ")
            quantity = METRICS[metric]
            speedup = quantity.speedup(by_impl[own], peer)
            lines.append(
                f"| {test} {own.partition('/')[2]} | {parameters} | {quantity.format(peer)} {unit} | "
                f"{quantity.format(by_impl[own])} {unit} | {speedup:.2f}× |"
            )
    if not lines:
        return ""
    return "\n".join(
        [
            "| test | parameters | torch | ours | speed-up |",
            "| --- | --- | --- | --- | --- |",
            *lines,
        ]
    )
