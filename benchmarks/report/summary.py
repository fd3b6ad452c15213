"""The summary tables of README.md: one table for each subject, ours beside the fastest peer of each case.

The tables are made from the newest results file of each benchmark. docs/performance.md has every figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from ..metrics import METRICS
from ..results import RESULTS_DIR, Results
from .tables import is_loss, markdown_table, opposite, peer_ratios, ratio_text, values_of

_H100 = "H100-80GB-HBM3"
#: What the captions of older figures say.
LAUNCH_LAYER = "2026-11-27T14:01:00Z"
EAGER_NOTE = "Eager calls before 2026-11-27 14:01 lack fb42e1f's launch layer."
NOTE = (
    "Each row compares ours (with its strategy) with the fastest peer of that row. "
    "**Bold**: ours is slower, as far as two digits show it. Below each table: GPU, commit, date. cuDNN and FlashAttention-2 take no lengths "
    "in decode and are compared with ours without lengths (`full`)."
)


class Rows(NamedTuple):
    """Rows of one table: cases of one results file (all of them where none is named) in one metric."""

    file: str  # the end of the file's name: GPU, count and benchmark
    metric: str
    label: str  # written before the case
    cases: tuple[str, ...] = ()


class Subject(NamedTuple):
    title: str
    rows: tuple[Rows, ...]


_PREFILL = (
    "B4 H16/16 N4096 D128 causal bf16",
    "B1 H16/16 N16384 D128 causal bf16",
    "B2 H32/8 N8192 D128 causal bf16",
    "B1 H32/32 N16384 D64 causal bf16",
    "B1 H8/8 N16384 D256 causal bf16",
)
_DECODE = (
    "B1 H32/8 N1024 D128 bf16",
    "B1 H32/8 N32768 D128 bf16",
    "B64 H32/8 N4096 D128 bf16",
    "B64 H32/8 N4096 D128 bf16 page16",
    "B64 H32/8 N32768 D128 bf16 page16 ragged-power",
)
_RING = "ring B1 H16/16 N16384 D128 causal bf16"
_RING_FROM_IDLE = f"{_RING} forward", f"{_RING} backward"  # the others are of queued calls
SUBJECTS = (
    Subject(
        "Attention, TFLOP/s",
        (
            Rows("H200x1_attention", "fwd_TFLOPs", "forward", _PREFILL),
            Rows("H200x1_attention", "bwd_TFLOPs", "backward", _PREFILL),
        ),
    ),
    Subject(
        "Decode, µs",
        (
            Rows(f"{_H100}x1_decode", "graph_us", "graph", _DECODE),
            Rows(f"{_H100}x1_decode", "eager_us", "eager", _DECODE[:1]),
        ),
    ),
    Subject(
        "Sharded decode, µs in a CUDA graph",
        (Rows(f"{_H100}x4_dist-decode-compare", "graph_us", ""),),
    ),
    Subject(
        'torch.compile(backend="fdattn"): layers of transformers models',
        (
            Rows(f"{_H100}x1_compile-prefill-decode", "fwd_us", "forward, µs:"),
            Rows(f"{_H100}x1_compile-prefill-decode", "graph_us", "graph, µs:"),
            Rows(f"{_H100}x1_compile-train", "step_ms", "step, ms:"),
        ),
    ),
    Subject(
        "Models, ms a pass or step",
        (
            Rows(f"{_H100}x1_e2e-plain-qwen3-8b-bsz1", "latency_ms", ""),
            Rows(f"{_H100}x4_e2e-ag-rs-prefill-bsz32", "latency_ms", ""),
            Rows(f"{_H100}x4_e2e-all-reduce-auto-decode-bsz128", "latency_ms", ""),
        ),
    ),
    Subject(
        "Tensor-parallel layers, ms, eager",
        (
            Rows(f"{_H100}x4_tp-mlp-ag-rs-copy-engine", "latency_ms", ""),
            Rows(f"{_H100}x2_tp-mlp-ag-rs", "latency_ms", ""),
            Rows(f"{_H100}x2_tp-mlp-all-reduce", "latency_ms", ""),
            Rows(f"{_H100}x2_tp-attn-ag-rs-prefill-bsz32", "latency_ms", ""),
            Rows(f"{_H100}x2_tp-attn-all-reduce-auto-decode-bsz128", "latency_ms", ""),
        ),
    ),
    Subject(
        "Ring attention, ms",
        (
            Rows("H200x2_ring-16384", "latency_ms", "", _RING_FROM_IDLE),
            Rows("H200x2_ring-131072", "latency_ms", ""),
        ),
    ),
)


def section(folder: Path = RESULTS_DIR) -> str:
    names = {rows.file for subject in SUBJECTS for rows in subject.rows}
    paths = {x: found[-1] for x in names if (found := sorted(folder.glob(f"*_{x}.json")))}
    runs = {name: (path.name, Results.load(path)) for name, path in paths.items()}
    tables = [text for subject in SUBJECTS if (text := _table(subject, runs))]
    if not tables:
        return "Not measured yet.\n"
    return (
        "\n\n".join([f"{NOTE} {eager_note(run for _, run in runs.values())}".rstrip(), *tables])
        + "\n"
    )


def eager_note(runs: Iterable[Results]) -> str:
    """What a table says where some of its runs are older than the launch layer."""
    return EAGER_NOTE if any(str(run.meta["date"]) < LAUNCH_LAYER for run in runs) else ""


def _table(subject: Subject, runs: Mapping[str, tuple[str, Results]]) -> str:
    lines, sources = [], {}
    for rows in subject.rows:
        name, run = runs.get(rows.file, ("", None))
        if run is not None and (found := _lines(run, rows)):
            lines += found
            machine = "{count} × {gpu}, commit {commit}, {date:.10}".format(**run.meta)
            sources.setdefault(machine, []).append(name)
    if not lines:
        return ""
    said = "; ".join(
        f"{machine.replace('NVIDIA ', '').replace(' 80GB HBM3', '')} ("
        + ", ".join(f"[data](benchmarks/results/{name})" for name in dict.fromkeys(names))
        + ")"
        for machine, names in sources.items()
    )
    columns = [subject.title, "ours", "fastest peer", "speed-up"]
    return f"{markdown_table(columns, lines)}\n\n{said}"


def _lines(run: Results, rows: Rows) -> list[list[str]]:
    metric, lines = METRICS[rows.metric], []
    values = values_of(run, rows.metric)
    for case, peers in peer_ratios(run, rows.metric).items():
        if not peers or (rows.cases and case not in rows.cases):
            continue
        peer = min(peers, key=peers.__getitem__)
        own = opposite(peer, values[case])
        ratio = ratio_text(peers[peer])
        lines.append(
            [
                f"{rows.label} {case}".strip(),
                f"{metric.format(values[case][own])} {own.partition('/')[2]}".rstrip(),
                f"{metric.format(values[case][peer])} {peer}",
                f"**{ratio}**" if is_loss(peers[peer]) else ratio,
            ]
        )
    return lines
