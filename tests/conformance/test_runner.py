"""The runner of FlashAttention's tests, on small files of their form: what it counts as what, and its exit code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.flash_attn import read_refusals

GOOD = """
import pytest
import torch
from flash_attn import flash_attn_func
from flash_attn.flash_attn_interface import _get_block_size_n, USE_TRITON_ROCM
from flash_attn.layers.rotary import apply_rotary_emb

@pytest.mark.parametrize("seqlen", [4, 5, 6, 7, 5000])
def test_flash_attn_output(seqlen):
    if seqlen == 4:
        pytest.skip()
    q = torch.randn(1, seqlen, 2, 16, device="cuda")
    assert flash_attn_func(q, q, q).shape == q.shape
"""
#: By name: what is added to the file, and what the run then says.
BAD = {
    "a wrong number": (
        "def test_wrong():\n    assert 0.5 <= 0.1\n",
        "FAILED test_wrong: AssertionError: assert 0.5 <= 0.1",
    ),
    "a refusal that is not listed": (
        "def test_refused():\n    flash_attn_func(*3 * [torch.randn(1, 4, 2, 600)])\n",
        "FAILED test_refused: ArgumentValueError: q's head_dim must be from 1 to 512, got 600",
    ),
    "a wrong number whose text is listed": (
        "def test_flash_attn_kvcache_paged_block_table_bounds():\n    assert False, 'DID NOT RAISE'\n",
        "FAILED test_flash_attn_kvcache_paged_block_table_bounds: AssertionError: DID NOT RAISE",
    ),
    "a foreign skip": (
        "exec(compile('def elsewhere(): pytest.skip()', 'elsewhere.py', 'exec'))\n"
        "def test_skipped():\n    elsewhere()\n",
        "FAILED test_skipped: a foreign skip",
    ),
    "an error of the file": ("import no_such_module\n", "cannot be collected"),
}


def run(source: str, folder: Path, *options: str) -> subprocess.CompletedProcess:
    file = folder / "test_flash_attn.py"
    file.write_text(source)
    command = [sys.executable, "-m", "tests.conformance.flash_attn", str(file), "--device", "cpu"]
    return subprocess.run([*command, *options], capture_output=True, text=True)


def row(output: str, name: str) -> list[int]:
    """The numbers of the table's row: drawn, passed, skipped, refused, failed."""
    return [int(x) for x in re.search(rf"^{name} +(.*)$", output, re.MULTILINE)[1].split()]


def test_a_good_file(tmp_path: Path) -> None:
    listed = "def test_flash_attn_generator_arg_must_be_none():\n    from flash_attn.flash_attn_interface import flash_attn_gpu\n"  # fmt: skip
    done = run(GOOD + listed, tmp_path, "--longest", "100")
    assert done.returncode == 0, done.stdout + done.stderr
    assert row(done.stdout, "test_flash_attn_output") == [4, 3, 1, 0, 0]
    assert row(done.stdout, "test_flash_attn_generator_arg_must_be_none") == [1, 0, 0, 1, 0]
    assert row(done.stdout, "total") == [5, 3, 1, 1, 0]
    assert "'attention_forward/cpu': 3" in done.stdout


@pytest.mark.slow
def test_the_draw(tmp_path: Path) -> None:
    done = run(GOOD, tmp_path, "--per", "2", "--match", "not 5000")
    assert done.returncode == 0, done.stdout + done.stderr
    assert row(done.stdout, "total")[0] == 2


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=pytest.mark.slow if i else ()) for i, x in enumerate(BAD)]
)
def test_what_fails(kind: str, tmp_path: Path) -> None:
    added, told = BAD[kind]
    done = run(GOOD + added, tmp_path, "--longest", "100")
    assert done.returncode == 1, done.stdout + done.stderr
    assert told in done.stdout


@pytest.mark.slow
def test_what_never_calls_ours_fails(tmp_path: Path) -> None:
    done = run("def test_nothing():\n    pass\n", tmp_path)
    assert done.returncode == 1
    assert "no op of ours was called" in done.stdout


def test_the_list_gives_reasons() -> None:
    refusals = read_refusals()
    assert refusals
    assert all(x.function.startswith("test_") and x.pattern.pattern and x.reason for x in refusals)
