"""The package as it is installed: what wheels contain, that editors follow an editable one, that its types hold."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PUBLIC = (
    "torch_fdattn",
    "torch_fdattn.compile_backend",
    "torch_fdattn.dist",
    "torch_fdattn.dropins",
    "torch_fdattn.engine",
    "torch_fdattn.models",
)


def run(*arguments: str, cwd: Path = ROOT, **variables: str) -> str:
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def built(kind: str, folder: Path) -> zipfile.ZipFile:
    """The wheel that an installation makes, "wheel" or "editable"."""
    pytest.importorskip("hatchling")
    run("-c", f"import hatchling.build as build; build.build_{kind}({str(folder)!r})")
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel)


def metadata(wheel: zipfile.ZipFile, file: str) -> str:
    (name,) = (x for x in wheel.namelist() if x.endswith(f".dist-info/{file}"))
    return wheel.read(name).decode()


def test_a_wheel_has_every_source_and_nothing_else(tmp_path):
    wheel = built("wheel", tmp_path)
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = {
        str(path.relative_to(ROOT))
        for pattern in ("*.py", "*.json", "py.typed")
        for path in (ROOT / "torch_fdattn").rglob(pattern)
    }
    assert names == sources
    assert "torch_fdattn/py.typed" in names
    version = importlib.import_module("torch_fdattn.version").__version__
    assert f"\nVersion: {version}\n" in metadata(wheel, "METADATA")
    entries = metadata(wheel, "entry_points.txt")
    for name, target in PROJECT["scripts"].items():
        assert f"[console_scripts]\n{name} = {target}\n" in entries
    for group in ("torch_dynamo_backends", "vllm.general_plugins"):
        for name, target in PROJECT["entry-points"][group].items():
            assert f"[{group}]\n{name} = {target}\n" in entries


def test_an_editable_installation_is_a_path(tmp_path):
    """Which type checkers and editors read; they cannot run a finder."""
    wheel = built("editable", tmp_path)
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert names == ["_torch_fdattn.pth"]
    assert wheel.read(names[0]).decode().split() == [str(ROOT)]
    assert "fdattn = torch_fdattn.compile_backend:fdattn" in metadata(wheel, "entry_points.txt")


@pytest.mark.slow
def test_a_typed_program_passes_mypy(tmp_path):
    """Outside of the checkout, as an installed package is seen: only the program's own errors count."""
    pytest.importorskip("mypy")
    program = tmp_path / "typed_use.py"
    program.write_text((ROOT / "tests/typed_use.py").read_text(encoding="utf-8"), encoding="utf-8")
    said = run(
        "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", str(ROOT / ".mypy_cache"), str(program),
        cwd=tmp_path, MYPYPATH=str(ROOT),
    )  # fmt: skip
    assert said == "Success: no issues found in 1 source file\n"


def members(module: str) -> list[tuple[str, object]]:
    """The public functions of a module, and the public methods of its classes."""
    found = []
    for name in importlib.import_module(module).__all__:
        value = getattr(importlib.import_module(module), name)
        if inspect.isclass(value):
            found += [
                (f"{name}.{method}", function)
                for method, function in inspect.getmembers(value, inspect.isfunction)
                if (method == "__init__" or not method.startswith("_"))
                and function.__module__.startswith("torch_fdattn")
            ]
        elif inspect.isfunction(value):
            found.append((name, value))
    return found


@pytest.mark.parametrize("module", PUBLIC)
def test_public_entries_are_annotated(module):
    bare = []
    for name, function in members(module):
        signature = inspect.signature(function)
        parameters = (x for x in signature.parameters.values() if x.name != "self")
        bare += [f"{name}({x.name})" for x in parameters if x.annotation is x.empty]
        if signature.return_annotation is signature.empty:
            bare.append(f"{name} -> ?")
    assert not bare


def test_no_text_tells_to_install_from_an_index():
    """No package index has torch_fdattn: a remedy names the checkout (`torch_fdattn.extras`)."""
    folders = ("torch_fdattn", "examples", "benchmarks", "docs", "tests")
    files = [
        *ROOT.glob("*.md"), ROOT / "Makefile",
        *(x for name in folders for kind in ("*.py", "*.md") for x in (ROOT / name).rglob(kind)),
    ]  # fmt: skip
    assert not [x for x in files if "torch-fdattn" + "[" in x.read_text(encoding="utf-8")]
