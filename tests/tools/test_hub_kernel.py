"""The ops in the layout of the `kernels` package: what a copy holds, and copies beside each other in one process."""

from __future__ import annotations

import ast
import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from tests.overlays import overlay, run
from tools import hub_kernel


@pytest.fixture(scope="module")
def kernel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kernel") / "torch-fdattn"
    run("-m", "tools.hub_kernel", str(folder))
    return folder


def metadata(variant: Path) -> dict:
    return json.loads((variant / "metadata.json").read_text(encoding="utf-8"))


def test_a_folder_has_a_variant_for_each_backend(kernel: Path) -> None:
    variants = sorted((kernel / "build").iterdir())
    assert [x.name for x in variants] == ["torch-cpu", "torch-cuda"]
    said = [metadata(x) for x in variants]
    assert [x["backend"]["type"] for x in said] == ["cpu", "cuda"]
    assert said[0]["id"] != said[1]["id"]
    assert all(x["license"] == "Apache-2.0" for x in said)
    for variant in variants:
        assert {x.name for x in variant.iterdir()} == {
            *hub_kernel.PARTS, "__init__.py", "metadata.json", "LICENSE"
        }  # fmt: skip


def test_imports_are_relative_and_lead_to_files(kernel: Path) -> None:
    """Those inside of functions too, which loading a copy does not try."""
    variant = kernel / "build" / "torch-cpu"
    seen = 0
    for path in variant.rglob("*.py"):
        package = ".".join(("copy", *path.relative_to(variant).parent.parts))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not [x.name for x in node.names if x.name.startswith("torch_fdattn")]
            if not isinstance(node, ast.ImportFrom):
                continue
            assert not (node.module or "").startswith("torch_fdattn")
            if node.level:
                module = importlib.util.resolve_name(
                    "." * node.level + (node.module or ""), package
                )
                base = variant.joinpath(*module.split(".")[1:])
                places = [base] if node.module else [base / x.name for x in node.names]
                assert all(x.is_dir() or x.with_suffix(".py").is_file() for x in places)
                seen += 1
    assert seen > 100


#: As `kernels` imports a variant: a module whose name is the id of its metadata.
_LOAD = """
import importlib.util, json, pathlib, sys

def load(variant):
    name = json.loads((pathlib.Path(variant) / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, pathlib.Path(variant) / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
"""
_BOTH = f"""{_LOAD}
import torch

torch.manual_seed(0)
first, second = load(sys.argv[1]), load(sys.argv[2])
assert not [x for x in sys.modules if x.partition(".")[0] == "torch_fdattn"]
import torch_fdattn

q, k, v = (torch.randn(2, heads, 12, 32) for heads in (4, 2, 2))
begins = torch.tensor([0, 4, 12], dtype=torch.int32)
table, lens = torch.tensor([[1, 0], [2, 3]], dtype=torch.int32), torch.tensor([12, 5], dtype=torch.int32)
pages = torch.randn(4, 2, 8, 32)


def results(module):
    yield from module.attention(q, k, v, causal=True)
    yield from module.decode(q[:, :, -1:], k, v, lens)
    yield from module.paged_decode(q[:, :, -1:], pages, pages, table, lens)
    yield from module.varlen_attention(*(x[0].transpose(0, 1) for x in (q, k, v)), begins, causal=True)
    yield from module.merge_states(out[None], lse[None])
    x = q.clone().requires_grad_()
    yield torch.autograd.grad(module.attention(x, k, v, causal=True)[0].sum(), x)[0]


out, lse = torch_fdattn.attention(q, k, v)
for a, b, c in zip(*map(results, (first, second, torch_fdattn)), strict=True):
    assert torch.equal(a, c) and torch.equal(b, c)
counts = [m.attention.__globals__["library"].launches for m in (first, second, torch_fdattn)]
assert counts[0] == counts[1] and counts[0]["attention_forward/cpu"] == 2
assert counts[2]["attention_forward/cpu"] == 3
compiled = torch.compile(lambda *x: first.attention(*x, causal=True)[0], backend="aot_eager", fullgraph=True)
assert torch.equal(compiled(q, k, v), first.attention(q, k, v, causal=True)[0])
assert getattr(torch.ops, first.NAMESPACE).attention is not torch.ops.fdattn.attention
print(first.NAMESPACE, second.NAMESPACE, torch_fdattn.ops.library.NAMESPACE)
"""


