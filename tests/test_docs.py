"""The documents: their sizes, their links, their examples, and the site that mkdocs builds of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .documents import ROOT, python_blocks, run_each, run_on_two_ranks

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
_FOLDERS = ("benchmarks", "docs", "tests", "torch_fdattn", "examples", "tools")
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(page for name in _FOLDERS for page in (ROOT / name).rglob("*.md"))]
)
#: What a document may take: (lines, bytes).
LIMITS = {"README.md": (250, 14_336), "DESIGN.md": (None, 14_336), "docs/glossary.md": (60, None)}
#: A folder's README is one screen.
LIMITS |= {"benchmarks/README.md": (50, 4_096)}
LIMITS |= {
    str(page.relative_to(ROOT)): (50, 4_096) for page in (ROOT / "torch_fdattn").rglob("README.md")
}
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_MACHINE = re.compile(r"(?<![\w.:/])/(home|tmp|work|Users|mnt|opt|data)/")


def _named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them of plain words."""
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    headings = (re.sub(r"[^\w\s.-]", "", x).strip().lower() for x in _HEADING.findall(text))
    return {re.sub(r"\s+", "-", x.replace(".", "")) for x in headings}


@pytest.mark.parametrize("name", LIMITS)
def test_sizes(name: str) -> None:
    lines, size = LIMITS[name]
    data = (ROOT / name).read_bytes()
    assert lines is None or data.count(b"\n") <= lines
    assert size is None or len(data) <= size


@pytest.mark.parametrize("path", DOCUMENTS, ids=_named)
def test_links_lead_somewhere(path: Path) -> None:
    text = _FENCED.sub("", path.read_text(encoding="utf-8"))
    for link in _LINK.findall(text):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{link} leads nowhere"
        assert target.is_relative_to(ROOT), f"{link} leaves the repository"
        if anchor:
            assert anchor in _anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("path", DOCUMENTS, ids=_named)
def test_no_paths_of_one_machine(path: Path) -> None:
    assert not (found := _MACHINE.search(path.read_text(encoding="utf-8"))), found[0]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if python_blocks(page)[0]], ids=lambda page: page.stem
)
def test_examples_run(page: Path) -> None:
    run_each(python_blocks(page)[0], page.name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "name"),
    [(page, name) for page in PAGES for name in python_blocks(page)[1]],
    ids=lambda x: x if isinstance(x, str) else x.stem,
)
def test_scripts_run_on_two_ranks(page: Path, name: str, tmp_path: Path) -> None:
    run_on_two_ranks(name, python_blocks(page)[1][name], tmp_path)


def test_every_page_is_in_the_navigation() -> None:
    config = (DOCS / "mkdocs.yml").read_text(encoding="utf-8")
    for page in PAGES:
        assert re.search(rf"[ :]{re.escape(str(page.relative_to(DOCS)))}$", config, re.MULTILINE)


@pytest.mark.parametrize(
    "readme", sorted((ROOT / "torch_fdattn").rglob("README.md")), ids=lambda x: x.parent.name
)
def test_a_readme_names_every_file(readme: Path) -> None:
    """And every folder."""
    text, here = readme.read_text("utf-8"), readme.parent
    files = {x.name for x in here.glob("*.py")} - {"__init__.py", "__main__.py"}
    folders = {f"{x.parent.name}/" for x in here.glob("*/__init__.py")}
    assert not {x for x in files | folders if f"`{x}`" not in text}


def test_every_package_has_a_readme() -> None:
    """Its own, or that of the package around it; the repository's is that of torch_fdattn."""
    packages = {x.parent for x in (ROOT / "torch_fdattn").rglob("__init__.py")}
    assert not {x for x in packages if not any((y / "README.md").exists() for y in (x, x.parent))}


def test_every_public_name_is_in_the_reference() -> None:
    import torch_fdattn
    from torch_fdattn import dist, engine, models

    text = (DOCS / "api.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    modules = {"__version__", "compile_backend", "dist", "dropins", "engine", "models", "ops"}
    for module in (torch_fdattn, dist, models, engine):
        for name in set(module.__all__) - modules:
            assert f"{module.__name__}.{name}" in listed


def test_the_site_is_built(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    pytest.importorskip("mkdocstrings", reason="needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "docs/mkdocs.yml"]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "api.html").read_text(encoding="utf-8")
    assert 'id="torch_fdattn.decode"' in page
    assert (tmp_path / "benchmarks" / "results" / "decode.svg").exists()
