"""Drawn cases of attention, forward and backward, against the fp64 oracle under the error rule."""

import pytest
import torch

import torch_fdattn
from torch_fdattn.testing import (
    assert_launched,
    draw_attention,
    drawn_seeds,
    expected_attention,
    expected_path,
)


@pytest.mark.interpreter
@pytest.mark.parametrize("seed", drawn_seeds(320))
def test_drawn(seed, device, record_drawn):
    case = draw_attention(seed, device)
    record_drawn("attention", case.features())
    inputs = [x.requires_grad_() for x in case.inputs(device)]
    paths = [
        expected_path(f"attention_{way}", device, case.dtype) for way in ("forward", "backward")
    ]
    with assert_launched(*paths):
        out, lse = torch_fdattn.attention(*inputs, **case.options(device))
        dq, dk, dv = torch.autograd.grad([out, lse], inputs, case.output_gradients(device))
    expected_attention(case, device).check(lse, out=out, dq=dq, dk=dk, dv=dv)
