"""HOUSE's words: names say what they are in the field's own terms, and can be searched for.

Walks the sources of the package, of `torch_fdattn.testing` within it and of `benchmarks` by their syntax. A public
name may not have a word of `VAGUE` as a component; what is named at all, private and local names included, may not
have one of `FORMER`, which stood for what has a term of its own.
"""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]

#: Words that say nothing to who searches for them, as components of public names.
VAGUE = frozenset(
    "whole least most known again beside wanted found same meet obstacle obstacles".split()  # noqa: SIM905
)

#: Names that were given up for a standard term, as runs of components of any name.
FORMER = (
    "repeated_launch", "direct_launch", "repeated_call", "known_mlp", "side_by_side", "as_one", "fewer_launches",
    "dependent_launch", "starts_early", "processors", "multiprocessors", "pieces", "items", "wanted", "beside",
    "striped", "push_values", "words", "few_rows", "gated_product", "gated_tile", "gated_tiles", "gemm_epilogue", "agree",
    "unanimous", "runs_unseen", "runs_directly", "obstacle", "obstacles", "handwritten", "room", "ways", "kin",
    "former_calls",
)  # fmt: skip
#: Of these only the name as it stands: its one component is a side of a window elsewhere.
FORMER_NAMES = frozenset({"Left"})

#: (file, name) → why it stands: a term of the field, or of another library, that has one of these words.
ALLOWED: dict[tuple[str, str], str] = {}


def components(name: str) -> list[str]:
    """The words of a name, cut at underscores and at the humps of camel case."""
    humps = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)
    return [hump.lower() for hump in humps]


def test_no_two_classes_have_one_name() -> None:
    """Whoever searches for a class finds one meaning of its name."""
    files: dict[str, list[str]] = {}
    for path in sorted((ROOT / "torch_fdattn").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: found for name, found in files.items() if len(found) > 1}


def is_kernel(node: ast.AST) -> bool:
    return any("jit" in ast.unparse(x) for x in getattr(node, "decorator_list", ()))


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    a = node.args
    found = [*a.posonlyargs, *a.args, *a.kwonlyargs, *(x for x in (a.vararg, a.kwarg) if x)]
    return [x.arg for x in found]


def targets(node: ast.AST) -> list[str]:
    """Names that a statement binds, and attributes of self that it sets."""
    found = []
    for x in ast.walk(node):
        if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store):
            found.append(x.id)
        elif isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store):
            found.append(x.attr)
    return found


def public_names(body):
    """(line, name) of what a module or class shows: definitions, parameters, fields, constants."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            if not node.name.startswith("_"):
                yield node.lineno, node.name
                yield from public_names(node.body)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            private = node.name.startswith("_") and node.name not in (
                "__init__",
                "__new__",
                "__call__",
            )
            if not private:
                yield node.lineno, node.name
            if not private or is_kernel(node):
                yield from ((node.lineno, name) for name in parameters(node))
            if node.name == "__init__":
                for x in ast.walk(node):
                    if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store):
                        yield x.lineno, x.attr
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            yield from ((node.lineno, name) for name in targets(node))
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from public_names(ast.iter_child_nodes(node))


def all_names(tree):
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield line, node.name
        elif isinstance(node, ast.arg):
            yield line, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield line, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield line, node.attr


def faults(source: str, path: str) -> list[str]:
    """What a module's names have of those words, as `line: name (word)`."""
    tree, file = ast.parse(source), pathlib.PurePath(path)
    module = file.parent.name if file.stem == "__init__" else file.stem
    shown = [(1, module), *public_names(tree.body)]
    found = {
        (line, name, word)
        for line, name in shown
        if not name.startswith("_")
        for word in VAGUE.intersection(components(name))
    }
    for line, name in [(1, module), *all_names(tree)]:
        text = f"_{'_'.join(components(name))}_"
        found |= {(line, name, word) for word in FORMER if f"_{word}_" in text}
        found |= {(line, name, name)} if name in FORMER_NAMES else set()
    return [
        f"{line}: {name} ({word})"
        for line, name, word in sorted(found)
        if (path, name) not in ALLOWED
    ]


def test_names_are_terms_of_the_field() -> None:
    found = [
        f"{name}:{fault}"
        for top in ("torch_fdattn", "benchmarks", "tools")
        for path in sorted((ROOT / top).rglob("*.py"))
        for name in [path.relative_to(ROOT).as_posix()]
        for fault in faults(path.read_text("utf-8"), name)
    ]
    assert not found, "\n".join(["", *found])


def test_what_is_allowed_is_there() -> None:
    for path, name in ALLOWED:
        assert re.search(rf"\b{name}\b", (ROOT / path).read_text("utf-8")), (path, name)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def knownRow(): ...", ["known"]),
        ("class AsOne: ...", ["as_one"]),
        ("class Left: ...", ["Left"]),
        ("def f(window_left, HAS_LEFT): ...", []),
        ("def f(x, *, wanted_ragged=1): ...", ["wanted"]),
        ("def _f(whole): found = 1", []),
        ("@triton.jit\ndef _f_kernel(whole): ...", ["whole"]),
        ("def f(): rooms, items = 1, 2", ["items"]),
        ("class A:\n    most: int\n    def _b(self, least): ...", ["most"]),
        ("class A:\n    def __init__(self):\n        self.found = 1", ["found"]),
        ("class _A:\n    most: int", []),
        ("MOST_DIMS, _LEAST = 1, 2", ["most"]),
        ("if True:\n    def again(): ...", ["again"]),
        ("def almost(knowns, sameness): ...", []),
        ("x = {}\nfor a, b in x.items(): ...", []),
    ],
)
def test_what_counts(source: str, words: list[str]) -> None:
    assert sorted(x.rpartition("(")[2][:-1] for x in faults(source, "a/b.py")) == words
