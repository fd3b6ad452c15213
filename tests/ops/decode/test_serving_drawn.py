"""Drawn decode calls with serving's features, all crossed, against the fp64 oracle under the error rule."""

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

#: In the environment: how many to draw. `make fuzz` draws more than the time of `make test` allows.
DRAWN = "FDATTN_DRAWN"


@pytest.mark.interpreter
@pytest.mark.parametrize("seed", drawn_seeds(320, DRAWN))
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


def test_as_many_draws_as_asked_for(monkeypatch):
    monkeypatch.setenv(DRAWN, "5000")
    assert len(drawn_seeds(320, DRAWN)) == 5000
    assert len(drawn_seeds(320)) <= 320
