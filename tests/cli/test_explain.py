"""`fdattn explain`: a table of what becomes of each attention of the user's function."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="needs the extra cli")
pytest.importorskip("rich", reason="needs the extra cli")

from tests import checkout
from tests.cli.commands import invoke, refused
from tests.documents import ROOT, python_blocks

CASE = """\
import torch
from helper import attend

def fn(q, k, v, *, scale=None):
    first = attend(q, k, v, scale)
    return (q @ k.mT).softmax(-2) @ first

def qkv():
    return [torch.randn(1, 2, 8, 16) for _ in range(3)]

def make():
    return fn, qkv(), {"scale": 0.5}

def all_ours():
    return attend, qkv()

def none():
    return torch.sin, (torch.ones(3),)

def ours():
    import torch_fdattn

    return torch_fdattn.attention, qkv()

class Layer(torch.nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()

def defaults(scale=0.5, *more, **others):
    return fn, qkv(), {"scale": scale}

def wrong():
    return fn

def wronger():
    return fn, 3

def alone():
    return fn, torch.ones(3)

def raising(q, k, v):
    if q.sum() > 1e9:
        return q
    raise KeyError("no such key")

def misshaped(q, k, v):
    return attend(q, k[..., :3], v)

def raises():
    return raising, qkv()

def raises_in_a_trace():
    return misshaped, qkv()

def raises_itself():
    raise OSError("no weights\\nhere")

def too_few():
    return raising, qkv()[:2]

number = 3
model = torch.nn.Linear(2, 2)
"""
HELPER = """\
import torch
import torch.nn.functional as F

def attend(q, k, v, scale=None):
    at = torch.arange(8)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=at[:, None] >= at, scale=scale)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    (tmp_path / "case.py").write_text(CASE)
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("case", "helper"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in ("case", "helper"):
        sys.modules.pop(name, None)


MIXED = """\
source line  written as                    becomes           mask and notes, or why it stays
helper.py:6  scaled_dot_product_attention  fdattn.attention  mask: causal
case.py:6    matmul, softmax, matmul       left              softmax-dim: the softmax is over dimension -2 of 4
1 of 2 attention sites rewritten, in 1 graph
"""


def test_a_table_of_what_became_of_each_site(folder):
    result = invoke("explain", "case.py:make")
    assert result.exit_code == 0, result.output
    assert result.stdout == MIXED


def test_require_all_is_an_exit_code(folder):
    result = invoke("explain", "case.py:make", "--require-all")
    assert (result.exit_code, result.stdout) == (1, MIXED)
    result = invoke("explain", "case:all_ours", "--require-all")
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("1 of 1 attention sites rewritten, in 1 graph\n")


def test_a_function_without_attention(folder):
    result = invoke("explain", "case:none")
    assert (result.exit_code, result.stdout) == (
        0, "no attention found in 1 graph\n",
    )  # fmt: skip


def test_a_function_that_calls_our_ops_already(folder):
    result = invoke("explain", "case:ours")
    assert (result.exit_code, result.stdout) == (
        0,
        "no attention found in 1 graph; it calls ops of torch_fdattn itself, which stay: "
        "1 of fdattn.attention\n",
    )


def test_arguments_with_defaults_are_none(folder):
    result = invoke("explain", "case.py:defaults")
    assert result.stdout == MIXED, result.output


def test_a_file_elsewhere(folder, monkeypatch, tmp_path_factory):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    result = invoke("explain", f"{folder}/case.py:all_ours")
    assert result.exit_code == 0, result.output
    assert f"{folder}/helper.py:6" in result.stdout


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("case.py", "TARGET must be FILE.py:NAME or MODULE:NAME, got case.py"),
        ("case.py:", "TARGET must be FILE.py:NAME or MODULE:NAME, got case.py:"),
        ("missing.py:make", "missing.py: no such file"),
        ("no.such.module:make", "no.such.module: no such module"),
        (
            "case.py:nothing",
            "case.py has no function nothing; without arguments it has: qkv, make, all_ours, none, ours, defaults, wrong, "
            "wronger, alone, raises, raises_in_a_trace, raises_itself, too_few",
        ),
        ("helper:make", "helper has no function make; without arguments it has: none"),
        ("case.py:number", "case.py:number must be a function, got int"),
        (
            "case.py:fn",
            r"case.py:fn must be a function without arguments that returns \(function or module, example arguments\), "
            r"got one that takes q, k, v: add `def case\(\): return fn, \(q, k, v,\)` to case.py, with values for "
            "q, k, v, and explain case.py:case",
        ),
        (
            "case.py:Layer",
            r"case.py:Layer must be .* got one that takes width: add .* return Layer\(width\), \(tensors,\)`",
        ),
        (
            "case.py:model",
            r"case.py:model must be .* got one that takes input: add .* return model, \(input,\)`",
        ),
        ("case.py:wrong", r"must return \(function, arguments\) or .*, got function"),
        ("case.py:wronger", r"must return .*, got \('function', 'int'\)"),
        ("case.py:alone", r"got \('function', 'Tensor'\); arguments is a tuple: \(tensor,\)"),
    ],
)
def test_what_the_user_can_mend_is_one_line(folder, target, message):
    refused(message, "explain", target)


def test_what_the_documents_show_can_be_explained(folder):
    """The page's complete file, and the example."""
    snippets, _ = python_blocks(ROOT / "docs" / "torch-compile.md")
    (snippet,) = (x for x in snippets if "def make():" in x)
    (folder / "model.py").write_text(snippet)
    for target, sites in (("model.py", 1), (ROOT / "examples" / "compile_sdpa.py", 2)):
        result = invoke("explain", f"{target}:make")
        assert result.stdout.endswith(f"{sites} of {sites} attention sites rewritten, in 1 graph\n")


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("case.py:raises", "case.py:{raise KeyError}, in raising: KeyError: 'no such key'"),
        ("case.py:raises_itself", "case.py:{raise OSError}, in raises_itself: OSError: no weights here"),
        (
            "case.py:raises_in_a_trace",
            "helper.py:6, in attend: RuntimeError: Expected size for first two dimensions of batch2 tensor to be: "
            "[2, 16] but got: [2, 3].",
        ),
        ("case.py:too_few", "TypeError: raising() missing 1 required positional argument: 'v'"),
        ("broken.py:make", "broken.py:1, in <module>: ModuleNotFoundError: No module named 'no_such_package'"),
        ("broken:make", "broken.py:1, in <module>: ModuleNotFoundError: No module named 'no_such_package'"),
        ("syntax.py:make", "syntax.py:2: SyntaxError: '(' was never closed"),
    ],
)  # fmt: skip
def test_what_the_users_function_raises_is_one_line(folder, target, line):
    (folder / "syntax.py").write_text("x = 1\ny = (\n")
    for marked in re.findall("{(.*?)}", line):
        number = next(i for i, text in enumerate(CASE.splitlines(), 1) if marked in text)
        line = line.replace(f"{{{marked}}}", str(number))
    result = invoke("explain", target)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.replace(f"{folder}/", "") == f"fdattn: {target}: {line}\n"


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_line(folder):
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "torch_fdattn", "explain", "case.py:none"], stdout=full,
            stderr=subprocess.PIPE, text=True, timeout=300, env=checkout.environment(),
        )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr == "fdattn: cannot write the text (No space left on device)\n"
