"""How tokens are drawn, and the arguments that are refused."""

from __future__ import annotations

import pytest
import torch

from tests.engine.tiny import PROMPTS, random_model
from torch_fdattn.engine import Engine, LogitsError, Sampling


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


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_rows_that_are_no_distribution_give_no_token(top_p, device):
    logits = torch.zeros(6, 50, device=device)
    logits[1, 7] = NAN
    logits[2] = -INF
    logits[3, 7] = INF
    logits[4, :49] = -INF  # one token is left
    logits[5] = NAN
    sampling = Sampling(temperature=0.8, top_p=top_p, seed=0)
    drawn = sampling.draw(logits, sampling.generator(logits.device)).flatten().tolist()
    assert drawn[1:] == [-1, -1, -1, 49, -1]
    assert 0 <= drawn[0] < 50


def test_logits_that_cannot_be_drawn_from_name_the_sequence(device):
    model = random_model(device)
    engine = Engine(model, batch=4, capacity=64)
    with torch.no_grad():
        model.embed_tokens.weight[44] = NAN  # in the second prompt alone
    sampling = Sampling(temperature=1.0, seed=0)
    tokens = engine.generate(PROMPTS, 4, sampling=sampling)
    message = r"logits must be finite .* got NaN, inf or -inf alone for new token 0 of sequence 1: "
    with pytest.raises(LogitsError, match=message) as caught:
        next(tokens)
    assert "\n" not in str(caught.value)
    engine.close()


def test_what_a_sequence_that_has_ended_gives_means_nothing(device):
    """All tokens but the first are drawn from NaN for a sequence that ended with it."""
    model = random_model(device)
    engine = Engine(model, batch=2, capacity=64, cuda_graph=False)
    sampling = Sampling(temperature=1.0, seed=0)
    first = next(engine.generate([[5], [6]], 4, sampling=sampling))
    engine.reset()
    steps = engine.generate([[5], [6]], 4, sampling=sampling, eos_ids=first[:1])
    assert next(steps) == first != [first[0]] * 2
    with torch.no_grad():
        model.embed_tokens.weight[first[0]] = NAN
    drawn = [token for _, token in steps]
    assert all(token is None or 0 <= token < 64 for token in drawn)
    assert drawn[0] is not None


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
