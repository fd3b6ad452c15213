"""The distributed runs: every command on two CPU ranks, its table, its check, and what it refuses.

Run under torchrun, this file makes the runs of FORMS on its ranks: `test_other_forms_on_two_ranks`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks import ranks as processes
from benchmarks import runner
from benchmarks.__main__ import _parser, main, normalised
from benchmarks.distributed import parallel_options
from benchmarks.distributed.end_to_end import _Model
from benchmarks.distributed.models import (
    CONFIGS,
    config_named,
    kv_bytes,
    model_bytes,
    require_memory,
    unsharded_model,
)
from benchmarks.peers.eager_parallel import TorchModel
from benchmarks.registry import BENCHMARKS
from benchmarks.report.parallel import table
from benchmarks.results import Recorder, Results
from benchmarks.timing import compare
from tests import checkout
from torch_fdattn.dist.tensor_parallel.layers import TPHead
from torch_fdattn.models.transformer import MLP

ROOT = Path(__file__).parents[2]
SMALL = "--model tiny-qwen3 --layers 1 --check"
RUNS = {
    "ring": "--seq 64 --dim 16 --heads 2 --causal --backward --strategy ring,star",
    "tp_mlp": f"--M 9 {SMALL}",
    "ag_gemm": f"--M 9 {SMALL}",
    "gemm_rs": f"--M 8 {SMALL}",
    "tp_attn": f"--bsz 2 --seq_len 8 --mode decode --use_allreduce --allreduce_method nccl {SMALL}",
    "e2e": f"--bsz 2 --seq-len 8 {SMALL}",
    "e2e_inference": "--bsz 2 --gen-len 3 --max-length 8 --backend all_reduce --model smollm2 --layers 1",
}
INFERENCE = "e2e_inference --bsz 1 --gen-len 2 --max-length 4 --model tiny-qwen3 --layers 1"
#: One start of ranks for all of them. With M or bsz 1 the second rank has no row.
FORMS = [
    f"tp_mlp --M 1 {SMALL}",
    f"tp_mlp --M 9 --use-allreduce --allreduce-method nccl,auto {SMALL}",
    f"ag_gemm --M 9 {SMALL}",
    f"gemm_rs --M 1 {SMALL}",
    f"tp_attn --bsz 1 --seq-len 4 --mode decode {SMALL}",
    f"tp_attn --bsz 3 --seq-len 3 --mode prefill {SMALL}",
    "ring --seq 64 --dim 16 --heads 4 --kv-heads 2 --causal --documents 12 --backward",
    f"{INFERENCE} --backend ag_rs",
    f"{INFERENCE} --backend torch",
]
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def call(*words: str, timeout: int = 120) -> subprocess.CompletedProcess:
    environment = checkout.environment(OMP_NUM_THREADS="1")
    return subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True,
        env=environment, timeout=timeout, check=False, cwd=ROOT,
    )  # fmt: skip


@pytest.fixture
def not_under_torchrun(monkeypatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


def test_every_system_is_run() -> None:
    # test_dist_decode.py and test_tp_ways.py have these
    over_ranks = {name for name, benchmark in BENCHMARKS.items() if benchmark.over_ranks}
    assert over_ranks == {*RUNS, "dist_decode", "tp_crossover"}


#: Each starts ranks anew; the others' systems are among FORMS, too.
QUICK = ("ring",)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[] if x in QUICK else pytest.mark.slow) for x in RUNS]
)
def test_runs_on_two_ranks(name: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    done = call(
        "benchmarks",
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
        errors = [row.impl for row in results.rows if row.metric == "max_abs_err"]
        assert errors == ["fdattn/ring", "fdattn/star"]
        for text in ("speed-up   ", "maximum difference", "| ring ring |", "| ring star |"):
            assert done.stdout.count(text) == (2 if text.startswith("|") else 4), done.stdout
    else:
        assert "eager" in times
        assert "| test | parameters | torch | ours | speed-up |" in done.stdout
        assert table(results)
    if "--check" in RUNS[name]:
        assert "check: largest error" in done.stdout
        assert ": ok" in done.stdout


@pytest.mark.slow
def test_other_forms_on_two_ranks() -> None:
    start = "torch.distributed.run --standalone --nproc-per-node 2"
    done = call(*start.split(), __file__)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = sum("--check" in words for words in FORMS) + 1  # one of them checks two methods
    assert done.stdout.count("check: largest error") == checks
    # Of torch alone there is nothing to compare.
    assert done.stdout.count("| test | parameters | torch | ours | speed-up |") == len(FORMS) - 1


def test_one_process_has_the_plain_model() -> None:
    """And the same logits as eager torch over the same weights and cache."""
    words = "e2e --bsz 1 --seq-len 4 --model tiny-qwen3 --gpus 1 --device cpu --repeats 1"
    done = call("benchmarks", *words.split())
    assert done.returncode == 0, done.stdout + done.stderr
    for mode in ("prefill", "decode"):
        assert re.search(rf"^\| e2e \| .* x1 {mode} cpu \|", done.stdout, re.MULTILINE)
    ranks = SimpleNamespace(size=1, device=torch.device("cpu"), group_name=None)
    options = _parser().parse_args([*words.split(), "--dtype", "fp32"])
    options.allreduce_method, options.strategy = ["auto"], ["auto"]
    made = _Model(options, ranks, 2, 8, "all_reduce")
    assert type(made.model.layers[0].mlp) is MLP
    prompts = made.prompts(2, 5)
    found = made.batch(prompts).clone()
    made.batch.truncate(0)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        torch.testing.assert_close(found, made.torch(prompts, 0), rtol=1e-4, atol=1e-4)
    finally:
        torch.distributed.destroy_process_group()


def run_forms() -> None:
    """What each rank of the test above does."""
    ranks = processes.join("cpu")
    for words in FORMS:
        options = _parser().parse_args([*normalised(words.split()), "--repeats", "1"])
        assert runner.measure(options, words.split(), ranks) == 0, words
    _check_uneven_head(ranks)
    _check_alone(ranks)
    sys.stdout.flush()
    torch.distributed.barrier()
    os._exit(0)  # as runner.run does


def _check_uneven_head(ranks: processes.Ranks) -> None:
    """torch's logits over a vocabulary that does not divide by the ranks."""
    torch.manual_seed(0)
    head, x = nn.Linear(4, 5, bias=False), torch.randn(3, 4)
    model = SimpleNamespace(
        config=SimpleNamespace(num_layers=0, tie_embeddings=False),
        lm_head=TPHead(head, ranks.group_name),
    )
    torch.testing.assert_close(TorchModel(model, None, ranks.size)._head(x), head(x))


