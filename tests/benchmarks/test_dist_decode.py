"""Sharded decode's benchmark: on two CPU ranks of torchrun and of mpirun, its rows, its exit status.

Run under torchrun, this file makes the runs of FORMS on its ranks: `test_every_case_under_torchrun`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import _parser, main, normalised
from benchmarks.distributed import mpi
from benchmarks.report.plot import lines_of, plot, plottable
from benchmarks.report.tables import render
from benchmarks.results import Results, Row, command_line
from tests import checkout, fast_interpreter
from tests.benchmarks.test_distributed import not_under_torchrun  # noqa: F401
from tests.interpreting import needs_interpreter

MPIRUN = Path(sys.executable).parent / "mpirun"
CASE = "B1 H2/1 N32 D16 fp32 cpu"
#: The first tiny case alone: an interpreted kernel takes a tenth of a second.
ONE = ["--device", "cpu", "--cases", "tiny,not H2/2", "--lengths", "full"]
FORMS = {
    "correctness": "--strategies all_gather,ring --vs nccl",
    "compare": "--strategies all_gather,push --repeats 1",
    "latency": "--repeats 1",
    "scaling": "--strategies all_gather --sizes 2,1 --repeats 1",
}


def start(program: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess:
    """A program in `folder`, where the benchmark leaves its results."""
    environment = checkout.environment(OMP_NUM_THREADS="1")
    environment.pop("TRITON_INTERPRET", None)  # the benchmark must see to that itself
    environment.update(variables)
    return subprocess.run(
        program, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )  # fmt: skip


def rows_of(results: Results, metric: str) -> dict[str, set[str]]:
    """case → the implementations that have a row of this metric."""
    found: dict[str, set[str]] = {}
    for row in results.rows:
        if row.metric == metric:
            found.setdefault(row.case, set()).add(row.impl)
    return found


@needs_interpreter
@pytest.mark.slow
def test_correctness_under_mpirun(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    if not MPIRUN.exists():
        pytest.skip("needs mpirun beside the interpreter: the extra `bench`")
    from torch_fdattn.dist.decode.op import STRATEGIES

    words = ["-m", "benchmarks", "dist_decode", "--case", "correctness", *ONE]
    done = start([str(MPIRUN), "-np", "2", sys.executable, *words], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results = Results.load(tmp_path / "compare_results.json")
    assert results.meta["gpu"] == "cpu"
    assert results.meta["command"].startswith("mpirun -np 2 python -m benchmarks dist_decode")
    assert not rows_of(results, "error")
    ours = {f"fdattn/{name}" for name in STRATEGIES}
    assert rows_of(results, "max_abs_err") == {CASE: {*ours, "gloo", "mpi"}}


@needs_interpreter
def test_every_case_under_torchrun(tmp_path: Path) -> None:
    program = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    # Here the imports of this file come first, and the benchmark's own setting too late.
    done = start([*program, __file__], tmp_path, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name: Results.load(tmp_path / f"{name}.json") for name in FORMS}
    assert not any(rows_of(results, "error") for results in found.values())
    ways = {"fdattn/all_gather", "fdattn/push", "gloo"}
    assert rows_of(found["correctness"], "max_abs_err") == {CASE: {"fdattn/all_gather", "fdattn/ring", "gloo"}}  # fmt: skip
    assert rows_of(found["compare"], "max_abs_err") == {CASE: ways}
    assert rows_of(found["compare"], "eager_us") == {CASE: {*ways, "local"}}
    assert rows_of(found["compare"], "not_measured") == {CASE: {"mpi"}}
    assert rows_of(found["latency"], "eager_us") == {
        f"message {size} B cpu": {"fdattn/one_sided", "gloo"} for size in (4, 1024, 65536)
    }
    scaling = rows_of(found["scaling"], "scaling")
    assert set(scaling) == {f"B1 H2/1 N32 D16 fp32 ranks{n} cpu" for n in (1, 2)}
    assert plottable(found["scaling"]) == ["ranks"]


def run_forms() -> None:
    """What each rank of the test above does."""
    from benchmarks import ranks as processes
    from benchmarks import runner

    fast_interpreter.install()
    ranks = processes.join("cpu")
    for name, words in FORMS.items():
        given = ["dist_decode", "--case", name, *ONE, *words.split(), "--json", f"{name}.json"]
        options = _parser().parse_args(normalised(given))
        assert runner.measure(options, given, ranks) == 0, name
    sys.stdout.flush()
    os._exit(0)  # as runner.run does


@pytest.mark.parametrize(
    ("failure", "status", "metric"),
    [
        (None, 1, "first call: AssertionError: out"),
        (NotImplementedError("not on this device"), 0, "not on this device"),
        (RuntimeError("a peer died"), 1, "a peer died"),
    ],
)
def test_exit_status(failure, status, metric, tmp_path, monkeypatch, not_under_torchrun) -> None:  # noqa: F811
    """A wrong result and a failure count; a refusal is a row."""
    import torch_fdattn

    right = torch_fdattn.dist.decode

    def decode(*tensors, **options):
        if failure is not None:
            raise failure
        out, lse = right(*tensors, **options)
        return out + 1, lse

    monkeypatch.setattr(torch_fdattn.dist, "decode", decode)
    file = tmp_path / "run.json"
    words = [
        "dist_decode",
        "--case",
        "correctness",
        *ONE,
        "--strategies",
        "all_gather",
        "--vs",
        "nccl",
    ]
    assert main([*words, "--json", str(file)]) == status
    errors = [row for row in Results.load(file).rows if row.metric == "error"]
    assert [row.impl for row in errors] == ["fdattn/all_gather"]
    assert metric in str(errors[0].value)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--case speed", "invalid choice: 'speed'"),
        ("--vs fa3", "must be of nccl, mpi or none, got 'fa3'"),
        ("--lengths even --device cpu", "--lengths must be of full, uniform, power, short, got 'even'"),
        ("--heads 3 --kv-heads 2 --device cpu", "--heads must be a multiple of --kv-heads 2, got 3"),
        ("--strategies rings --device cpu", "--strategies must be of all_gather, .*auto, got 'rings'"),
        ("--batch 0", "--batch must be at least 1, got 0"),
        ("--cases nothing --device cpu", "--cases must match one of"),
    ],
)  # fmt: skip
def test_wrong_commands_are_named(
    words, text, capsys, not_under_torchrun, tmp_path, monkeypatch  # noqa: F811
) -> None:  # fmt: skip
    """And leave the results of an earlier run alone."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["dist_decode", *words.split()])
    assert stopped.value.code == 2
    assert re.search(text, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


META = {
    "gpu": "NVIDIA H200", "count": 4, "torch": "2.11.0", "triton": "3.6.0", "commit": "abc",
    "command": "torchrun …", "date": "2026-01-31T23:59:59Z",
}  # fmt: skip
NAME = "B1 H32/8 N32768 D128 bf16"


def test_sharded_decode_has_baselines() -> None:
    times = {
        "fdattn/auto": 18.5,
        "fdattn/star": 40.0,
        "nccl": 34.4,
        "local": 13.5,
        "pure_read": 9.9,
    }
    results = Results(META, [Row(NAME, impl, "graph_us", us, "us") for impl, us in times.items()])
    text = render(results)
    assert "| 18.5 | 54 | 40.0 (2.16×) | 25 | 34.4 (1.86×) | 29 |" in text
    assert "This run counts: 2 floors and peers within 8 % of baseline." in text
    slow = Results(META, [*results.rows[:2], Row(NAME, "nccl", "graph_us", 44.4, "us")])
    assert "1 of 1 floors and peers over 8 % slower than baseline" in render(slow)


def test_the_scaling_plot_has_a_line_for_each_length(tmp_path: Path) -> None:
    rows = [
        Row(f"B1 H64/8 N{n} D128 bf16 ranks{k}", "fdattn/auto", "graph_us", n / 1e3 / k, "us")
        for n in (32768, 1048576)
        for k in (1, 2, 4)
    ]
    results = Results(META, rows)
    metric, lines = lines_of(results)
    assert metric == "graph_us"
    assert [shape.kv_len for shape in lines] == [32768, 1048576]
    assert all(sorted(times) == [1, 2, 4] for times in lines.values())
    pytest.importorskip("matplotlib")
    text = plot(results, tmp_path / "scaling.svg").read_text()
    assert "1,048,576 tokens" in text
    assert "ideal" in text


def test_variables_of_mpi(monkeypatch) -> None:
    for names in mpi._NAMES:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    assert not mpi.under_mpirun()
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert not mpi.under_mpirun()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert mpi.under_mpirun()
    monkeypatch.setenv("RANK", "0")  # torchrun's own: nothing to adopt
    mpi.adopt()
    assert (
        command_line(["dist_decode"], 2, mpi=True)
        == "mpirun -np 2 python -m benchmarks dist_decode"
    )


if __name__ == "__main__":
    run_forms()
