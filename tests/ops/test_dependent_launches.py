"""Kernels that may start before the one ahead of them has ended: what they may do before they wait."""

import ast
from pathlib import Path

import torch_fdattn

ROOT = Path(torch_fdattn.__file__).parent


def test_a_kernel_lets_the_next_one_in_behind_its_own_wait() -> None:
    """Or what is older than both might still run when the next one begins."""
    both = []
    for path in ROOT.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            lines = {"await_previous": [], "pdl_trigger": []}
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") in lines:
                    lines[call.func.id].append(call.lineno)
            if all(lines.values()):
                both.append(function.name)
                assert max(lines["await_previous"]) < min(lines["pdl_trigger"]), function.name
    assert len(both) >= 6, both
