"""Puts a report where the user can see it."""

from __future__ import annotations

import logging

import torch
from torch._dynamo.utils import counters

from torch_fdattn.compile_backend.report import KEPT, Report

log = logging.getLogger(__name__)


def record(report: Report) -> None:
    """Into counters, logs (TORCH_LOGS="+torch_fdattn") and tlparse's artifacts."""
    for site in (*report, *report.matmuls):
        if site.op != KEPT:  # counted below
            counters["fdattn"][f"op/{site.op}" if site.op else f"left/{site.reason}"] += 1
        log.info("%s", site)
        if site.op is None and site.stack_trace:
            log.debug("left as it was:\n%s", site.stack_trace)
    if report.graphs:
        counters["fdattn"]["rewritten"] += len(report.rewritten)
        counters["fdattn"]["left"] += len(report.left)
        counters["fdattn"]["kept"] += len(report.kept)
    name = "fdattn_attention" if report.graphs else "fdattn_matmuls"
    torch._logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: str(report),
    )
