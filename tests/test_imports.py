"""Imports: they run one way, `import torch_fdattn` is light, and kernels never lean on references."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import checkout

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "torch_fdattn"
# Each package may import itself and what stands to its right.
ORDER = (
    "cli", "server", "tune", "engine", "models", "compile_backend", "dropins", "dist", "decode_plan", "functional", "ops", "launch",
    "tables", "checks", "environment",
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


def package_of(module: str) -> str:
    return module.split(".")[1]


@functools.cache  # not at import, which every worker of pytest-xdist does
def imports() -> dict[Path, set[str]]:
    return {path.relative_to(PACKAGE): imported(path) for path in sorted(PACKAGE.rglob("*.py"))}


def importers(wrong: Callable[[Path, str], bool]) -> list[str]:
    """The imports that are wrong, as "file: module"."""
    return [
        f"{path}: {name}"
        for path, names in imports().items()
        for name in names
        if wrong(path, name)
    ]


def test_dependencies_run_one_way() -> None:
    def upward(path: Path, name: str) -> bool:
        here = path.with_suffix("").parts[0]
        if here not in ORDER or package_of(name) not in ORDER:
            return False
        return ORDER.index(package_of(name)) < ORDER.index(here)

    assert not importers(upward)


def test_only_ops_know_references() -> None:
    assert not importers(
        lambda path, name: (
            "ops" in path.parts
            and not path.name.endswith("op.py")
            and path.name not in ("reference.py", "cpu.py")
            and "reference" in name
        )
    )


def test_nothing_builds_on_the_dropins() -> None:
    """They are ways in, each loaded by whoever takes it."""
    assert not importers(
        lambda path, name: (
            path != Path("__init__.py")
            and "dropins" not in path.parts
            and package_of(name) == "dropins"
        )
    )


def test_testing_is_for_tests_alone() -> None:
    assert not importers(
        lambda path, name: "testing" not in path.parts and package_of(name) == "testing"
    )


def test_nothing_looks_at_hooks() -> None:
    """A fast form is an object that somebody makes, not what a module finds where it has no hooks."""
    hooks = re.compile(r"_(forward|backward|state_dict)_(pre_)?hooks\b|_has_hooks\b|\bhas_hooks\b")
    assert not [x for x in imports() if hooks.search((PACKAGE / x).read_text("utf-8"))]


#: What tells of Triton's launches and compilations, and of what torch calls.
OBSERVERS = re.compile(
    r"\b(launch_(enter|exit)_hook|jit_post_compile_hook|jit_cache_hook|add_stages_inspection_hook|"
    r"compilation_listener|JITFunction|JITCallable|InterpretedFunction|profile_hook|"
    r"_push_mode|set_dispatch_mode|sys\.setprofile|sys\.settrace)\b"
)
#: Where one of them may stand.
MAY_NAME = {
    "launch/driver_launch.py": "where a profiler has hooked into Triton's launches, Triton launches",
}


def test_nothing_observes_launches() -> None:
    """A launcher returns its launches; no hook, patch or mode finds out what a call has launched."""
    seen = {x.as_posix() for x in imports() if OBSERVERS.search((PACKAGE / x).read_text("utf-8"))}
    assert seen == set(MAY_NAME)


def patches(node: ast.AST) -> bool:
    """Whether it replaces a kernel's `run`, or sets or adds to a hook of Triton's runtime."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr == "run" or node.attr.endswith("_hook")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("add", "append") and ast.unparse(node.func.value).endswith("_hook")  # fmt: skip
    return False


def test_nothing_patches_launches() -> None:
    assert not [
        f"{path}:{node.lineno}"
        for path in imports()
        for node in ast.walk(ast.parse((PACKAGE / path).read_text("utf-8")))
        if patches(node)
    ]


def run(code: str) -> str:
    environment = checkout.environment()
    environment.pop("TRITON_INTERPRET", None)
    # Else each process compiles our sources anew, beside torch's, which were compiled when it was installed.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    return done.stdout.strip()


#: (torch.utils.flop_counter, where the FLOP formulas go, imports triton itself.)
HEAVY = [
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


@functools.cache
def after_import(attempt: int) -> list[str]:
    """Of a process that imports torch and us: our part of torch's time, what is HEAVY, our subpackages."""
    code = (
        "import sys, time; start = time.process_time(); import torch; middle = time.process_time();"
        "before = set(sys.modules); began = time.process_time(); import torch_fdattn as t;"
        "print((time.process_time() - began) / (middle - start));"
        f"print([m for m in {HEAVY} if m in sys.modules and m not in before]);"
        "names = {'compile_backend', 'dist', 'dropins', 'engine', 'models'};"
        "print(names <= set(dir(t)), names <= set(t.__all__));"
        "print({n for n in names if getattr(t, n) is not sys.modules[f'torch_fdattn.{n}']})"
    )
    return run(code).splitlines()


def test_import_is_light() -> None:
    assert after_import(0)[1] == "[]"


def test_subpackages_are_attributes() -> None:
    assert after_import(0)[2:] == ["True True", "set()"]


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    import torch_fdattn

    with pytest.raises(AttributeError, match="'torch_fdattn' has no attribute 'no_such'"):
        torch_fdattn.no_such  # noqa: B018


def test_import_takes_a_part_of_torchs() -> None:
    # Processor time, beside torch's own: neither what else runs on a machine nor how old it is decides.
    assert any(float(after_import(attempt)[0]) < 0.2 for attempt in range(3))


def test_works_without_triton_and_extras() -> None:
    missing = ["triton", "typer", "rich", "transformers", "gguf", "safetensors", "tokenizers"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({missing}));"
        "import torch, torch_fdattn;"
        "print(torch_fdattn.attention(*[torch.ones(1, 1, 2, 16)] * 3)[0].sum().item())"
    )
    assert run(code) == "32.0"


def test_models_and_engine_import_without_extras() -> None:
    """numpy, of the extra `models`, is needed by GGUF files alone."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['numpy', 'gguf', 'safetensors', 'tokenizers']));"
        "import torch_fdattn.engine, torch_fdattn.models as models;"
        "print(models.resolve.__name__)"
    )
    assert run(code) == "resolve"
