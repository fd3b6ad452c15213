"""Drawn calls of attention that Hopper's kernels take, forward and backward, against the fp64 oracle, on an sm_90.

`tests/ops/test_hopper_draws.py` shows without a GPU that these kernels are what the draws come to.
"""

import os

import pytest
import torch

import torch_fdattn
from torch_fdattn.testing import assert_launched, draw_hopper, expected_attention

#: Not fewer on a GPU, as `drawn_seeds` has them: no other machine runs these kernels.
SEEDS = range(int(os.environ.get("FDATTN_DRAWN", "60")))
PATHS = "attention_forward/hopper", "attention_backward/hopper"


def run(case, device):
    """(lse, other results by name) of a call and its backward."""
    inputs = [x.requires_grad_() for x in case.inputs(device)]
    given = case.parameters(device)
    # Slopes' gradients under a cap are the portable kernels'; the other gradients of such a call are Hopper's.
    trained = {n: x.requires_grad_() for n, x in given.items() if n == "sinks" or not case.softcap}
    out, lse = torch_fdattn.attention(*inputs, **case.options(device), **given)
    leaves = [*inputs, *trained.values()]
    found = torch.autograd.grad([out, lse], leaves, case.output_gradients(device))
    names = ("dq", "dk", "dv", *(f"d{name}" for name in trained))
    return lse, {"out": out, **dict(zip(names, found, strict=True))}


@pytest.fixture
def in_order(seed):
    """Of every third draw dQ is summed in order, by a kernel of its own up to head dim 128."""
    torch_fdattn.set_deterministic(seed % 3 == 2)
    yield
    torch_fdattn.set_deterministic(False)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a CUDA device of sm_90",
)
@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize("seed", SEEDS)
def test_drawn(seed, device, record_drawn):
    case = draw_hopper(seed)
    record_drawn("attention on Hopper", case.features())
    with assert_launched(*PATHS):
        lse, results = run(case, device)
    expected_attention(case, device).check(lse, **results)
