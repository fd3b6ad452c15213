"""How tokens are drawn, and the arguments that are refused."""

from __future__ import annotations

import pytest
import torch

from torch_fdattn.engine import Sampling


def test_bad_arguments_are_refused(device):
    for value in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"temperature must be at least 0 and .*, got {value}"):
            Sampling(temperature=value)
    for value in (-(2**63) - 1, 2**64):
        with pytest.raises(ValueError, match=rf"seed must be from -2\*\*63 to .*, got {value}"):
            Sampling(seed=value)
    for value in (-(2**63), 2**64 - 1):
        Sampling(seed=value).generator(torch.device(device))
    with pytest.raises(ValueError, match=r"top_p must be in \(0, 1\], got 0"):
        Sampling(top_p=0)


def test_draws_follow_the_tempered_distribution(device):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], device=device).expand(20000, -1)
    sampling = Sampling(temperature=0.7, seed=0)
    drawn = sampling.draw(logits, sampling.generator(logits.device)).flatten()
    found = torch.bincount(drawn, minlength=4) / len(drawn)
    torch.testing.assert_close(found, torch.softmax(logits[0] / 0.7, 0), atol=0.015, rtol=0)


@pytest.mark.parametrize(("top_p", "kept"), [(0.45, [2]), (0.55, [0, 2]), (0.85, [0, 1, 2])])
def test_top_p_keeps_the_smallest_set_that_holds_it(device, top_p, kept):
    weights = torch.tensor([0.25, 0.2, 0.5, 0.05], device=device)
    sampling = Sampling(temperature=1.0, top_p=top_p, seed=0)
    logits = weights.log().expand(5000, -1)
    drawn = sampling.draw(logits, sampling.generator(logits.device)).flatten()
    found = torch.bincount(drawn, minlength=4) / len(drawn)
    expected = torch.zeros_like(weights)
    expected[kept] = weights[kept] / weights[kept].sum()
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0)
    assert found[[i for i in range(4) if i not in kept]].sum() == 0
