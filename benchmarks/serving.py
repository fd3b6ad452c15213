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


def add_command(names) -> None:
    """Adds the parser to argparse's subparsers `names`."""
    command = names.add_parser("serve", help="a record of `fdattn bench serve --out` as results")
    command.add_argument("record", metavar="RECORD.json")
    command.add_argument("--json", help="file or folder (default: benchmarks/results)", metavar="PATH")  # fmt: skip
    command.set_defaults(run=_run)


def results_of(record: dict[str, Any]) -> Results:
    """The results of a record without --url; the commit is this checkout's, or TORCH_FDATTN_COMMIT.

    Raises:
        ValueError: a record of a server, which has no peers and no limit.
    """
    if "limit" not in record:
        raise ValueError(
            "record must be of `fdattn bench serve` without --url, got one of a server"
        )
    when = datetime.fromisoformat(record["time"]).strftime(DATE_FORMAT)
    meta = {
        "gpu": record["device"], "count": record["ranks"], "torch": record["torch"], "triton": record["triton"], "commit": commit(),
        "command": record["command"], "date": when,
    }  # fmt: skip
    rows = []
    for engine, runs in record["runs"].items():
        best = min(runs, key=lambda run: run["seconds"])
        figures = {
            "tokens_per_s": best["tokens_per_s"],
            "of_limit": 100 * record["limit"]["seconds"] / best["seconds"],
        }
        if engine == _OURS:
            figures |= {"first_token_ms": best["ttft_ms"]["mean"], "next_token_ms": best["tpot_ms"]["mean"]}  # fmt: skip
        kv_dtype = record["kv_dtype"]
        impl = (
            engine if engine != _OURS else "fdattn" if kv_dtype == "auto" else f"fdattn/{kv_dtype}"
        )
        case = f"{record['shape']} {record['dtype']}, {best['requests']} requests, {best['new_tokens']} tokens"
        rows += [Row(case, impl, x, y, metric_named(x).unit) for x, y in figures.items()]
    return Results(meta, rows)


def _run(options: argparse.Namespace, _) -> int:
    found = results_of(json.loads(Path(options.record).read_text(encoding="utf-8")))
    path = output_path(options.json, found.meta, "serve")
    found.save(path)
    print(path)
    return 0
