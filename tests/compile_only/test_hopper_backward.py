"""Hopper's backward in Gluon: every configuration compiles for sm_90 without a GPU, its products on the tensor cores."""

import os
import re

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels, which the interpreter replaces", allow_module_level=True)

from tests.compile_only.compiled import compile_launch, nvidia_usage
from tests.compile_only.launches import Launch, meta
from tests.compile_only.targets import ARCHS
from tests.compile_only.test_hopper import INT, MASKS
from tests.compile_only.uniform_registers import disassembled
from tests.compile_only.wgmma_registers import early_writes
from torch_fdattn.ops.attention.hopper.backward.launch import HEAD_DIMS, backward_launches, takes
from torch_fdattn.ops.options import AttentionOptions

QUICK = (128, "causal")
#: Bytes a thread that may spill, of head dim 128 outside of the steps.
SPILLS = {64: 192, 128: 24}


@pytest.mark.parametrize(
    ("head_dim", "mask"),
    [
        pytest.param(head_dim, mask, marks=() if (head_dim, mask) == QUICK else pytest.mark.slow)
        for head_dim in HEAD_DIMS
        for mask in MASKS
    ],
)
def test_compiles(head_dim, mask):
    positions, queries, keys = MASKS[mask]
    q, k, v = (
        meta(2, h, n, head_dim, dtype=torch.bfloat16) for h, n in ((8, queries), (2, keys), (2, keys))
    )  # fmt: skip
    options = AttentionOptions(positions, head_dim**-0.5)
    assert takes(q, k, v, q, options)
    rows = (meta(2, 8, -(-queries // 128) * 128),) * 2
    state, scratch = (
        (q, None, q, k, v, q, meta(2, 8, queries)),
        (rows, meta(2, 8, queries, head_dim)),
    )
    made = list(backward_launches(*state, options, q, k, v, *scratch, meta(1, **INT)))
    terms, sweep, sums = (
        compile_launch(Launch(x.kernel, x.arguments, x.options), ARCHS["sm_90"]) for x in made
    )
    assert nvidia_usage(terms)[1] == nvidia_usage(sums)[1] == 0
    assert nvidia_usage(sweep)[1] <= SPILLS[head_dim]
    assert sweep.metadata.shared <= ARCHS["sm_90"].shared_size
    sass = disassembled(sweep.asm["cubin"])
    assert not early_writes(sass)
    products = sass.count("HGMMA")
    assert products >= 2 * 5 * head_dim // 16
    assert (
        sass.count("WARPGROUP.DEPBAR") < products / 4
    )  # else ptxas has put them one after the other
    if head_dim == 128:
        # A step waits for dP, for dV and dK beside dQ's two products, for dQ, and for the next scores.
        waits = re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d) ;", sass)
        steps = [
            i for i in range(1, len(waits) - 6, 2) if waits[i : i + 7 : 2] == ["1", "2", "1", "0"]
        ]
        assert len(steps) == 2  # of two warp groups
        for i in steps:
            assert not re.search(r"\b(LDL|STL)\b", "".join(waits[i + 1 : i + 6]))
