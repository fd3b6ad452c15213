"""Threads that share a row agree on its sums to the last bit, whatever the compiler fuses.

Of `tl.sum(x * y)` with one element a thread LLVM makes fma(x, y, a neighbour's rounded product): each thread's own
product goes in unrounded, the threads of a row end with other bits, and which of them is stored is nobody's choice.
Found by racecheck, as writes of different values to one place.
"""

import re

import pytest

from tests.compile_only.compiled import compile_launch
from tests.compile_only.launches import Case, record
from tests.compile_only.targets import ARCHS
from torch_fdattn.ops.library import INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET, reason="compiles kernels, which the interpreter replaces")  # fmt: skip


def fused_into_sums(ptx: str) -> list[str]:
    """Multiply-adds whose addend comes straight from another thread."""
    shuffled = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+),", ptx))
    found = re.findall(r"(fma\.rn\.f32\s+%\w+, %\w+, %\w+, (%\w+));", ptx)
    return [text for text, addend in found if addend in shuffled]


@pytest.mark.parametrize("op", ["backward", "varlen_backward"])
@pytest.mark.parametrize("v_dim", [8, 16, 24, 32, 64])
def test_row_terms(op: str, v_dim: int) -> None:
    launches = [
        launch
        for dtype in ("fp32", "bf16")
        for launch in record(Case(op, "sm_90", dtype, 16, "causal", v_dim=v_dim))
        if "row_terms" in launch.kernel.__name__
    ]
    assert len(launches) == 2
    for launch in launches:
        ptx = compile_launch(launch, ARCHS["sm_90"]).asm["ptx"]
        assert "shfl.sync.bfly" in ptx
        assert not fused_into_sums(ptx)
