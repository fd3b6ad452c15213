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
    """One Markdown row for each test that has both times."""
    lines = []
    for metric, unit in (("latency_ms", "ms"), ("tokens_per_s", "tokens/s")):
        for case, by_impl in values_of(results, metric).items():
            own = ours(by_impl)
            peer = next((by_impl[name] for name in PEERS if name in by_impl), None)
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
