"""From how many rows on which strategy of the tensor-parallel matmuls is the fastest: a sweep, and the table it gives.

For each model's four linear layers on this many ranks, each op and each number of rows, all of ours are timed beside
eager torch with the group's own collectives, torch's fused ops and the product alone, in CUDA graphs and eager. The choice is in
`torch_fdattn/dist/tensor_parallel/crossovers.json`, which `tensor_parallel/auto.py` reads.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from torch_fdattn.dist.collectives import split_evenly
from torch_fdattn.dist.tensor_parallel import auto
from torch_fdattn.dist.tensor_parallel.auto import ALL_REDUCE, GATHER, SCATTER
from torch_fdattn.dist.tensor_parallel.head_sharding import shard_heads
from torch_fdattn.dist.tensor_parallel.op import GEMM_ALL_REDUCE_ROWS
from torch_fdattn.models import ModelConfig

from ..ranks import Ranks, StepFailed, together
from ..report.parallel import TORCH
from ..results import Recorder
from ..runner import DTYPES, generator
from ..shapes import GEMM_ALONE
from ..timing import GRAPH
from .layer_run import checked, error_and_bound, marked, prepared
from .matmuls import Matmul
from .models import config_named, require_memory

ROWS = tuple(2**i for i in range(15))
MODELS = ("Qwen/Qwen3-32B", "meta-llama/Meta-Llama-3-70B")
TABLE = Path(auto.__file__).with_name("crossovers.json")
#: Ours by op; what runs where nothing is measured first.
VARIANTS = {
    GATHER: ("collective", "copy_engine", "fused", "low_latency"),
    SCATTER: ("collective", "copy_engine", "fused", "low_latency"),
    ALL_REDUCE: ("nccl", "one_shot", "two_shot", "low_latency", "gemm_all_reduce"),
}
#: Rows up to which a method is tried: its bytes to every rank are twice the result, or the whole result W times.
MAX_ROWS = {"gemm_all_reduce": GEMM_ALL_REDUCE_ROWS, "one_shot": 4096}
#: Gathering and scattering, these are `collective` where ranks have different numbers of rows.
EVEN = ("fused",)


class Shape(NamedTuple):
    """A linear layer on one rank."""

    layer: str
    columns: int
    features: int
    ops: tuple[str, ...]


def shapes(config: ModelConfig, ranks: int) -> list[Shape]:
    """The four of a layer; of the first rank, whose shares are the largest."""
    shard = shard_heads(config.num_heads, config.num_kv_heads, 0, ranks)
    inner = split_evenly(config.intermediate_size, ranks)[0]
    heads, hidden = shard.q_heads * config.head_dim, config.hidden_size
    qkv = heads + 2 * shard.kv_heads * config.head_dim
    return [
        Shape("qkv", qkv, hidden, (GATHER,)),
        Shape("o", hidden, heads, (SCATTER, ALL_REDUCE)),
        Shape("gate_up", 2 * inner, hidden, (GATHER,)),
        Shape("down", hidden, inner, (SCATTER, ALL_REDUCE)),
    ]


def run(options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> bool:
    """Whether every result of ours was right."""
    on_gpu = ranks.device.type == "cuda"
    rows = options.rows or (ROWS if on_gpu else (1, 4))
    configs = [config_named(name) for name in options.models or (MODELS if on_gpu else ["tiny-qwen3"])]  # fmt: skip
    path = Path(options.table) if options.table else TABLE if on_gpu else None
    path = path if ranks.rank == 0 else None
    measured = Measured(ranks.size, options.dtype, recorder, auto.Device.of(ranks.device))
    holds = True
    for config in configs:
        for shape in shapes(config, ranks.size):
            for op in shape.ops:
                for count in rows:
                    holds &= _measure(op, shape, count, options, ranks, recorder, measured)
            if path is not None:  # a run that is stopped keeps what it has chosen
                write(path, measured.entries(), recorder)
        measured.layer(config, rows)
    if path is not None:
        write(path, measured.entries(), recorder)
        print(f"Choices written to {path}", file=sys.stderr)
    return holds


@torch.inference_mode()
def _measure(
    op: str, shape: Shape, rows: int, options: argparse.Namespace, ranks: Ranks, recorder: Recorder,
    measured: Measured,
) -> bool:  # fmt: skip
    dtype, device = DTYPES[options.dtype], ranks.device
    case = marked(
        f"tp_crossover {op} M{rows} N{shape.columns} K{shape.features} {options.dtype} x{ranks.size}",
        device,
    )
    values = rows * (shape.columns + shape.features) * 3 + 2 * shape.columns * shape.features
    exact = 3 * torch.float64.itemsize * rows * shape.columns  # while results are compared
    require_memory(case, values * dtype.itemsize + exact, device, ranks.size)
    made = generator(device, ranks.rank)
    shares = split_evenly(rows, ranks.size)
    own = shares[ranks.rank] if op == GATHER else rows
    x = torch.randn(own, shape.features, generator=made, device=device, dtype=dtype)
    weight = torch.randn(shape.columns, shape.features, generator=made, device=device, dtype=dtype)
    matmul = Matmul(op, x, weight.mul_(shape.features**-0.5), shares, ranks)
    others = matmul.others()
    right = together(ranks, "eager", others[TORCH][0]).double()
    uneven = len(set(shares)) > 1
    ours = {
        f"fdattn/{variant}": matmul.ours(variant)
        for variant in VARIANTS[op]
        if rows <= MAX_ROWS.get(variant, rows)
        and (device.type == "cuda" or "shot" not in variant)
        and not (uneven and op != ALL_REDUCE and variant in EVEN)
    }
    # Stock and ours of the same kernels beside each other: behind torch's fused ops, graphs of NCCL's were slower.
    first = f"fdattn/{VARIANTS[op][0]}"
    ordered = {TORCH: others.pop(TORCH), first: ours.pop(first), **others, **ours}

    def near(name: str, found: torch.Tensor) -> bool:
        error, bound = error_and_bound(
            found, right if name.startswith("fdattn/") else found.double()
        )
        if not error <= bound < math.inf:
            raise StepFailed(f"first call: error {error:.2e}, bound {bound:.2e}", "AssertionError")
        return True

    calls, holds = checked(case, ranks, recorder, ordered, near)
    rounds = prepared(case, ranks, recorder, calls)
    measured.add(op, shape, rows, rounds.sample(options.repeats))
    rounds.clear()
    recorder.save()
    return holds


class Measured:
    """What the sweep has found so far; medians are the same on all ranks, and so are the choices."""

    def __init__(self, ranks: int, dtype: str, recorder: Recorder, device: auto.Device) -> None:
        name = str(DTYPES[dtype]).removeprefix("torch.")
        gpu = recorder.results.meta["gpu"]
        self._about = dict(gpu=gpu, architecture=device.architecture, ranks=ranks, dtype=name)
        self._choices: dict[tuple[str, int, int], dict[int, str]] = {}
        #: µs of what was chosen, and of the product alone.
        self._taken: dict[tuple[str, int, int, int], tuple[float, float]] = {}

    def add(
        self, op: str, shape: Shape, rows: int, times: Mapping[str, Mapping[str, float]]
    ) -> None:
        """times: by metric and implementation."""
        sizes = op, shape.columns, shape.features
        of_graphs = times.get(GRAPH) or max(times.values(), key=len)  # CPUs have no graphs
        name = choice(op, of_graphs)
        self._choices.setdefault(sizes, {})[rows] = name
        taken = of_graphs.get(f"fdattn/{name}", math.inf), of_graphs.get(GEMM_ALONE, 0.0)
        self._taken[(*sizes, rows)] = taken

    def layer(self, config: ModelConfig, rows: Iterable[int]) -> None:
        """Which form a model's layers had better take: the sum over the four of them."""
        by_name = {shape.layer: shape for shape in shapes(config, self._about["ranks"])}
        for count in rows:
            taken = {
                (name, op): self._taken[op, shape.columns, shape.features, count]
                for name, shape in by_name.items()
                for op in shape.ops
            }
            sharded = sum(taken[key][0] for key in taken if key[1] != ALL_REDUCE)
            alone = sum(taken[name, GATHER][1] for name in ("qkv", "gate_up"))
            replicated = alone + sum(taken[name, ALL_REDUCE][0] for name in ("o", "down"))
            down = by_name["down"]
            sizes = auto.LAYER, down.columns, down.features
            form = "ag_rs" if sharded < replicated else "all_reduce"
            self._choices.setdefault(sizes, {})[count] = form

    def entries(self) -> list[dict]:
        return [
            {
                "op": op,
                **self._about,
                "columns": n,
                "features": k,
                "choices": sorted(found.items()),
            }
            for (op, n, k), found in self._choices.items()
        ]


