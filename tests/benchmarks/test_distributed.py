"""The distributed runs: every command on two CPU ranks, its table, its check, and what it refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.distributed.commands import NAMES, normalised
from benchmarks.distributed.models import (
    CONFIGS,
    config_named,
    kv_bytes,
    layer_bytes,
    model_bytes,
    require_memory,
    whole_model,
)
from benchmarks.distributed.report import table
from benchmarks.results import Results

ROOT = Path(__file__).parents[2]
SMALL = "--model tiny-qwen3 --layers 1 --check"
RUNS = {
    "ring": "--seq 64 --dim 16 --heads 2 --causal --backward --strategy ring,star",
    "tp_mlp": f"--M 9 {SMALL}",
    "ag_gemm": f"--M 8 {SMALL}",
    "gemm_rs": f"--M 8 {SMALL}",
    "tp_attn": f"--bsz 2 --seq_len 8 --mode decode --use_allreduce --allreduce_method nccl {SMALL}",
    "e2e": f"--bsz 2 --seq-len 8 {SMALL}",
    "e2e_inference": "--bsz 2 --gen-len 3 --max-length 8 --backend all_reduce --model smollm2 --layers 1",
}


def call(*words: str, timeout: int = 120) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *words], capture_output=True, text=True,
        env=environment, timeout=timeout, check=False, cwd=ROOT,
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_runs_on_two_ranks(name: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    done = call(
        name,
        *RUNS[name].split(),
        "--gpus",
        "2",
        "--repeats",
        "1",
        "--device",
        "cpu",
        "--json",
        str(file),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = Results.load(file)
    assert results.meta["count"] == 2
    assert not [row for row in results.rows if row.metric == "error"]
    times = {row.impl for row in results.rows if row.metric == "latency_ms"}
    if name == "ring":
        assert times == {"fdattn/ring", "fdattn/star", "single_device"}
        assert "speed-up" in done.stdout
        assert "maximum difference" in done.stdout
    else:
        assert "eager" in times
        assert "| test | parameters | torch | ours | speed-up |" in done.stdout
        assert table(results)
    if "--check" in RUNS[name]:
        assert "check: largest error" in done.stdout
        assert ": ok" in done.stdout


def test_a_failed_check_is_the_exit_status(tmp_path: Path, monkeypatch) -> None:
    from benchmarks.distributed import layers

    monkeypatch.setattr(layers.peers, "mlp", lambda layer, x: x)
    monkeypatch.setattr(layers.TPMLP, "forward", lambda self, x: x)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    words = f"tp_mlp --M 8 {SMALL} --device cpu --repeats 1 --json {tmp_path / 'run.json'}"
    assert main(words.split()) == 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("tp_mlp --model gpt-5", "--model must be one of .*, got 'gpt-5'"),
        ("tp_mlp --model tiny-qwen3 --M 0", "--M must be at least 1, got 0"),
        ("e2e --model tiny-qwen3 --layers 9", "--layers must be from 1 to 2, got 9"),
        ("tp_mlp --use-allreduce --allreduce-method two_shot_multimem", "needs NVLink multicast"),
        ("e2e_inference --model tiny-qwen3 --gen-len 8 --max-length 8 --device cpu", "must be more than"),
        ("ring --strategy query_split", "must be of ring"),
        ("e2e --model Qwen/Qwen3-32B --device cpu --bsz 4096", r"needs [\d,]+ bytes on each rank, [\d,]+ are free"),
    ],
)  # fmt: skip
def test_wrong_commands_are_named(words: str, text: str, capsys, monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as stopped:
        main(words.split())
    assert stopped.value.code == 2
    assert re.search(text, capsys.readouterr().err)


def test_torchrun_variables_missing(capsys, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit):
        main(["tp_mlp", "--model", "tiny-qwen3", "--M", "8", "--device", "cpu"])
    assert "torchrun's variables must be set together" in capsys.readouterr().err


def test_underscores_and_hyphens_are_the_same() -> None:
    assert normalised(["--use_allreduce", "--seq_len=8", "one_shot", "tp_mlp"]) == [
        "--use-allreduce", "--seq-len=8", "one_shot", "tp_mlp",
    ]  # fmt: skip


def test_bytes_of_a_model_are_its_parameters() -> None:
    for name in ("tiny-qwen3", "smollm2"):
        config = config_named(name)
        model = whole_model(config, torch.device("cpu"), torch.bfloat16)
        norms = sum(p.nbytes for n, p in model.named_parameters() if n.endswith("norm.weight"))
        assert sum(p.nbytes for p in model.parameters()) - norms == model_bytes(
            config, torch.bfloat16, 1
        )
        layer = model.layers[0]
        linear = sum(p.nbytes for n, p in layer.named_parameters() if "norm" not in n)
        assert linear == layer_bytes(config, torch.bfloat16)
    config = CONFIGS["Qwen/Qwen3-32B"]
    assert 64e9 < model_bytes(config, torch.bfloat16, 1) < 66e9
    assert kv_bytes(config, torch.bfloat16, 4, 1, 1000) == 2 * 64 * 2 * 1000 * 128 * 2


def test_too_much_memory_is_refused_with_the_bytes() -> None:
    with pytest.raises(ValueError, match=r"it needs 9,223,372,036,854,775,808 bytes on each rank"):
        require_memory("it", 2**63, torch.device("cpu"), 2)
