"""`-h` and `--help` of every command line, and how soon they answer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="needs the extra cli")
pytest.importorskip("rich", reason="needs the extra cli")

from tests import checkout
from tests.cli.commands import invoke
from torch_fdattn.cli.setup import DType, KVDType, KVStrategy, TPStrategy

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True, cwd=ROOT,
        env=checkout.environment(),
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    "command",
    ["", "generate", "chat", "serve", "bench", "bench serve", "explain", "tune", "doctor"],
)
def test_h_is_help(command):
    words = command.split()
    short, long = invoke(*words, "-h"), invoke(*words, "--help")
    assert short.exit_code == 0, short.output
    assert short.stdout == long.stdout
    assert re.search(r"(?<!-)-h\b", short.stdout)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_names_to_choose_from_are_not_broken(command):
    """At 80 columns, as CliRunner has them."""
    shown = invoke(command, "--help").stdout
    for kind in (DType, TPStrategy, KVStrategy, KVDType):
        assert not [name for name in kind if not re.search(rf"(?<![\w|]){name}[,.\s]", shown)]


@pytest.mark.parametrize("module", ["torch_fdattn", "benchmarks"])
def test_h_is_help_of_modules(module):
    assert re.search(r"(?<!-)-h\b", run("-m", module, "-h"))


def test_h_is_help_of_benchmarks(capsys):
    from benchmarks.__main__ import main

    shown = []
    for word in ("-h", "--help"):
        with pytest.raises(SystemExit, match="0"):
            main([word])
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != ""


def test_help_takes_under_half_a_second_beyond_the_import():
    code = (
        "import torch_fdattn, sys, time; start = time.process_time()\n"
        "sys.argv = ['fdattn', '--help']\n"
        "from torch_fdattn.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: print(time.process_time() - start)"
    )
    # Processor time: what else runs on the machine is no concern of the command's.
    assert any(float(run("-c", code).split()[-1]) < 0.5 for _ in range(3))