def _check_alone(ranks: processes.Ranks) -> None:
    """Rank 0 alone makes the call, and all ranks have its time."""
    calls = []

    def sleep() -> None:
        calls.append(None)
        time.sleep(0.1)

    recorder = Recorder(Results({}), None)
    times = compare(ranks, recorder, "case", {"impl": sleep}, repeats=1, alone={"impl"})
    assert bool(calls) == (ranks.rank == 0)
    assert times["impl"] >= 100


def test_a_failed_check_is_the_exit_status(tmp_path: Path, monkeypatch, not_under_torchrun) -> None:
    from benchmarks.distributed import layers
    from torch_fdattn.dist.tensor_parallel import inference as tp_inference

    monkeypatch.setattr(layers.peers, "mlp", lambda layer, x: x)
    monkeypatch.setattr(tp_inference.FusedTPMLP, "forward", lambda self, x: x)
    words = f"tp_mlp --M 8 {SMALL} --device cpu --repeats 1 --json {tmp_path / 'run.json'}"
    assert main(words.split()) == 1


def test_every_strategy_of_a_ring_is_checked(monkeypatch, not_under_torchrun) -> None:
    from benchmarks.distributed import ring

    right = ring.ring_attention

    def wrong(*tensors, strategy: str, **options) -> tuple:
        out, *rest = right(*tensors, strategy=strategy, **options)
        return (out + torch.nan if strategy == "star" else out, *rest)

    monkeypatch.setattr(ring, "ring_attention", wrong)
    words = "ring --seq 8 --dim 16 --gpus 1 --device cpu --repeats 1 --no-single --strategy"
    assert main([*words.split(), "ring"]) == 0
    assert main([*words.split(), "ring,star"]) == 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("tp_mlp --model gpt-5", "--model must be one of .*, got 'gpt-5'"),
        ("tp_mlp --model tiny-qwen3 --M 0", "--M must be at least 1, got 0"),
        ("e2e --model tiny-qwen3 --layers 9", "--layers must be from 1 to 2, got 9"),
        ("tp_mlp --use-allreduce --allreduce-method two_shot_multimem", "needs NVLink multicast"),
        ("e2e_inference --model tiny-qwen3 --gen-len 8 --max-length 8 --device cpu", "must be more than"),
        ("ring --strategy query_split", "must be of ring"),
        ("e2e --model tiny-qwen3 --kv-ranks 2 --device cpu", "--kv-ranks must divide the 1 ranks, got 2"),
        ("dist_decode --case scaling --sizes 1,3 --device cpu", "--sizes must be from 1 to 1, the number of ranks, got 3"),
        ("tp_mlp --use-allreduce --strategy fused", "--strategy must be left out where .* got fused"),
        ("tp_mlp --strategy fast", "must be of auto, collective, copy_engine, fused, low_latency, got 'fast'"),
        ("e2e --strategy fused,collective", "--strategy must be one of a model, got fused,collective"),
        ("e2e --model Qwen/Qwen3-32B --device cpu --bsz 4096", r"needs [\d,]+ bytes on each rank, [\d,]+ are free"),
        *((f"{words} --model tiny-qwen3 --device cpu", r"of tiny-qwen3 needs [\d,]{15,} bytes on each rank") for words in (
            "tp_mlp --M 200000000000", "ag_gemm --M 200000000000", "gemm_rs --M 200000000000 --use-allreduce",
            "tp_attn --bsz 4000000000", "tp_attn --bsz 4000000000 --mode decode --check",
        )),
        *((f"{words} --model tiny-qwen3 --device cpu", "'one_shot' needs CUDA tensors") for words in (
            "tp_mlp --M 8 --use-allreduce --allreduce-method one_shot",
            "e2e_inference --gen-len 1 --max-length 2 --allreduce-method one_shot",
        )),
    ],
)  # fmt: skip
def test_wrong_commands_are_named(words: str, text: str, capsys, not_under_torchrun) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words.split())
    assert stopped.value.code == 2
    assert re.search(text, capsys.readouterr().err)


