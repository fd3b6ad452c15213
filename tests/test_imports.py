"""Imports: they run one way, `import torch_fdattn` is light, and kernels never lean on references."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "torch_fdattn"
# Each package may import itself and what stands to its right.
ORDER = (
    "cli", "engine", "models", "compile_backend", "dropins", "dist", "decode_plan", "functional", "ops", "launch", "checks",
    "environment",
)  # fmt: skip


def imported(path: Path) -> set[str]:
    """The project's modules that a file imports, also inside functions; relative imports stay inside."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("torch_fdattn.")}


def room(module: str) -> str:
    return module.split(".")[1]


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_dependencies_run_one_way(path: Path) -> None:
    here = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if here not in ORDER:
        return
    allowed = set(ORDER[ORDER.index(here) :])
    if here == "cli":  # the command line starts everything
        allowed |= {"doctor", "version"}
    upward = {name for name in imported(path) if room(name) in ORDER and room(name) not in allowed}
    assert not upward, f"{path.name} imports upward: {sorted(upward)}"


@pytest.mark.parametrize(
    "path", [p for p in FILES if "ops" in p.parts], ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_only_ops_know_references(path: Path) -> None:
    if path.name.endswith("op.py") or path.name == "reference.py":
        return
    assert not [name for name in imported(path) if "reference" in name]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_builds_on_the_dropins(path: Path) -> None:
    """They are ways in, each loaded by whoever takes it."""
    if path != PACKAGE / "__init__.py" and "dropins" not in path.parts:
        assert not [name for name in imported(path) if room(name) == "dropins"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_testing_is_for_tests_alone(path: Path) -> None:
    if "testing" not in path.parts:
        assert not [name for name in imported(path) if room(name) == "testing"]


def test_nothing_looks_at_hooks() -> None:
    """A fast form is an object that somebody makes, not what a module finds where it has no hooks."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    seen = [path.name for path in FILES if any(x in path.read_text("utf-8") for x in hooks)]
    assert not seen


def run(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    return done.stdout.strip()


def test_import_is_light() -> None:
    # (torch.utils.flop_counter, where the FLOP formulas go, imports triton itself.)
    heavy = [
        "torch_fdattn.ops.attend",
        "torch_fdattn.models",
        "torch_fdattn.dropins.flash_impl",
        "torch_fdattn.dropins.transformers",
        "torch.distributed.tensor",
        "torch._dynamo",
        "transformers",
        "typer",
        "gguf",
    ]
    code = (
        "import sys, torch; before = set(sys.modules); import torch_fdattn;"
        f"print([m for m in {heavy} if m in sys.modules and m not in before])"
    )
    assert run(code) == "[]"


@pytest.mark.parametrize("name", ["compile_backend", "dist", "dropins", "engine", "models"])
def test_subpackages_are_attributes(name: str) -> None:
    code = (
        "import sys, torch_fdattn as t;"
        f"print({name!r} in dir(t), {name!r} in t.__all__, t.{name} is sys.modules['torch_fdattn.{name}'])"
    )
    assert run(code) == "True True True"


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    import torch_fdattn

    with pytest.raises(AttributeError, match="'torch_fdattn' has no attribute 'no_such'"):
        torch_fdattn.no_such  # noqa: B018


def test_import_takes_a_part_of_torchs() -> None:
    code = (
        "import time; start = time.process_time(); import torch; middle = time.process_time(); import torch_fdattn;"
        "print((time.process_time() - middle) / (middle - start))"
    )
    # Processor time, beside torch's own: neither what else runs on a machine nor how old it is decides.
    assert min(float(run(code)) for _ in range(3)) < 0.2


def test_works_without_triton_and_extras() -> None:
    missing = ["triton", "typer", "rich", "transformers", "gguf", "safetensors", "tokenizers"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({missing}));"
        "import torch, torch_fdattn;"
        "print(torch_fdattn.attention(*[torch.ones(1, 1, 2, 16)] * 3)[0].sum().item())"
    )
    assert run(code) == "32.0"
