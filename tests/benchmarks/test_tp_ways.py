"""Benchmarks of the tensor-parallel strategies: runs by interpreted kernels, the sweep's choices, the timeline.

Run under torchrun with TRITON_INTERPRET=1, this file makes the runs of a list of FORMS on its ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks import ranks as processes
from benchmarks import runner
from benchmarks.__main__ import _parser
from benchmarks.distributed.models import CONFIGS
from benchmarks.distributed.timeline import Span, spans
from benchmarks.results import Recorder, Results
from tests import checkout, fast_interpreter
from tests.interpreting import needs_interpreter
from torch_fdattn.dist.symm import symmetric_memory
from torch_fdattn.dist.tensor_parallel import auto, one_sided
from torch_fdattn.dist.tensor_parallel.auto import (
    ALL_REDUCE,
    GATHER,
    LAYER,
    SCATTER,
    Device,
    LinearSizes,
    lookup,
)
from torch_fdattn.dist.tensor_parallel.op import chosen, chosen_method

ROOT = Path(__file__).parents[2]
SMALL = "--model tiny-qwen3 --check --repeats 1 --device cpu"
METHODS = "--use-allreduce --allreduce-method nccl,low_latency,gemm_all_reduce"
FORMS = {
    "quick": [
        f"ag_gemm --M 2 --strategy copy_engine --timeline {{folder}}/ag.svg {SMALL}",
        "tp_crossover --rows 2 --table {folder}/table.json --repeats 1 --device cpu --json {folder}/run.json",
    ],
    "slow": [
        f"gemm_rs --M 4 --strategy auto,collective,copy_engine,fused,low_latency {SMALL}",
        f"gemm_rs --M 3 {METHODS} {SMALL}",
        f"tp_mlp --M 4 --strategy copy_engine,fused --timeline {{folder}}/mlp.svg {SMALL}",
        f"tp_mlp --M 3 {METHODS} {SMALL}",
        f"tp_attn --bsz 2 --seq-len 4 --mode decode --strategy fused {SMALL}",
        f"tp_attn --bsz 2 --seq-len 4 --mode decode {METHODS} {SMALL}",
        f"e2e --bsz 2 --seq-len 4 --layers 1 --strategy fused {SMALL}",
        f"e2e --bsz 2 --seq-len 4 --layers 1 --use-allreduce --allreduce-method gemm_all_reduce {SMALL}",
        "e2e_inference --bsz 2 --gen-len 2 --max-length 4 --model tiny-qwen3 --layers 1 --backend ag_rs "
        "--strategy copy_engine --device cpu",
    ],
}


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["quick", "slow"])
def test_runs_by_kernels(kind: str, tmp_path: Path) -> None:
    start = "-m torch.distributed.run --standalone --nproc-per-node 2"
    environment = checkout.environment(OMP_NUM_THREADS="1", TRITON_INTERPRET="1")
    done = subprocess.run(
        [sys.executable, *start.split(), __file__, kind, str(tmp_path)], text=True, cwd=ROOT,
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "Without a figure" not in done.stdout
    assert "WRONG" not in done.stdout
    asked = (words for words in FORMS[kind] if "--check" in words)
    ways = sum(words.count(",") + 1 for words in asked)
    assert done.stdout.count("check: largest error") == ways
    if kind == "quick":
        assert "<svg" in (tmp_path / "ag.svg").read_text()
        _check_sweep(tmp_path)


def _check_sweep(folder: Path) -> None:
    """Rows of all that was measured, and a table that `auto` reads."""
    results = Results.load(folder / "run.json")
    assert all(row.case.endswith(" cpu") for row in results.rows)
    timed = {(row.case.split()[1], row.impl) for row in results.rows if row.metric == "eager_us"}
    ours = {
        GATHER: ("collective", "copy_engine", "fused", "low_latency"),
        SCATTER: ("collective", "copy_engine", "fused", "low_latency"),
        ALL_REDUCE: ("nccl", "low_latency", "gemm_all_reduce"),
    }
    expected = {(op, f"fdattn/{way}") for op, ways in ours.items() for way in ways}
    assert timed == expected | {(op, impl) for op in ours for impl in ("eager", "gemm_alone")}
    document = json.loads((folder / "table.json").read_text())
    assert {entry["op"] for entry in document["entries"]} == {*ours, LAYER}
    for entry in document["entries"]:
        assert document["runs"][entry["run"]]["command"].startswith("torchrun --nproc-per-node 2")
        sizes = LinearSizes(2, entry["columns"], entry["features"], 2)
        found = lookup(document["entries"], entry["op"], Device("cpu", "cpu"), "float32", sizes)
        assert [[2, found]] == entry["choices"]


def test_the_packaged_table_names_its_runs() -> None:
    document = json.loads(Path(auto.__file__).with_name("crossovers.json").read_text())
    for entry in document["entries"]:
        run = document["runs"][entry["run"]]
        assert (run["gpu"], run["count"]) == (entry["gpu"], entry["ranks"])


class TestChoice:
    """Of times in µs: the fastest of ours, whatever others take."""

    @pytest.mark.parametrize(
        ("times", "chosen"),
        [
            (dict(collective=100, fused=90, copy_engine=80), "copy_engine"),
            (dict(collective=100, fused=101, copy_engine=120), "collective"),
            (dict(collective=105, fused=103, eager=100), "fused"),
            (dict(collective=100, fused=101, eager=85), "collective"),
            (dict(fused=90), "fused"),  # the first failed
            (dict(gemm_alone=1, eager=100), "collective"),
        ],
    )
    def test_choice(self, times: dict, chosen: str) -> None:
        from benchmarks.distributed.crossover import choice

        stock = ("eager", "gemm_alone", "torch_symm")
        named = {name if name in stock else f"fdattn/{name}": us for name, us in times.items()}
        assert choice(GATHER, named) == chosen

    def test_graphs_decide(self) -> None:
        from benchmarks.distributed.crossover import Measured, Shape

        measured = Measured(2, "bf16", Recorder(Results({"gpu": "H"}), None), Device("H", "sm_90"))
        graph, eager = (dict(zip(("fdattn/nccl", "fdattn/low_latency"), us, strict=True)) for us in ((20, 10), (50, 90)))  # fmt: skip
        measured.add_sample(
            ALL_REDUCE, Shape("o", 8, 16, ()), 4, {"graph_us": graph, "eager_us": eager}
        )
        (entry,) = measured.entries()
        assert entry["choices"] == [(4, "low_latency")]
        assert (entry["gpu"], entry["architecture"]) == ("H", "sm_90")

    def test_the_form_of_a_model_is_the_smaller_sum(self) -> None:
        from benchmarks.distributed.crossover import Measured, shapes

        config = CONFIGS["Qwen/Qwen3-32B"]
        for reduce_us, form in ((30, "all_reduce"), (50, "ag_rs")):
            recorder = Recorder(Results({"gpu": "H"}), None)
            measured = Measured(2, "bf16", recorder, Device("H", "sm_90"))
            ours = {GATHER: ("collective", 30), SCATTER: ("collective", 30), ALL_REDUCE: ("nccl", reduce_us)}  # fmt: skip
            for shape in shapes(config, 2):
                for op in shape.ops:
                    way, us = ours[op]
                    measured.add_sample(
                        op, shape, 8, {"graph_us": {f"fdattn/{way}": us, "gemm_alone": 20}}
                    )
            measured.layer(config, [8])
            found = {entry["op"]: entry for entry in measured.entries()}[LAYER]
            assert found["choices"] == [(8, form)]
            assert (found["columns"], found["features"]) == (5120, 12800)

    def test_a_new_run_takes_the_place_of_its_own_sizes_alone(self, tmp_path: Path) -> None:
        from benchmarks.distributed.crossover import write

        path = tmp_path / "table.json"
        about = dict(op=GATHER, gpu="H", dtype="bfloat16", columns=8, features=8)
        for date, sizes in (("a", (2, 4)), ("b", (2,)), ("c", (4,))):
            entries = [{**about, "ranks": ranks, "choices": [(1, date)]} for ranks in sizes]
            write(path, entries, Recorder(Results({"date": date}), None))
        document = json.loads(path.read_text())
        found = {entry["ranks"]: (entry["choices"], entry["run"]) for entry in document["entries"]}
        assert found == {2: ([[1, "b"]], "b"), 4: ([[1, "c"]], "c")}
        assert set(document["runs"]) == {"b", "c"}


class TestLookup:
    """The nearest table's nearest sizes, by the logarithms of rows, columns and features."""

    ENTRIES = tuple(
        dict(
            op=op, gpu="H", architecture="sm_90", dtype="bfloat16", ranks=2, columns=columns, features=4096,
            choices=[[16, f"few {columns}"], [1024, f"many {columns}"]],
        )
        for op in (GATHER, SCATTER, LAYER)
        for columns in (4096, 16384)
    )  # fmt: skip

    def find(
        self, op, rows, columns=4096, features=4096, ranks=2, entries=ENTRIES, gpu="H",
        architecture="sm_90", dtype="bfloat16",
    ):  # fmt: skip
        sizes = LinearSizes(rows, columns, features, ranks)
        return lookup(entries, op, Device(gpu, architecture), dtype, sizes)

    @pytest.mark.parametrize(
        ("rows", "columns", "features", "found"),
        [
            (16, 4096, 4096, "few 4096"),
            (40, 4096, 4096, "few 4096"),
            (300, 4096, 4096, "many 4096"),
            (1024, 7000, 4096, "many 4096"),
            (1024, 9000, 4096, "many 16384"),
            (4096, 4096, 2048, "many 4096"),
            (100_000, 4096, 4096, "many 4096"),  # beyond what was measured: its end
            (1, 128, 64, "few 4096"),
            (0, 0, 0, "few 4096"),
            (2048, 100_000, 100_000, "many 16384"),
        ],
    )
    @pytest.mark.parametrize("op", [GATHER, SCATTER, LAYER])
    def test_nearest(self, op: str, rows: int, columns: int, features: int, found: str) -> None:
        assert self.find(op, rows, columns, features) == found

    def test_what_no_table_speaks_for(self) -> None:
        for changes in (dict(architecture="sm_80"), dict(dtype="float32")):
            assert self.find(LAYER, 16, **changes) is None
        assert self.find(ALL_REDUCE, 16) is None

    def test_float16_takes_as_long_as_bfloat16(self) -> None:
        assert self.find(LAYER, 16, dtype="float16") == "few 4096"

    @pytest.mark.parametrize(
        ("gpu", "ranks", "found"),
        [
            ("H", 2, "H 2"),
            ("K", 2, "K 2"),
            ("X", 2, "H 2"),  # of two other GPUs the first by name
            ("H", 4, "H 4"),
            ("K", 4, "H 4"),  # the same number of ranks before the same GPU
            ("H", 8, "H 4"),
            ("X", 64, "H 4"),
            ("H", 3, "H 4"),  # 4 is nearer than 2, by ratio
        ],
    )
    def test_the_nearest_table(self, gpu: str, ranks: int, found: str) -> None:
        entries = [
            {**self.ENTRIES[0], "gpu": name, "ranks": count, "choices": [[16, f"{name} {count}"]]}
            for name, count in (("K", 2), ("H", 2), ("H", 4))
        ]
        assert self.find(GATHER, 16, ranks=ranks, entries=entries, gpu=gpu) == found


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("gpu", ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA H800"])
def test_thousands_of_rows_overlap_by_default(gpu: str, ranks: int) -> None:
    """Qwen3-32B's MLP at 4096 rows: never the plain collective on Hopper."""
    for op, columns, features in ((GATHER, 51200 // ranks, 5120), (SCATTER, 5120, 25600 // ranks)):
        sizes = LinearSizes(4096, columns, features, ranks)
        found = lookup(auto.table(), op, Device(gpu, "sm_90"), "bfloat16", sizes)
        assert found in ("copy_engine", "fused", "low_latency")


@pytest.fixture
def four_h100(monkeypatch) -> None:
    """Calls are looked up as on four H100 whose ranks share symmetric memory."""
    device = Device("NVIDIA H100 80GB HBM3", "sm_90")
    monkeypatch.setattr(auto.Device, "of", classmethod(lambda cls, of: device))
    monkeypatch.setattr(auto, "available", lambda *_: True)
    monkeypatch.setattr(one_sided, "check", lambda *_: None)


@pytest.mark.parametrize("rows", [1, 16, 128, 200, 256, 512, 1024, 2048, 4096, 100_000])
@pytest.mark.parametrize(("columns", "features"), [(5120, 6400), (8192, 2048), (8192, 7168)])
def test_float16_takes_no_method_that_has_no_float16(
    four_h100, rows: int, columns: int, features: int
) -> None:
    """The table is bfloat16's, and torch's symmetric-memory kernels are compiled for bfloat16 and float32."""
    x = torch.empty(rows, features, dtype=torch.float16)
    sizes = LinearSizes(rows, columns, features, 4)
    found = chosen_method("auto", "auto", "group", x, sizes, equal_sizes=True)
    assert found not in symmetric_memory.METHODS


def test_auto_overlaps_uneven_rows_too(four_h100) -> None:
    """`fused` has no form for them, the copy engines do."""
    x = torch.empty(1, 5120, dtype=torch.bfloat16)

    def choice(rows: list[int]) -> str:
        sizes = LinearSizes(sum(rows), 2560, 5120, 4)
        return chosen(GATHER, "auto", "group", x, sizes, rows, equal_sizes=True)

    assert choice([512] * 4) == "fused"
    assert choice([513, 513, 512, 512]) == "copy_engine"


def event(name, device, start, end, row=7, parent=None):
    """Of a profile, as `spans` reads it."""
    time = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return SimpleNamespace(
        name=name, device_type=device, device_resource_id=row, thread=row, time_range=time,
        cpu_parent=parent,
    )  # fmt: skip


def test_spans_are_the_device_s_and_begin_at_zero() -> None:
    events = [
        event("aten::mm", DeviceType.CPU, 0, 9),
        event("aten::inner", DeviceType.CPU, 1, 2, parent=object()),
        event("Memcpy PtoP (Device -> Device)", DeviceType.CUDA, 12, 30, row=20),
        event("nvjet_tst_128", DeviceType.CUDA, 10, 40),
        event("spin_kernel", DeviceType.CUDA, 3, 9),
    ]
    found = spans(events, on_gpu=True)
    assert found == [Span("nvjet_tst_128", 7, 0, 30), Span(events[2].name, 20, 2, 18)]
    assert [span.kind for span in found] == ["matmul", "copy"]
    assert spans(events, on_gpu=False) == [Span("aten::mm", 7, 0, 9)]
    kinds = {
        "_gemm_send_kernel": "matmul",
        "ncclDevKernel": "communication",
        "_await_kernel": "wait",
    }
    assert {name: Span(name, 0, 0, 1).kind for name in kinds} == kinds


def run_forms(kind: str, folder: str) -> None:
    """What each rank of `test_runs_by_kernels` does."""
    fast_interpreter.install()
    ranks = processes.join("cpu")
    for form in FORMS[kind]:
        words = form.format(folder=folder).split()
        assert runner.measure(_parser().parse_args(words), words, ranks) == 0, words
    sys.stdout.flush()
    torch.distributed.barrier()
    os._exit(0)  # as runner.run does


if __name__ == "__main__":
    run_forms(*sys.argv[1:])


def test_spans_begin_behind_the_kernel_that_calls_are_queued_behind() -> None:
    sleep = "at::cuda::(anonymous namespace)::spin_kernel(long)"
    events = [
        event("nvjet of the first call", DeviceType.CUDA, 0, 900),
        event(sleep, DeviceType.CUDA, 1000, 31000),
        event("nvjet", DeviceType.CUDA, 31002, 31040),
        event("ncclDevKernel_AllReduce", DeviceType.CUDA, 31041, 31050, row=9),
    ]
    found = spans(events, on_gpu=True)
    assert [(span.row, span.start, span.duration) for span in found] == [(7, 0, 38), (9, 39, 9)]
    assert spans(events[:2], on_gpu=True) == []
    # torch's fused ops sleep themselves: before, in the call that is not watched, and in the one that is.
    own = [
        event(sleep, DeviceType.CUDA, 500, 501),
        event(sleep, DeviceType.CUDA, 31000, 31001),
        event(sleep, DeviceType.CUDA, 31039, 31040, row=20),
    ]
    slept = spans([*events, *own], on_gpu=True)
    assert [span.start for span in slept] == [0, 39, 37]
    with pytest.raises(ValueError, match="no spin_kernel among 1 events"):
        spans(events[:1], on_gpu=True)