def test_a_method_that_takes_no_fp16() -> None:
    words = "tp_mlp --use-allreduce --allreduce-method two_shot --dtype fp16"
    options = _parser().parse_args(words.split())
    with pytest.raises(ValueError, match=r"--allreduce-method: .* needs bfloat16 or float32"):
        parallel_options.check_method(options, "cuda")
    options.use_allreduce = False  # then the method is not used
    parallel_options.check_method(options, "cpu")


MASTER = "MASTER_ADDR=localhost MASTER_PORT=29500"


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ("RANK=0", "got RANK without WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ("WORLD_SIZE=2", "got WORLD_SIZE without RANK, MASTER_ADDR, MASTER_PORT"),
        ("LOCAL_RANK=0", "got LOCAL_RANK without RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        (f"LOCAL_RANK=0 WORLD_SIZE=2 {MASTER}", "got WORLD_SIZE, LOCAL_RANK without RANK"),
        (f"RANK= WORLD_SIZE=2 {MASTER}", "got WORLD_SIZE without RANK"),
        (f"RANK=x WORLD_SIZE=2 {MASTER}", "RANK must be an integer of at least 0, got 'x'"),
        (f"RANK=0 WORLD_SIZE=0 {MASTER}", "WORLD_SIZE must be an integer of at least 1, got '0'"),
        (f"RANK=2 WORLD_SIZE=2 {MASTER}", "RANK must be below WORLD_SIZE 2, got 2"),
        (f"RANK=0 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=1 {MASTER}", "LOCAL_RANK must be below LOCAL_WORLD_SIZE 1, got 1"),
        (f"RANK=0 WORLD_SIZE=2 {MASTER}", "--gpus must be 2 like torchrun's WORLD_SIZE, or left out, got 4"),
    ],
)  # fmt: skip
def test_wrong_variables_of_torchrun_are_named(
    variables: str, text: str, capsys, monkeypatch, not_under_torchrun
) -> None:
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    with pytest.raises(SystemExit) as stopped:
        main(["tp_mlp", "--model", "tiny-qwen3", "--M", "8", "--device", "cpu", "--gpus", "4"])
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err


def test_a_master_alone_is_no_torchrun(monkeypatch, not_under_torchrun) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert not processes.under_torchrun()


def test_underscores_and_hyphens_are_the_same() -> None:
    assert normalised(["--use_allreduce", "--seq_len=8", "one_shot", "tp_mlp"]) == [
        "--use-allreduce", "--seq-len=8", "one_shot", "tp_mlp",
    ]  # fmt: skip


def test_bytes_of_a_model_are_its_parameters() -> None:
    for name in ("tiny-qwen3", "smollm2"):
        config = config_named(name)
        model = unsharded_model(config, torch.device("cpu"), torch.bfloat16)
        norms = sum(p.nbytes for n, p in model.named_parameters() if n.endswith("norm.weight"))
        assert sum(p.nbytes for p in model.parameters()) - norms == model_bytes(
            config, torch.bfloat16, 1
        )
    config = CONFIGS["Qwen/Qwen3-32B"]
    assert 64e9 < model_bytes(config, torch.bfloat16, 1) < 66e9
    assert kv_bytes(config, torch.bfloat16, 4, 1, 1000) == 2 * 64 * 2 * 1000 * 128 * 2


def test_too_much_memory_is_refused_with_the_bytes() -> None:
    with pytest.raises(ValueError, match=r"it needs 9,223,372,036,854,775,808 bytes on each rank"):
        require_memory("it", 2**63, torch.device("cpu"), 2)


if __name__ == "__main__":
    run_forms()
