"""What a fault's result depends on: the tests that run, and the parts of the package that they reach.

A part is a folder of the package or a file at its top. Parts of the package reach each other by imports, those inside
functions too; tests by any mention, for they also start programs. What is not reached is imported at most.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.mutants.faults import Fault, Tests

ROOT = Path(__file__).parents[2]
PACKAGE = "torch_fdattn"

_OURS = re.compile(rf"\b{PACKAGE}[./](\w+)|\bfrom {PACKAGE} import (\([^)]*\)|.*)")
_FILE = re.compile(r"\b(\w+\.py)\b")


def _closure(first: Iterable[Path], following: Callable[[Path], Iterable[Path]]) -> set[Path]:
    found, waiting = set(), list(first)
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += following(path)
    return found


def _parts(root: Path, names: Iterable[str]) -> set[Path]:
    """The parts of these names; what `torch_fdattn` gives itself under other names is in functional.py."""
    found = set()
    for name in names:
        folder, file = root / PACKAGE / name, root / PACKAGE / f"{name}.py"
        found |= {x for x in (folder, file) if x.exists()} or {root / PACKAGE / "functional.py"}
    return found


@functools.cache
def _imported(root: Path, part: Path) -> frozenset[Path]:
    """The parts of the package that a part of it imports."""
    names = set()
    for path in _python(part):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names |= set(
                    node.module.split(".")[1:2] if node.module.startswith(f"{PACKAGE}.") else ()
                )
            elif isinstance(node, ast.Import):
                names |= {
                    x.name.split(".")[1] for x in node.names if x.name.startswith(f"{PACKAGE}.")
                }
    return frozenset(_parts(root, names))


@functools.cache
def _mentioned(root: Path, path: Path) -> tuple[frozenset[Path], frozenset[Path]]:
    """(Parts of the package, other files of the tests) that a file of the tests speaks of."""
    text = path.read_text(encoding="utf-8")
    names = {"functional", "ops"} if PACKAGE in text or "torch.ops.fdattn" in text else set()
    for part, imported in _OURS.findall(text):
        names |= {part} if part else set(re.findall(r"\w+", imported))
    files = {
        place / name for name in _FILE.findall(text) for place in (root / "tests", path.parent)
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            folder = path.parents[node.level - 1] if node.level else root
            stem = folder.joinpath(*(node.module or "").split("."))
            files |= {stem.with_suffix(".py"), *(stem / f"{alias.name}.py" for alias in node.names)}
        elif isinstance(node, ast.Import):
            files |= {root.joinpath(*x.name.split(".")).with_suffix(".py") for x in node.names}
    tests = {x for x in files if x.exists() and (root / "tests") in x.parents}
    return frozenset(_parts(root, names)), frozenset(tests)


def _files_of(tests: Tests, root: Path) -> set[Path]:
    """The test files, their conftest.py, and what these speak of among the tests."""
    first: set[Path] = set()
    for name in tests.paths:
        path = root / name
        first |= set(path.rglob("*.py")) if path.is_dir() else {path}
        first |= {x / "conftest.py" for x in path.parents if (x / "conftest.py").exists()}
    return _closure(first, lambda path: _mentioned(root, path)[1])


@functools.cache
def sources(tests: Tests, root: Path = ROOT) -> tuple[Path, ...]:
    """Every file that the tests' result depends on."""
    own = _files_of(tests, root)
    start = set().union(*(_mentioned(root, file)[0] for file in own))
    parts = _closure(start, lambda part: _imported(root, part))
    files = {file for part in parts for file in (*_python(part), *part.rglob("*.json"))}
    return tuple(sorted(own | files | {root / PACKAGE / "__init__.py"}))


def _python(part: Path) -> list[Path]:
    return sorted(part.rglob("*.py")) if part.is_dir() else [part]


@functools.cache
def _digest(tests: Tests, root: Path) -> str:
    found = hashlib.sha256()
    for path in sources(tests, root):
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def key(tests: Tests, fault: Fault | None = None, root: Path = ROOT) -> str:
    """A hash of what the result of the tests with this fault depends on."""
    text = repr((tests, fault, _digest(tests, root)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