def choice(op: str, times: Mapping[str, float]) -> str:
    """The fastest of ours, by µs; what calls BLAS and the group's collective where nothing was measured.

    Not that one either where eager torch is faster than all of ours: eagerly our call of the collective has torch's
    kernels, but takes the host longer.
    """
    return min(VARIANTS[op], key=lambda variant: times.get(f"fdattn/{variant}", math.inf))


def write(path: Path, entries: Sequence[dict], recorder: Recorder) -> None:
    """Puts the entries in the place of those of the same GPU, ranks, dtype and sizes; others stay."""
    document = json.loads(path.read_text()) if path.exists() else {}
    run = recorder.path.stem if recorder.path else str(recorder.results.meta["date"])
    keys = ("op", "gpu", "ranks", "dtype", "columns", "features")
    new = {tuple(entry[key] for key in keys) for entry in entries}
    kept = [
        entry
        for entry in document.get("entries", [])
        if tuple(entry[key] for key in keys) not in new
    ]
    every = [*kept, *({**entry, "run": run} for entry in entries)]
    runs = {**document.get("runs", {}), run: dict(recorder.results.meta)}
    used = {entry["run"] for entry in every}
    lines = ",\n".join("  " + json.dumps(entry) for entry in every)
    head = json.dumps({name: meta for name, meta in runs.items() if name in used}, indent=2)
    path.write_text(f'{{"runs": {head},\n"entries": [\n{lines}\n]}}\n')
