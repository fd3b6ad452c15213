"""The table of a sharded-decode run: a row for each way to compute a case, with what it adds to `local`."""

from __future__ import annotations

from ..metrics import METRICS
from ..results import Results
from ..shapes import LOCAL
from .tables import baseline_table, failures, heading, in_order, markdown_table, values_of

#: Whom ours are compared with, the first that was measured: the best stock way.
STOCK = ("nccl", "gloo")
_TIMES = ("graph_us", "eager_us")
_NOTE = (
    "In the first column of times, +local: what it adds to our decode of the shard alone, µs; "
    "×stock: its time over that of the stock way (nccl, or gloo on a CPU)."
)


def table(results: Results) -> str:
    """Markdown; rows are ordered ours, peers, floors."""
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
            line = [case, impl]
            line += [
                METRICS[name].format(by[impl]) if impl in by else "–" for name, by in found.items()
            ]
            if compared:
                line += _compared(impl, times.get(case, {}))
            lines.append(line)
    parts = [heading(results, _NOTE if compared else ""), markdown_table(columns, lines)]
    parts += [baseline_table(results), failures(results)]
    return "\n\n".join(part for part in parts if part)


def _compared(impl: str, times: dict[str, float]) -> list[str]:
    if impl not in times:
        return ["–", "–"]
    stock = next((times[name] for name in STOCK if name in times), None)
    local = times.get(LOCAL)
    return [
        "–" if local is None else f"{times[impl] - local:+.1f}",
        "–" if stock is None else f"{times[impl] / stock:.2f}",
    ]
