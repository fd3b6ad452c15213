"""The runs of one host in one go: their limits, what a failure costs, their commands; two of them on two CPU processes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks import ranks
from benchmarks.__main__ import _parser, main, normalised
from benchmarks.distributed import parallel_options, suite
from benchmarks.distributed.suite import FAILED, NOT_STARTED, PASSED, TIMED_OUT, Step, arguments
from benchmarks.registry import BENCHMARKS
from benchmarks.report import bars
from benchmarks.report.tables import is_ours
from benchmarks.results import RESULTS_DIR, Results
from tests.interpreting import needs_interpreter

#: What runs do, by their commands, in place of torchrun's.
PROGRAMS = {
    "pass": "pass",
    "fail": "print('as it was'); print('no such kernel'); raise SystemExit(3)",
    "hang": "import time; time.sleep(600)",
}


@pytest.fixture
def programs(monkeypatch) -> None:
    def torchrun(count, given):
        return [sys.executable, "-c", PROGRAMS[given[0]]], dict(os.environ)

    monkeypatch.setattr(ranks, "torchrun", torchrun)


def steps(*names: str, limit_s: float = 60.0) -> list[Step]:
    return [Step(name, limit_s, name, name) for name in names]


def test_a_run_that_fails_or_hangs_costs_its_time_alone(programs, tmp_path, capfd) -> None:
    planned = [*steps("pass", "fail"), *steps("hang", limit_s=0.5), *steps("pass")]
    outcomes = suite.run(planned, 2, tmp_path, 600.0, on_gpus=True)
    assert [x.status for x in outcomes] == [PASSED, FAILED, TIMED_OUT, PASSED]
    assert outcomes[1].reason == "exit status 3: see fail.log"
    assert outcomes[2].reason == "its limit was 0 s"
    written = json.loads((tmp_path / "suite.json").read_text())
    assert written["gpus"] == 2
    assert [(x["name"], x["status"]) for x in written["runs"]] == [(x.name, x.status) for x in outcomes]  # fmt: skip
    printed = capfd.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines()] == [x.name for x in planned]
    assert "no such kernel" in printed.err


def test_what_has_no_time_left_is_not_started(programs, tmp_path) -> None:
    """100 s a reading of the clock: two readings a run, and one behind it."""
    readings = iter(range(0, 10_000, 100))
    outcomes = suite.run(steps("pass", "pass", "pass"), 2, tmp_path, 450.0, on_gpus=True, clock=lambda: next(readings))  # fmt: skip
    assert [x.status for x in outcomes] == [PASSED, PASSED, NOT_STARTED]
    assert json.loads((tmp_path / "suite.json").read_text())["runs"][2]["status"] == NOT_STARTED


def test_every_command_is_one(tmp_path) -> None:
    """On eight GPUs and on two CPU processes, and all that there is over ranks but whole generations."""
    named = set()
    for step in suite.STEPS:
        for gpus, on_gpus in ((8, True), (2, False)):
            options = _parser().parse_args(normalised(arguments(step, gpus, tmp_path, on_gpus)))
            parallel_options.check(options)
            assert options.benchmark.over_ranks
            assert options.json == str(tmp_path)
            assert options.device == ("cuda" if on_gpus else "cpu")
            named.add(options.benchmark.name)
    assert named == {x.name for x in BENCHMARKS.values() if x.over_ranks} - {"e2e_inference"}
    shared = next(x for x in suite.STEPS if x.name == "shared cache")
    assert "--kv-ranks 4" in " ".join(arguments(shared, 8, tmp_path, True))
    scaling = next(x for x in suite.STEPS if x.name == "scaling")
    assert "--sizes 1,2,4,8" in " ".join(arguments(scaling, 8, tmp_path, True))
    crossover = next(x for x in suite.STEPS if x.name == "tp_crossover")
    assert f"{tmp_path}/a folder/crossovers.json" in arguments(crossover, 8, tmp_path / "a folder", True)  # fmt: skip
    assert suite.LIMIT_S + suite.GRACE_S <= 480


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("suite --gpus 1", "--gpus must be at least 2, got 1"),
        ("suite --gpus 2 --limit-s 0", "--limit-s must be above 0, got 0"),
        ("suite --gpus 2 --only rings", "--only must have parts of the names correctness, "),
    ],
)
def test_wrong_commands_are_refused(command: str, error: str, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(command.split())
    assert error in capsys.readouterr().err


@pytest.mark.slow
def test_no_rank_outlives_its_run(monkeypatch, tmp_path) -> None:
    program = tmp_path / "sleeps.py"
    program.write_text(f"import os, time\nopen(f'{tmp_path}/{{os.getpid()}}.pid', 'w').close()\ntime.sleep(600)\n")  # fmt: skip
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    monkeypatch.setattr(ranks, "torchrun", lambda *_: ([*start, str(program)], dict(os.environ)))
    (outcome,) = suite.run(steps("hang", limit_s=30.0), 2, tmp_path, 600.0, on_gpus=True)
    assert outcome.status == TIMED_OUT
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@needs_interpreter
@pytest.mark.slow
def test_two_cpu_processes(tmp_path) -> None:
    """All runs, tiny; each leaves its results file."""
    given = ["suite", "--gpus", "2", "--out", str(tmp_path)]
    assert main(given) == 0
    found = {}
    for path in tmp_path.glob("*_cpux2_*.json"):
        results = Results.load(path)
        assert results.meta["count"] == 2
        assert not [x for x in results.rows if x.metric == "error" and is_ours(x.impl)]
        found[path.stem.rsplit("_", 1)[1]] = results
    # The forms of a layer for few rows have files of their own.
    assert len(found) == len(suite.STEPS)
    assert {"dist-decode-correctness", "dist-decode-compare", "dist-decode-scaling", "tp-crossover"} < set(found)  # fmt: skip
    assert "e2e-all-reduce-decode-bsz2-kv2" in found


def test_bars_are_judged_by_their_files(tmp_path) -> None:
    """The published runs on four GPUs, by hand: at 32k tokens 19.2 of 39.0 µs, a product and its scatter 423 of 536."""
    for name in ("dist-decode-compare", "ag-gemm-*", "gemm-rs-*"):
        (path,) = RESULTS_DIR.glob(f"*_H100-80GB-HBM3x4_{name}.json")
        shutil.copy(path, tmp_path)
    shutil.copy(next(RESULTS_DIR.glob("*_H200x4_ring-65536.json")), tmp_path)
    text = bars.table(tmp_path)
    for line in (
        "| B1 H32/8 N32768 D128 bf16 | auto / best of ours | 1.00 | at most 1.03 |",
        "| B1 H32/8 N32768 D128 bf16 | ours / stock | 0.49 | at most 0.5 |",
        "| B1 H32/8 N131072 D128 bf16 | ours / stock | **0.72** | at most 0.6 |",
        "| gemm_rs M4096 Qwen/Qwen3-32B bf16 x4 | NCCL / ours | 1.27 | at least 1.2 |",
        "| gemm_rs M4096 Qwen/Qwen3-32B bf16 x4 | auto / best of ours | 1.02 | at most 1.03 |",
        "| ring B1 H16/16 N65536 D128 causal bf16 forward | context_parallel / ours | 1.20 | at least 1 |",
    ):  # fmt: skip
        assert line in text.splitlines()
    assert "B16" not in "".join(x for x in text.splitlines() if "stock" in x)
    assert bars.table(tmp_path / "none") == ""
