"""Merging by the reference: gradcheck in fp64, and the property that gives the op its meaning."""

from itertools import pairwise

import pytest
import torch

import torch_fdattn
from torch_fdattn.testing import make_tensor


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_gradcheck(parts):
    outs = torch.randn(parts, 1, 2, 3, 16, dtype=torch.float64, requires_grad=True)
    lses = torch.randn(parts, 1, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(torch_fdattn.merge_states, (outs, lses))


def test_gradcheck_with_empty_parts():
    """An empty part gets no gradient, an empty row no NaN."""
    empty = torch.zeros(3, 1, 2, 4, dtype=torch.bool)
    empty[1, :, 0] = True
    empty[:, :, 1, 2] = True
    outs = torch.randn(3, 1, 2, 4, 16, dtype=torch.float64, requires_grad=True)
    lses = torch.randn(3, 1, 2, 4, dtype=torch.float64, requires_grad=True)

    def merged(outs, lses):
        out, lse = torch_fdattn.merge_states(outs, lses.masked_fill(empty, float("-inf")))
        return out, lse.masked_fill(lse == float("-inf"), 0.0)

    assert torch.autograd.gradcheck(merged, (outs, lses))


@pytest.mark.parametrize("cuts", [(0, 9, 20), (0, 0, 5, 5, 20), (0, 20, 20)])
def test_merging_parts_of_the_keys_is_attention_over_all(cuts):
    q, k, v = (make_tensor((2, 2, 20, 16), dtype=torch.float64) for _ in range(3))
    parts = [torch_fdattn.attention(q, k[:, :, a:b], v[:, :, a:b]) for a, b in pairwise(cuts)]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    for merged, whole in zip(
        torch_fdattn.merge_states(outs, lses), torch_fdattn.attention(q, k, v), strict=True
    ):
        torch.testing.assert_close(merged, whole)


@pytest.mark.interpreter
def test_whatever_empty_parts_hold_is_ignored(device):
    outs = make_tensor((3, 1, 2, 4, 16), device=device)
    lses = torch.zeros(3, 1, 2, 4, device=device)
    lses[1] = float("-inf")
    clean = torch_fdattn.merge_states(outs, lses)
    for garbage in (float("nan"), float("inf"), 1e38):
        outs[1] = garbage
        for a, b in zip(clean, torch_fdattn.merge_states(outs, lses), strict=True):
            assert torch.equal(a, b)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gradient_of_lses_does_not_see_the_rounding_of_out(dtype, device):
    """merged into half precision, dlses still has fp32 partials' accuracy."""
    outs = make_tensor((4, 1, 2, 8, 32), device=device).requires_grad_()
    lses = torch.randn(4, 1, 2, 8, device=device, requires_grad=True)
    out, _ = torch_fdattn.merge_states(outs, lses, dtype=dtype)
    dout = torch.randn(out.shape, device=device).half().to(dtype)
    (found,) = torch.autograd.grad(out, lses, dout)
    exact_out, _ = torch_fdattn.merge_states(outs, lses)
    (exact,) = torch.autograd.grad(exact_out, lses, dout.float())
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
