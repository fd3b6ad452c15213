"""Drawn cases of merge_states, forward and backward, against the fp64 oracle under the error rule."""

import pytest
import torch

import torch_fdattn
from torch_fdattn.testing import (
    assert_launched,
    draw_merge,
    drawn_seeds,
    expected_merge,
    expected_path,
)


@pytest.mark.interpreter
@pytest.mark.parametrize("seed", drawn_seeds(320))
def test_drawn(seed, device, record_drawn):
    case = draw_merge(seed, device)
    record_drawn("merge_states", case.features())
    inputs = [x.requires_grad_() for x in case.inputs(device)]
    paths = [
        expected_path(f"merge_states_{way}", device, case.dtype) for way in ("forward", "backward")
    ]
    with assert_launched(*paths):
        out, lse = torch_fdattn.merge_states(*inputs, dtype=case.out_dtype)
        douts, dlses = torch.autograd.grad([out, lse], inputs, case.output_gradients(device))
    assert out.dtype == (case.out_dtype or case.dtype)
    assert douts.dtype == case.dtype
    assert dlses.dtype == lse.dtype
    # One row of dlses is what one (batch, head) holds over positions and parts.
    expected_merge(case, device).check(lse, out=out, douts=douts, dlses=dlses.permute(1, 2, 3, 0))
