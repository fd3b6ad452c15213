"""A record of `fdattn bench serve --out` as a results file: what tables and documents are made from.

Of each engine the better run, as the command prints it.
"""

from __future__ import annotations

import argparse
import json
from datetime import datetime
from pathlib import Path
from typing import Any

from .metrics import metric_named
from .results import DATE_FORMAT, Results, Row, commit, output_path

_OURS = "torch_fdattn"
_NEEDED = (
    "device", "torch", "triton", "command", "time", "shape", "dtype", "kv_dtype", "ranks", "tensor_parallel", "runs",
)  # fmt: skip


def add_command(names) -> None:
    """Adds the parser to argparse's subparsers `names`."""
    command = names.add_parser("serve", help="a record of `fdattn bench serve --out` as results")
    command.add_argument("record", metavar="RECORD.json")
    command.add_argument("--json", help="file or folder (default: benchmarks/results)", metavar="PATH")  # fmt: skip
    command.set_defaults(run=_run)


def results_of(record: dict[str, Any]) -> Results:
    """The results of a record without --url; the commit is this checkout's, or TORCH_FDATTN_COMMIT.

    Raises:
        ValueError: a record of a server, which has no peers and no limit, or one that lacks something.
    """
    if "limit" not in record:
        raise ValueError(
            "record must be of `fdattn bench serve` without --url, got one of a server"
        )
    if missing := [name for name in _NEEDED if name not in record]:
        raise ValueError(
            f"record must have {', '.join(_NEEDED)}, got one without {', '.join(missing)}"
        )
    meta = {
        "gpu": record["device"], "count": record["ranks"], "torch": record["torch"], "triton": record["triton"],
        "commit": commit(), "command": record["command"],
        "date": datetime.fromisoformat(record["time"]).strftime(DATE_FORMAT),
    }  # fmt: skip
    rows = []
    for engine, runs in record["runs"].items():
        best = min(runs, key=lambda run: run["seconds"])
        figures = {
            "tokens_per_s": best["tokens_per_s"],
            "of_limit": 100 * record["limit"]["seconds"] / best["seconds"],
        }
        for name, times in (("first_token_ms", "ttft_ms"), ("next_token_ms", "tpot_ms")):
            if best.get(times) is not None:  # answers of one token have no next; peers say no times
                figures[name] = best[times]["mean"]
        case = f"{record['shape']} {record['dtype']}, {best['requests']} requests, {best['new_tokens']} tokens"
        if record["tensor_parallel"] > 1:
            case += f", tensor parallel {record['tensor_parallel']}"
        impl = _implementation(engine, record["kv_dtype"])
        rows += [Row(case, impl, x, y, metric_named(x).unit) for x, y in figures.items()]
    return Results(meta, rows)


def _implementation(engine: str, kv_dtype: str) -> str:
    if engine != _OURS:
        return engine
    return "fdattn" if kv_dtype == "auto" else f"fdattn/{kv_dtype}"


def _run(options: argparse.Namespace, _) -> int:
    results = results_of(json.loads(Path(options.record).read_text(encoding="utf-8")))
    path = output_path(options.json, results.meta, "serve")
    if path is None:
        raise ValueError("--json must be given for a record of a CPU, which is no result")
    results.save(path)
    print(path)
    return 0
