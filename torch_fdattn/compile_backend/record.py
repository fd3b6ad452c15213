"""Puts a report where the user can see it."""

from __future__ import annotations

import logging

import torch
from torch._dynamo.utils import counters
from torch.fx import GraphModule

from torch_fdattn.compile_backend.report import KEPT, Report, where

log = logging.getLogger(__name__)
_package_log = logging.getLogger("torch_fdattn")


def record(report: Report) -> None:
    """Into counters, logs (TORCH_LOGS="+torch_fdattn") and tlparse's artifacts."""
    for site in (*report, *report.local, *report.matmuls):
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


def warn_of_no_attention(gm: GraphModule) -> None:
    """Of a graph over one rank's tokens that has no attention: where Dynamo left some to Python, no backend sees it."""
    first = next((x for x in gm.graph.nodes if x.op in ("call_function", "call_method")), None)
    if first is not None:
        _package_log.warning(
            'options["context_parallel"]: the graph that begins at %s has no attention. If the model has some behind a graph '
            "break, it sees one rank's tokens alone: compile with fullgraph=True, which names the break",
            where(first),
        )
