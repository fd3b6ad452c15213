"""Drawn decode calls with serving's features, all crossed, against the fp64 oracle under the error rule."""

import os

import pytest
import torch

import torch_fdattn
from torch_fdattn.testing import (
    assert_launched,
    draw_serving,
    drawn_seeds,
    expected_attention,
    expected_path,
)

#: `make fuzz` draws more than the time of `make test` allows.
DRAWN = int(os.environ.get("FDATTN_DRAWN", "320"))


@pytest.mark.interpreter
@pytest.mark.parametrize("seed", drawn_seeds(DRAWN))
def test_drawn(seed, device, record_drawn):
    case = draw_serving(seed, device)
    record_drawn("serving decode", case.features())
    name, inputs, options = case.call(device)
    with assert_launched(expected_path("decode_forward", device, case.dtype)), torch.no_grad():
        out, lse = getattr(torch_fdattn, name)(*inputs, **options)
    expected_attention(case, device, backward=False).check(lse, out=out)


@pytest.mark.interpreter
@pytest.mark.parametrize("seed", [109, 3533])
def test_fewer_value_dims_than_keys_have(seed, device):
    """Draws of GPU sizes that an H100 got wrong (`tests/compile_only/test_uniform_registers.py`)."""
    case = draw_serving(seed, "cuda")
    assert 2 * case.v_dim < case.head_dim
    name, inputs, options = case.call(device)
    with torch.no_grad():
        out, lse = getattr(torch_fdattn, name)(*inputs, **options)
    expected_attention(case, device, backward=False).check(lse, out=out)
