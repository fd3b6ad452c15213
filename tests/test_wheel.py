"""The wheel and the sdist: what they hold, and that an installed wheel works where triton is not installed."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

pytest.importorskip("hatchling")

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def run(*arguments: str, cwd: Path, **variables: str) -> str:
    """A process of its own, in which nothing of the checkout is on the path."""
    environment = {**os.environ, **variables}
    environment.pop("TRITON_INTERPRET", None)
    if "PYTHONPATH" not in variables:
        environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, folder: Path) -> Path:
    """What `python -m build --no-isolation` has the project's backend make of `source`: "wheel" or "sdist"."""
    run("-c", f"import hatchling.build as x; x.build_{kind}({str(folder)!r})", cwd=source)
    (made,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory) -> Path:
    """The folder into which pip has installed the wheel alone."""
    folder = tmp_path_factory.mktemp("installed")
    command = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile")
    run(*command, "--target", str(folder), str(wheel), cwd=folder)
    return folder


def of_wheel(wheel: Path, file: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (x for x in archive.namelist() if x.endswith(f".dist-info/{file}"))
        return archive.read(name).decode()


def test_a_wheel_is_pure(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    said = message_from_string(of_wheel(wheel, "WHEEL"))
    assert (said["Root-Is-Purelib"], said["Tag"]) == ("true", "py3-none-any")


def test_a_wheel_has_no_tests_and_all_package_data(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {
        path.relative_to(ROOT).as_posix()
        for pattern in ("*.py", "*.json", "*.html", "py.typed")
        for path in (ROOT / "torch_fdattn").rglob(pattern)
    }
    assert names == sources
    assert {name.partition("/")[0] for name in names} == {"torch_fdattn"}
    assert "torch_fdattn/dist/tensor_parallel/crossovers.json" in names


def test_metadata(wheel: Path) -> None:
    said: Message = message_from_string(of_wheel(wheel, "METADATA"))
    assert (said["Name"], said["License-Expression"]) == ("torch-fdattn", "Apache-2.0")
    assert said["Version"] == importlib.import_module("torch_fdattn.version").__version__
    assert said["Requires-Python"] == ">=3.11"
    assert set(said.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    core = [x for x in said.get_all("Requires-Dist") if "extra ==" not in x]
    # macOS and Windows have no triton: nothing else may ask for it there.
    assert core == ["torch>=2.11", "triton>=3.6; platform_system == 'Linux'"]
    assert said.get_payload().startswith("# torch_fdattn")
    entries = of_wheel(wheel, "entry_points.txt")
    assert "[console_scripts]\nfdattn = torch_fdattn.__main__:main\n" in entries
    for group in ("torch_dynamo_backends", "vllm.general_plugins"):
        for name, target in PROJECT["entry-points"][group].items():
            assert f"[{group}]\n{name} = {target}\n" in entries
    licence = of_wheel(wheel, "licenses/LICENSE")
    assert licence == (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_an_sdist_builds_the_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    """Byte by byte: what is built from a release's sdist is what was tested from the checkout."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    top = {x.name for x in source.iterdir()}
    files = {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml", ".gitignore"}
    assert top == files | {"torch_fdattn"}
    folder = tmp_path / "wheel"
    folder.mkdir()
    second = build("wheel", source, folder)
    assert (second.name, second.read_bytes()) == (wheel.name, wheel.read_bytes())


#: Of an installed package, by a program that has neither triton nor the packages of any extra.
_WITHOUT_TRITON = """
import sys

missing = ("triton", "typer", "rich", "transformers", "gguf", "safetensors", "tokenizers")
sys.modules.update(dict.fromkeys(missing))
import torch
import torch.nn.functional as F
import torch_fdattn

torch.manual_seed(0)
q, k, v = (torch.randn(2, heads, 12, 32) for heads in (4, 2, 2))


def expected(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)


out, lse = torch_fdattn.attention(q, k, v, causal=True)
torch.testing.assert_close(out, expected(q, k, v, is_causal=True))
leaves = [x.clone().requires_grad_() for x in (q, k, v)]
grads = torch.autograd.grad(torch_fdattn.attention(*leaves, causal=True)[0].sum(), leaves)
wanted = torch.autograd.grad(expected(*leaves, is_causal=True).sum(), leaves)
torch.testing.assert_close(grads, wanted)
lens = torch.tensor([12, 5], dtype=torch.int32)
out, lse = torch_fdattn.decode(q[:, :, -1:], k, v, lens)
visible = torch.arange(12) < lens[:, None, None, None]
torch.testing.assert_close(out, expected(q[:, :, -1:], k, v, attn_mask=visible))
begins = torch.tensor([0, 4, 12], dtype=torch.int32)
out, lse = torch_fdattn.varlen_attention(*(x[0].transpose(0, 1) for x in (q, k, v)), begins, causal=True)
for a, b in ((0, 4), (4, 12)):
    part = expected(*(x[:1, :, a:b] for x in (q, k, v)), is_causal=True)
    torch.testing.assert_close(out[a:b], part[0].transpose(0, 1))
assert "fdattn" in torch._dynamo.list_backends()
print(torch_fdattn.__file__)
"""


def test_an_installed_wheel_computes_without_triton(installed: Path, tmp_path: Path) -> None:
    said = run("-c", _WITHOUT_TRITON, cwd=tmp_path, PYTHONPATH=str(installed))
    assert Path(said.strip()) == installed / "torch_fdattn/__init__.py"


@pytest.mark.slow
def test_the_installed_command_runs(installed: Path, tmp_path: Path) -> None:
    """The console script that pip has made, by this Python."""
    (script,) = (x for x in (installed / "bin").iterdir() if x.name == "fdattn")
    said = run(str(script), "doctor", "--json", cwd=tmp_path, PYTHONPATH=str(installed))
    assert said.lstrip().startswith(("{", "["))
