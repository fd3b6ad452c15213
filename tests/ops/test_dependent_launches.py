"""Kernels that may start before the one ahead of them has ended: what they may do before they wait."""

import ast
from pathlib import Path

import torch_fdattn

ROOT = Path(torch_fdattn.__file__).parent


def calls(function: ast.FunctionDef, name: str) -> list[int]:
    """The lines in which it calls that function."""
    found = (x for x in ast.walk(function) if isinstance(x, ast.Call))
    return [x.lineno for x in found if getattr(x.func, "id", "") == name]


def test_a_kernel_lets_the_next_one_in_behind_its_own_wait() -> None:
    """Or what is older than both might still run when the next one begins. Nor does a program end before it waits."""
    both, lets_in = [], []
    for path in ROOT.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            waits, triggers = (calls(function, x) for x in ("await_previous", "pdl_trigger"))
            if triggers and not waits:
                lets_in.append(function.name)
            if triggers and waits:
                both.append(function.name)
                returns = [x.lineno for x in ast.walk(function) if isinstance(x, ast.Return)]
                assert max(waits) < min([*triggers, *returns]), function.name
    assert len(both) >= 12, both
    assert lets_in == ["_dkdv_kernel"], "launched behind all that is older: it has no launch_pdl"
