"""Scores that are limited from below behind masks that the call gives, and limits that are none."""

import math

import pytest
import torch

from tests.compile_backend.harness import check, ops, qkv

MIN = torch.finfo(torch.float32).min


def limits(x):
    return {
        "clamp": lambda: x.clamp(min=MIN),
        "clamp_min": lambda: torch.clamp_min(x, MIN),
        "max": lambda: torch.max(x, torch.tensor(MIN)),
        "maximum": lambda: torch.maximum(x, torch.tensor(MIN)),
    }


def scores_of(q, k):
    return q @ k.transpose(-1, -2) * 0.25


def hidden_row(number, *shape):
    mask = torch.zeros(shape)
    mask[..., 0, :] = number
    return mask


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("number", [-math.inf, MIN])
@pytest.mark.parametrize("limit", ["clamp", "clamp_min", "max", "maximum"])
def test_a_hidden_row_of_a_given_mask(limit, number, grad):
    """Rewritten or left, eager's values and gradients."""

    def fn(q, k, v, mask):
        return limits(scores_of(q, k) + mask)[limit]().softmax(-1) @ v

    check(fn, *qkv(grad=grad), hidden_row(number, 2, 1, 8, 8))


def test_a_given_mask_beside_the_graphs_own():
    def fn(q, k, v, mask):
        causal = torch.full((8, 8), MIN).triu(1)
        return (scores_of(q, k) + causal + mask).clamp(min=MIN).softmax(-1) @ v

    mask = torch.zeros(8, 8)
    mask[0, :2] = MIN
    check(fn, *qkv(grad=False), mask)


def test_two_given_masks():
    def fn(q, k, v, mask, other):
        return (scores_of(q, k) + (mask + 2 * other)).clamp(min=MIN).softmax(-1) @ v

    check(fn, *qkv(grad=False), hidden_row(-math.inf, 8, 8), torch.randn(8, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_limit_that_a_cast_makes_infinite(dtype):
    def fn(q, k, v):
        scores = scores_of(q, k).float().masked_fill(torch.ones(8, 8).bool(), -math.inf)
        return scores.clamp(min=MIN).to(dtype).softmax(-1) @ v

    assert ops(check(fn, *qkv(grad=False, dtype=dtype))) == [None]


def test_an_infinite_limit_is_none():
    def fn(q, k, v):
        scores = scores_of(q, k).masked_fill(torch.ones(8, 8).bool(), -math.inf)
        return scores.clamp(min=-math.inf).softmax(-1) @ v

    check(fn, *qkv(grad=False))


@pytest.mark.parametrize("shape", [(2, 1, 8), (2, 8, 1), (2, 1, 1)])
@pytest.mark.parametrize("kind", ["mask", "temperature"])
def test_groups_without_their_heads(kind, shape):
    """(batch, heads of a group, groups, queries, …), by something of each group alone."""

    def fn(q, k, v, x):
        scores = q @ k.mT
        scores = scores + x if kind == "mask" else scores / x
        return scores.transpose(1, 2).softmax(-1) @ v.transpose(1, 2)

    check(fn, *torch.randn(3, 2, 3, 2, 8, 16).unbind(0), torch.rand(shape) + 1)


def test_a_temperature_of_float16_queries_is_left():
    """Times q it may overflow where times the scores it does not."""

    def fn(q, k, v, t):
        return ((q @ k.transpose(-1, -2)).float() * t).softmax(-1).half() @ v

    q, k, v = qkv(grad=False, dtype=torch.float16)
    found = check(fn, q * 10, k * 1e-3, v, torch.full((1,), 1e4), rtol=1e-2, atol=1e-2)
    assert ops(found) == [None]
