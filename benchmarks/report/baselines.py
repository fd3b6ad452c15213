"""What floors and peers reached on one H100 80GB HBM3 and, over ranks, on four H200, and the check that a
run is worth reading.

A run counts when its floors and peers are within 8 % of these figures, or faster: with a slow floor
or a peer called wrongly, a good ratio proves nothing. Where several baseline runs differed, the
middle of their range stands here. Measured with torch 2.11.0+cu130, triton 3.6.0, bf16: prefill by
event timing, decode in CUDA graphs over rotated inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cases import ATTENTION_CASES, DECODE_CASES, DIST_DECODE_CASES
from ..metrics import Metric, metric_named
from ..results import Results
from ..shapes import MATMUL, MATMUL_CASE, PURE_READ

GPU = "H100 80GB HBM3"
TOLERANCE = 0.08

_FORWARD = {  # TFLOP/s: cudnn, fa2, flex, fa3
    "hd128 1k causal": (432, 249, 262, 440),
    "hd128 4k causal": (573, 290, 365, 641.5),
    "hd128 16k causal": (602.5, 329, 408, 676.5),
    "hd128 4k full": (636.5, 336, 458, 688.5),
    "hd128 16k full": (628, 346, 497, 708),
    "hd64 4k causal": (424, 281, 351, 446),
    "hd64 16k causal": (449, 300, 372, 536),
    "hd64 16k full": (476, 313, 423, 531),
    "hd256 16k causal": (626, 287, 305, 732),
    "hd128 8k causal 32/8": (589, 338, 408, 660),
}
_BACKWARD = {  # TFLOP/s: cudnn, fa2, flex
    "hd128 1k causal": (287, 162, 245),
    "hd128 4k causal": (452.5, 251, 354),
    "hd128 16k causal": (530, 313, 388),
    "hd128 16k full": (532.5, 312, 406),
    "hd64 16k causal": (432, 277, 301),
    "hd256 16k causal": (384.5, 255, 136),
    "hd128 8k causal 32/8": (486, 287, 363),
}
_DECODE = {  # µs in a graph: pure_read, cudnn, fa2, fa3
    "B1 H32/8 N1024": (3.4, 8.0, 10.9, 12.9),
    "B1 H32/8 N4096": (7.4, 13.2, 20.2, 16.9),
    "B1 H32/8 N32768": (43.3, 49.8, 57.9, 58.4),
    "B1 H32/8 N131072": (170.9, 180.3, 195.1, 191.8),
    "B8 H32/8 N1024": (12.7, 18.2, 20.1, 22.0),
    "B32 H32/8 N1024": (44.2, 48.6, 55.4, 57.5),
    "B16 H32/8 N4096": (86.4, 90.4, 95.7, 99.0),
    "B64 H32/8 N4096": (341.5, 352.5, 405.0, 367.7),
    "B128 H64/8 N8192": (1365, 1395, 1734, 1426),
    "B8 H32/32 N4096": (171.1, 177.4, 215.0, 188.5),
    "B1 H32/32 N32768": (171.0, 179.2, 183.8, 188.0),
}
_PAGED = {  # µs in a graph: flashinfer (tensor cores), fa3
    "B1 H32/8 N4096 page16": (15.4, 16.5),
    "B1 H32/8 N32768 page16": (55.1, 56.9),
    "B1 H32/8 N131072 page16": (189.0, 190.9),
    "B16 H32/8 N4096 page16": (99.8, 99.4),
    "B64 H32/8 N4096 page1": (365.3, 370.4),
    "B64 H32/8 N4096 page16": (360.5, 363.7),
    "B64 H32/8 N4096 page64": (358.2, 362.3),
    "B128 H64/8 N8192 page16": (1416, 1414),
    "B8 H32/32 N4096 page16": (183.0, 186.7),
    "B32 H32/8 N32768 page16 ragged-uniform": (816, 729),
    "B64 H32/8 N32768 page16 ragged-power": (566, 437),
}
_DIST_DECODE = {  # µs in a graph, slowest of four ranks: pure_read of the shard, nccl
    "B1 H32/8 N32768": (9.9, 34.4),
    "B1 H32/8 N131072": (32.0, 58.2),
    "B1 H64/8 N1048576": (236, 265),
    "B16 H32/8 N32768": (119, 149),
    "B64 H32/8 N8192": (120, 181),
}
_MESSAGES = {  # µs in a graph, slowest of four ranks, by bytes a rank: nccl, torch_symm
    "message 4096 B": (10.9, 6.6),
    "message 16384 B": (11.2, 7.6),
    "message 65536 B": (11.5, 8.3),
    "message 262144 B": (15.4, 10.8),
    "message 1048576 B": (37, 18.6),
}


def _table() -> dict[tuple[str, str, str], float]:
    rows: dict[tuple[str, str, str], float] = {(MATMUL_CASE, MATMUL, "TFLOPs_per_gpu"): 750}
    attention = {case.label: case.name for case in ATTENTION_CASES}
    decode = {case.label: case.name for case in DECODE_CASES}
    for names, metric, impls, figures in (
        (attention, "fwd_TFLOPs", ("cudnn", "fa2", "flex", "fa3"), _FORWARD),
        (attention, "bwd_TFLOPs", ("cudnn", "fa2", "flex"), _BACKWARD),
        (decode, "graph_us", (PURE_READ, "cudnn", "fa2", "fa3"), _DECODE),
        (decode, "graph_us", ("flashinfer", "fa3"), _PAGED),
    ):
        for label, values in figures.items():
            for impl, value in zip(impls, values, strict=True):
                rows[names[label], impl, metric] = value
    return rows


def _table_of_four() -> dict[tuple[str, str, str], float]:
    names = {case.label: case.name for case in DIST_DECODE_CASES}
    return {
        (names.get(label, label), impl, "graph_us"): value
        for impls, figures in (
            ((PURE_READ, "nccl"), _DIST_DECODE),
            (("nccl", "torch_symm"), _MESSAGES),
        )
        for label, values in figures.items()
        for impl, value in zip(impls, values, strict=True)
    }


BASELINES = _table()
#: The figures of each machine: part of its GPU's name, how many (None: any number), the table.
_MACHINES = ((GPU, None, BASELINES), ("H200", 4, _table_of_four()))


@dataclass(frozen=True)
class Check:
    """One floor or peer of a run beside its baseline."""

    case: str
    impl: str
    metric: Metric
    value: float
    baseline: float

    @property
    def speed(self) -> float:
        """The run's speed over the baseline's; below 1 it was slower."""
        return self.metric.speedup(self.value, self.baseline)

    @property
    def counts(self) -> bool:
        return self.speed >= 1 - TOLERANCE


def checks(results: Results) -> list[Check] | None:
    """Each row that has a baseline, or None for a machine that has no baselines."""
    meta = results.meta
    tables = [
        table
        for gpu, count, table in _MACHINES
        if gpu in str(meta["gpu"]) and count in (None, meta["count"])
    ]
    if not tables:
        return None
    found = []
    for row in results.rows:
        baseline = tables[0].get((row.case, row.impl, row.metric))
        if baseline is not None:
            found.append(
                Check(row.case, row.impl, metric_named(row.metric), float(row.value), baseline)
            )
    return found
