"""What the rungs of the ladder compile to for a GPU that is not here: strides cost nothing but what the README says."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import triton

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels, which the interpreter replaces", allow_module_level=True)

from examples.kernel_ladder import RUNGS, attend_of
from tests.compile_only.compiled import compile_launch, nvidia_usage
from tests.compile_only.launches import recorded
from tests.compile_only.targets import ARCHS

KERNELS = [rung for rung in RUNGS if rung != "reference"]


def compiled(rung: str, q_len: int, k: torch.Tensor, dim: int = 64) -> list:
    """The rung's kernels for sm_90 in bf16, nine query heads over k's three."""
    q = torch.empty(1, 9, q_len, dim, dtype=torch.bfloat16, device="meta")
    processors = mock.patch("examples.kernel_ladder.fdm._processors", return_value=132)
    with processors, recorded() as launches:
        attend_of(rung)(q, k, k)
    return [compile_launch(launch, ARCHS["sm_90"]) for launch in launches]


def cache_slice(row: int, dim: int = 64) -> torch.Tensor:
    """Three heads of a cache whose tokens are `row` elements apart."""
    cache = torch.empty(1, 4096, row, dtype=torch.bfloat16, device="meta")
    return cache[:, :2000, : 3 * dim].unflatten(2, (3, dim)).transpose(1, 2)


@pytest.mark.parametrize(
    ("rung", "q_len"), [(rung, (1, 512)[i % 2]) for i, rung in enumerate(KERNELS)]
)
def test_slices_and_copies_are_one_binary_without_spills(rung: str, q_len: int) -> None:
    sliced = compiled(rung, q_len, cache_slice(3 * 64))
    copied = compiled(rung, q_len, cache_slice(3 * 64).contiguous())
    assert [x.asm["cubin"] for x in sliced] == [x.asm["cubin"] for x in copied]
    for kernel in sliced:
        assert nvidia_usage(kernel)[1] == 0


def test_rows_that_are_no_multiple_of_16_elements_are_read_in_pieces() -> None:
    """What the README says makes strides slow: of minimal's loads only the queries' stays wide."""
    wide, pieces = (loads(compiled("minimal", 1, cache_slice(row))[0]) for row in (192, 200))
    assert set(wide) == {"LDG.E.128"}
    assert pieces.count("LDG.E.128") == 1
    assert pieces.count("LDG.E.U16") == 8 * (len(wide) - 1) == 64


def loads(kernel) -> list[str]:
    """The loads from memory in a kernel's machine code."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [cuobjdump, "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(r"\b(LDG\.[A-Z0-9.]+)", text)
