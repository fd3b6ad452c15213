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
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from torch_fdattn.dist.collectives import split_evenly
from torch_fdattn.dist.tensor_parallel import auto
from torch_fdattn.dist.tensor_parallel.auto import GATHER
from torch_fdattn.tune.linears import LinearChoices, Shape, fastest, shapes, variants

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
#: What the names of our implementations begin with.
_OURS = "fdattn/"
TABLE = Path(auto.__file__).with_name("crossovers.json")


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
    tried = variants(op, rows, ranks.size, device.type == "cuda")
    ours = {f"{_OURS}{variant}": matmul.ours(variant) for variant in tried}
    # Stock and ours of the same kernels beside each other: behind torch's fused ops, graphs of NCCL's were slower.
    first = f"{_OURS}{tried[0]}"
    ordered = {TORCH: others.pop(TORCH), first: ours.pop(first), **others, **ours}

    def near(name: str, found: torch.Tensor) -> bool:
        error, bound = error_and_bound(found, right if name.startswith(_OURS) else found.double())
        if not error <= bound < math.inf:
            raise StepFailed(f"first call: error {error:.2e}, bound {bound:.2e}", "AssertionError")
        return True

    calls, holds = checked(case, ranks, recorder, ordered, near)
    rounds = prepared(case, ranks, recorder, calls)
    measured.add_sample(op, shape, rows, rounds.sample(options.repeats))
    rounds.clear()
    recorder.save()
    return holds


class Measured(LinearChoices):
    """`LinearChoices` of a run's samples."""

    def __init__(self, ranks: int, dtype: str, recorder: Recorder, device: auto.Device) -> None:
        super().__init__(ranks)
        name = str(DTYPES[dtype]).removeprefix("torch.")
        gpu = recorder.results.meta["gpu"]
        self._about = dict(gpu=gpu, architecture=device.architecture, ranks=ranks, dtype=name)

    def add_sample(
        self, op: str, shape: Shape, rows: int, times: Mapping[str, Mapping[str, float]]
    ) -> None:
        """times: by metric and implementation."""
        of_graphs = times.get(GRAPH) or max(times.values(), key=len)  # CPUs have no graphs
        name = choice(op, of_graphs)
        taken = of_graphs.get(f"{_OURS}{name}", math.inf), of_graphs.get(GEMM_ALONE, 0.0)
        self.add(op, shape, rows, name, *taken)

    def entries(self) -> list[dict]:
        return [entry | self._about for entry in super().entries()]


def choice(op: str, times: Mapping[str, float]) -> str:
    """The fastest of ours, by µs; what calls BLAS and the group's collective where nothing was measured.

    Not that one either where eager torch is faster than all of ours: eagerly our call of the collective has torch's
    kernels, but takes the host longer.
    """
    ours = {name.removeprefix(_OURS): us for name, us in times.items() if name.startswith(_OURS)}
    return fastest(op, ours)


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