@pytest.mark.slow
def test_two_versions_and_an_installed_package_in_one_process(kernel: Path, tmp_path: Path) -> None:
    package = tmp_path / "torch_fdattn"
    shutil.copytree(hub_kernel.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    with (package / "version.py").open("a", encoding="utf-8") as file:
        file.write('__version__ = "0.2.0"\n')
    files = hub_kernel.sources(package)
    second = hub_kernel.write_variant(tmp_path / "second", "cpu", files)
    variants = (kernel / "build/torch-cpu", tmp_path / "second/build/torch-cpu")
    said = run("-c", _BOTH, *map(str, variants)).split()
    assert said[1:] == [second, "fdattn"]
    assert said[0] != second
    assert said[0].startswith("fdattn_cpu_")


def test_what_a_copy_cannot_have_is_refused(tmp_path: Path) -> None:
    files = hub_kernel.sources()
    files["checks.py"] += "\nfrom torch_fdattn.engine import LLM\n"
    with pytest.raises(
        ValueError, match=r"checks.py: imports torch_fdattn.engine, which a copy does not have"
    ):
        hub_kernel.write_variant(tmp_path, "cpu", files)
    files = hub_kernel.sources() | {"checks.py": "import torch_fdattn.ops\n"}
    with pytest.raises(ValueError, match="got 'import torch_fdattn'"):
        hub_kernel.write_variant(tmp_path, "cpu", files)
    files = hub_kernel.sources() | {"ops/library.py": "library = None\n"}
    with pytest.raises(ValueError, match="expected one line"):
        hub_kernel.write_variant(tmp_path, "cpu", files)


@pytest.mark.parametrize(
    "folder", [hub_kernel.ROOT / "build" / "kernel", hub_kernel.ROOT / "tests"]
)
def test_a_folder_in_the_checkout_is_refused(folder: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["hub_kernel", str(folder)])
    with pytest.raises(SystemExit):
        hub_kernel.main()
    assert "folder must lie outside of the checkout" in capsys.readouterr().err


def test_a_folder_that_holds_something_is_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("sys.argv", ["hub_kernel", str(tmp_path)])
    with pytest.raises(SystemExit):
        hub_kernel.main()
    assert "folder must be new or empty" in capsys.readouterr().err


_BY_KERNELS = """
import sys
from pathlib import Path

import torch
from kernels import get_kernel, get_loaded_kernels, get_local_kernel

kernel = get_kernel("any-name/torch-fdattn", version=0)
assert get_local_kernel(Path(sys.argv[1])) is kernel
assert not [x for x in sys.modules if x.partition(".")[0] == "torch_fdattn"]
q, k, v = (torch.randn(2, heads, 12, 32) for heads in (4, 2, 2))
out, _ = kernel.attention(q, k, v, causal=True)
torch.testing.assert_close(
    out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
)
(loaded,) = get_loaded_kernels()
print(loaded.metadata.name, kernel.NAMESPACE)
"""


@pytest.mark.overlay
def test_the_kernels_package_loads_it(kernel: Path) -> None:
    over = overlay("kernels==0.17.2", "sigstore==4.5.1")
    local = {"LOCAL_KERNELS": f"any-name/torch-fdattn={kernel}", "HF_HUB_OFFLINE": "1"}
    said = run("-c", _BY_KERNELS, str(kernel), over=over, cwd=kernel, **local)
    name, namespace = said.split()
    assert name == "torch-fdattn"
    assert f"_torch_{namespace}" == metadata(kernel / "build/torch-cpu")["id"]
