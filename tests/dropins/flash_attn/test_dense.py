"""The dense functions of `dropins.flash_attn` against the formula, with gradients, dropout and what they return."""

from __future__ import annotations

import math
import random

import pytest
import torch

from tests.dropins.flash_attn.formula import (
    CLOSE,
    attend_batch,
    drawn_options,
    drawn_sizes,
    equal_with_gradients,
    made,
)
from torch_fdattn.dropins.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)


@pytest.mark.parametrize("seed", range(30))
def test_drawn(seed: int) -> None:
    rng = random.Random(seed)
    batch, queries, keys = 2, rng.choice((1, 5, 19)), rng.choice((1, 7, 19, 33))
    heads, kv_heads, dim = drawn_sizes(rng)
    options, given = drawn_options(rng, heads, batch)
    q, kv = made(batch, queries, heads, dim), made(batch, keys, 2, kv_heads, dim)
    inputs = [x.requires_grad_() for x in (q, kv)]
    expected, expected_lse = attend_batch(q, kv[:, :, 0], kv[:, :, 1], **options)
    if rng.random() < 0.5:
        out = flash_attn_kvpacked_func(q, kv, **given)
    else:
        out, lse, probs = flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], **given, return_attn_probs=True)  # fmt: skip
        lse = torch.where(lse == math.inf, -math.inf, lse)
        torch.testing.assert_close(lse, expected_lse, **CLOSE)
        assert probs.numel() == 0
    equal_with_gradients(out, expected, inputs)


def test_qkvpacked_has_one_gradient() -> None:
    qkv = made(2, 9, 3, 4, 16).requires_grad_()
    expected, _ = attend_batch(*qkv.unbind(2), causal=True)
    equal_with_gradients(flash_attn_qkvpacked_func(qkv, causal=True), expected, [qkv])


def test_rows_without_keys() -> None:
    q, k, v = made(1, 5, 2, 16), made(1, 2, 2, 16), made(1, 2, 2, 16)
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (out[:, :3] == 0).all()
    assert (lse[..., :3] == math.inf).all()
    assert lse[..., 3:].isfinite().all()


def test_dtypes_are_theirs() -> None:
    q, k, v = (torch.randn(2, 6, 4, 32, dtype=torch.bfloat16) for _ in range(3))
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    assert (out.dtype, lse.dtype, lse.shape) == (torch.bfloat16, torch.float32, (2, 4, 6))


@pytest.mark.parametrize("window", [(-1, -1), (4, 2)])
def test_dropout_and_its_probabilities(window: tuple[int, int]) -> None:
    """The signs say which weights were dropped: with them the formula gives the same result and gradients."""
    q, k, v = (made(2, n, h, 16).requires_grad_() for n, h in ((20, 4), (23, 2), (23, 2)))
    p, slopes = 0.25, torch.rand(4)
    out, _, probs = flash_attn_func(
        q, k, v, p, causal=True, window_size=window, alibi_slopes=slopes, return_attn_probs=True
    )
    assert probs.shape == (2, 4, 128, 128)
    signed = probs[:, :, :20, :23]
    kept = ~torch.signbit(signed)
    seen = signed != 0
    assert 0.1 < 1 - kept[seen].double().mean() < 0.4
    # The formula's weights without dropout, from its lse, through autograd.
    k4, v4 = (x.repeat_interleave(2, 2) for x in (k, v))
    scores = torch.einsum("bshd,bnhd->bhsn", q, k4) / 4
    distance = torch.arange(23) - torch.arange(20)[:, None] - 3
    scores = scores - slopes.double()[:, None, None] * distance.abs()
    weights = torch.softmax(scores.masked_fill(~seen, -math.inf), -1)
    torch.testing.assert_close(signed.abs() / signed.abs().sum(-1, keepdim=True), weights, **CLOSE)
    expected = torch.einsum("bhsn,bnhd->bshd", weights * kept / (1 - p), v4)
    equal_with_gradients(out, expected, [q, k, v])


def test_dropout_follows_the_generator() -> None:
    q, k, v = made(3, 1, 30, 2, 16).unbind()
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(flash_attn_func(q, k, v, 0.5))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_window_of_tensors() -> None:
    q, k, v = made(3, 1, 30, 2, 16).unbind()
    out = flash_attn_func(q, k, v, window_size=torch.tensor([3, 1]))
    torch.testing.assert_close(out, attend_batch(q, k, v, window=(3, 1))[0], **CLOSE)
