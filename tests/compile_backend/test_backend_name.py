"""`backend="fdattn"` from a checkout on the path, which has no entry point of an installation."""

from __future__ import annotations

import subprocess
import sys

import pytest

import torch_fdattn
from tests import checkout
from tests.compile_backend.test_backend import ROOT
from tests.compile_backend.test_backend_processes import entry_points

FROM_A_CHECKOUT = """
import importlib.metadata, sys
installed = importlib.metadata.MetadataPathFinder.find_distributions
importlib.metadata.MetadataPathFinder.find_distributions = lambda *context: (
    found for found in installed(*context) if found.metadata["Name"] != "torch-fdattn"
)
import torch
if {late}:  # torch looks for entry points before we are imported
    assert "fdattn" not in torch.compiler.list_backends()
import torch_fdattn
assert {late} or "torch._dynamo" not in sys.modules
import torch.nn.functional as F
q = torch.randn(1, 2, 8, 16)
compiled = torch.compile(F.scaled_dot_product_attention, backend="fdattn", options={{"lower": "eager"}})
torch.testing.assert_close(compiled(q, q, q), F.scaled_dot_product_attention(q, q, q))
torch_fdattn.checkout.announce()  # once more is no error
names = torch.compiler.list_backends()
found = importlib.metadata.entry_points(group="torch_dynamo_backends")
print(names.count("fdattn"), [x.value for x in found if x.name == "fdattn"], importlib.metadata.version("torch-fdattn"))
"""


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_name_works_from_a_checkout_without_metadata(late):
    """`import torch_fdattn` is enough, and imports no torch.compile for it."""
    done = subprocess.run(
        [sys.executable, "-c", FROM_A_CHECKOUT.format(late=late)],
        cwd=ROOT, env=checkout.environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    _, target = entry_points().split(" = ")
    assert done.stdout == f"1 ['{target}'] {torch_fdattn.__version__}\n"


@pytest.mark.slow
def test_the_name_is_found_once_where_there_is_metadata_too(tmp_path):
    info = tmp_path / "torch_fdattn-9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-fdattn\nVersion: 9\n")
    (info / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{entry_points()}\n")
    code = (
        "import torch_fdattn, torch; from importlib.metadata import entry_points as e, version;"
        "print([x.name for x in e(group='torch_dynamo_backends')].count('fdattn'), version('torch_fdattn'));"
        "torch.compile(torch.sin, backend='fdattn', options={'lower': 'eager'})(torch.ones(2))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True,
        cwd=tmp_path,  # not where an editable installation has left its own metadata
        env=checkout.environment(tmp_path),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "1 9\n"), done.stderr
