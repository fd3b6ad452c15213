"""The backend itself: rewrite, report, lower."""

from __future__ import annotations

import difflib
import logging
from typing import Any

import torch
import torch._inductor
from torch._dynamo.utils import counters
from torch.fx import GraphModule

from torch_fdattn.compile_backend.cache_key import CacheKey
from torch_fdattn.compile_backend.context_parallel.attention import OPTION, parse
from torch_fdattn.compile_backend.report import Report
from torch_fdattn.compile_backend.rewrite import rewrite
from torch_fdattn.compile_backend.tensor_parallel import passes

log = logging.getLogger(__name__)

_OWN = {
    "dryrun": False, "require_all": False, "no_fully_masked_rows": False, "lower": "inductor",
    "context_parallel": None, passes.OPTION: "auto",
}  # fmt: skip
_LOWERINGS = ("inductor", "aot_eager", "eager")


class UnsupportedAttention(RuntimeError):
    """Attention that was left as it was, with ``require_all`` or ``context_parallel`` among the options."""


def compile_graph(gm: GraphModule, inputs: list, mode: str | None, options: dict | None) -> Any:
    own, others = _split(options)
    if own["lower"] != "inductor" and (mode not in (None, "default") or others):
        raise ValueError(
            f'options["lower"] must be "inductor" where mode or Inductor\'s options are given, got '
            f'"{own["lower"]}" with mode={mode!r} and options {sorted(others)}'
        )
    report = rewrite(
        gm, dryrun=own["dryrun"], context=own["context_parallel"],
        no_fully_masked_rows=own["no_fully_masked_rows"],
    )  # fmt: skip
    record(report)
    if own["require_all"] and report.left:
        raise UnsupportedAttention(f'options["require_all"] is set, and {report}')
    if own["context_parallel"] and report.left and not own["dryrun"]:
        raise UnsupportedAttention(
            f"with {OPTION} this would attend to one rank's tokens alone: {report}"
        )
    return _lower(gm, inputs, own, mode, others)


def _split(options: dict | None) -> tuple[dict, dict]:
    """(ours with defaults, Inductor's)."""
    others = dict(options or {})
    own = {name: others.pop(name, default) for name, default in _OWN.items()}
    for name in ("dryrun", "require_all", "no_fully_masked_rows"):
        if not isinstance(own[name], bool):
            raise TypeError(f'options["{name}"] must be a bool, got {own[name]!r}')
    if own["lower"] not in _LOWERINGS:
        raise ValueError(f'options["lower"] must be one of {_LOWERINGS}, got {own["lower"]!r}')
    own["context_parallel"] = parse(own["context_parallel"])
    own[passes.OPTION] = passes.parse(own[passes.OPTION])
    _check_known(others)
    return own, others


def _check_known(others: dict) -> None:
    """Before Inductor does, whose own error lists all of its options and none of ours."""
    known = {*_OWN, *torch._inductor.list_options()}
    for name in others:
        if name in known or name.replace("-", "_") in known:
            continue
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f'options must be of backend="fdattn" ({", ".join(_OWN)}) or of Inductor '
            f"(torch._inductor.list_options() lists them), got {name!r}.{hint}"
        )


def _lower(gm: GraphModule, inputs: list, own: dict, mode: str | None, others: dict) -> Any:
    matmuls = passes.applies(own[passes.OPTION])
    if own["lower"] != "inductor":
        from torch._dynamo.backends import debugging

        how = {}
        if matmuls and own["lower"] == "aot_eager":
            how = passes.compilers(own[passes.OPTION], record, own["dryrun"])
        return getattr(debugging, own["lower"])(gm, inputs, **how)
    from torch._inductor.compile_fx import compile_fx

    # torch's own reading of mode and options, with its errors for unknown names.
    patches = torch._TorchCompileInductorWrapper(mode, others, None).config
    patches = {**patches, **CacheKey.patch(patches, own)}
    if matmuls:
        patches |= passes.MatmulPass.patch(patches, own, record)
    return compile_fx(gm, inputs, config_patches=patches)


def record(report: Report) -> None:
    """Where the user can see it: counters, logs (TORCH_LOGS="+torch_fdattn"), tlparse's artifacts."""
    for site in (*report, *report.matmuls):
        counters["fdattn"][f"op/{site.op}" if site.op else f"left/{site.reason}"] += 1
        log.info("%s", site)
        if site.op is None and site.stack_trace:
            log.debug("left as it was:\n%s", site.stack_trace)
    if report.graphs:
        counters["fdattn"]["rewritten"] += len(report.rewritten)
        counters["fdattn"]["left"] += len(report.left)
    torch._logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {
            "name": "fdattn_attention" if report.graphs else "fdattn_matmuls", "encoding": "string"
        },
        payload_fn=lambda: str(report),
    )  # fmt: skip
