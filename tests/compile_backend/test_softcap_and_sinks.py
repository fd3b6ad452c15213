"""Softcaps, head dims of values, and sinks."""

import pytest
import torch
import torch.nn.functional as F

from tests.compile_backend.harness import check, mask_of, ops, qkv
from tests.compile_backend.mask_forms import (
    LEAST,
    PADDING,
    SLOPES,
    causal,
    expect,
    index,
    sdpa,
    transformers_mask,
)

SOFTCAPS = {
    "mul": lambda q, k, v: (20 * torch.tanh(q @ k.mT / 20)).softmax(-1) @ v,
    "methods": lambda q, k, v: ((q @ k.mT * 0.1).div(5).tanh() * 5).softmax(-1) @ v,
    "in fp32": lambda q, k, v: (
        F.softmax(torch.tanh(q @ k.mT * 0.25 / 3).float() * 3, dim=-1).type_as(q) @ v
    ),
    "without a cap": lambda q, k, v: (q @ k.mT).tanh().softmax(-1) @ v,
}


@pytest.mark.parametrize("name", SOFTCAPS)
def test_softcap(name):
    found = check(SOFTCAPS[name], *qkv(), lower="eager")
    assert ops(found) == ["attention"], str(found.report)
    assert "softcap = " in found.graph


def test_softcap_with_a_window_and_decode():
    def fn(q, k, v, p):
        scores = torch.tanh(q @ k.mT * 0.25 / 5) * 5
        mask = torch.where(transformers_mask(q, k, window=4, offset=p), 0.0, LEAST)
        return (scores + mask).softmax(-1) @ v

    expect(
        "causal from an offset and window (3, 0)", fn, *qkv(3, 40, grad=False), torch.tensor(9),
        op="decode",
    )  # fmt: skip


def test_value_head_dims_where_a_gradient_is_wanted():
    q, k, _ = qkv()
    v = torch.randn(2, 4, 8, 24, requires_grad=True)
    assert ops(check(lambda q, k, v: sdpa(q, k, v), q, k, v, lower="eager")) == ["attention"]


def with_sinks(q, k, v, sinks, mask=None, shift=True):
    """As gpt-oss has it."""
    scores = q @ k.mT * 0.25
    if mask is not None:
        scores = scores + mask
    column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    joined = torch.cat([scores, column], dim=-1)
    if shift:
        joined = joined - joined.max(dim=-1, keepdim=True).values
    weights = F.softmax(joined, dim=-1, dtype=joined.dtype)[..., :-1]
    return F.dropout(weights, p=0.1, training=False).to(v.dtype) @ v


@pytest.mark.parametrize("shift", [True, False])
def test_sinks(shift):
    sinks = torch.randn(4, requires_grad=True)
    found = check(lambda *x: with_sinks(*x, shift=shift), *qkv(), sinks, lower="eager")
    assert ops(found) == ["attention"], str(found.report)
    assert "sinks = " in found.graph


def test_sinks_where_all_keys_are_hidden():
    def fn(q, k, v, sinks, padding):
        mask = torch.where(transformers_mask(q, k, padding, window=3), 0.0, LEAST)
        return with_sinks(q, k, v, sinks, mask)

    expect(
        "causal and window (2, 0) and explicit padding (mask-data)", fn, *qkv(), torch.randn(4),
        PADDING, operand=True,
    )  # fmt: skip


def test_sinks_and_decode():
    def fn(q, k, v, sinks, p):
        mask = torch.where(transformers_mask(q, k, offset=p), 0.0, LEAST)
        return with_sinks(q, k, v, sinks, mask)

    args = *qkv(1, 40, grad=False), torch.randn(4), torch.tensor(9)
    expect("lengths", fn, *args, op="decode")


@pytest.mark.parametrize("kind", ["a number", "keys"])
def test_sinks_are_not_shifted(kind):
    """What is the same for all keys of a query changes a softmax that a sink is in."""

    def fn(q, k, v, sinks, slopes):
        bias = torch.full((8, 8), 3.0) if kind == "a number" else slopes[:, None, None] * index(8)
        return with_sinks(q, k, v, sinks, causal(8) + bias)

    sinks = torch.randn(4, requires_grad=True)
    expect("explicit mask (mask-form)" if kind == "a number" else "explicit mask (mask-data)",
           fn, *qkv(), sinks, SLOPES, operand=True)  # fmt: skip


def test_sinks_that_are_counted():
    found = check(lambda q, k, v: with_sinks(q, k, v, index(4)), *qkv(), lower="eager")
    assert found.report.sites[0].notes == ("sinks",)


def test_sinks_without_gradients():
    def fn(q, k, v, sinks):
        with torch.no_grad():
            out = with_sinks(q, k, v, sinks)
        return out, sinks * 2

    found = check(fn, *qkv(20, grad=False), torch.randn(4, requires_grad=True), lower="eager")
    assert ops(found) == ["attention"], str(found.report)
    assert "detach()" in found.graph


def two_columns(q, k, v, sinks):
    column = sinks.reshape(1, -1, 1, 1).expand(2, -1, 8, 2)
    return torch.cat([q @ k.mT, column], -1).softmax(-1)[..., :-2] @ v


def beside(q, k, v, column, items=(..., slice(None, -1)), first=False):
    scores = q @ k.mT
    parts = [column, scores] if first else [scores, column]
    return torch.cat(parts, -1).softmax(-1)[items] @ v


NO_SINKS = {
    "two columns": two_columns,
    "of each query": lambda q, k, v, s: beside(q, k, v, q[..., :1]),
    "first": lambda q, k, v, s: beside(q, k, v, s.view(1, 4, 1, 1).expand(2, 4, 8, 1), first=True),
    "the first is cut off": lambda q, k, v, s: beside(
        q, k, v, s.view(1, 4, 1, 1).expand(2, 4, 8, 1), (..., slice(1, None))
    ),
    "not cut off": lambda q, k, v, s: (
        torch.cat([q @ k.mT, s.view(1, 4, 1, 1).expand(2, 4, 8, 1)], -1).softmax(-1)
        @ torch.cat([v, v[:, :, :1]], 2)
    ),
    "nothing but cut off": lambda q, k, v, s: (q @ k.mT).softmax(-1)[..., :-1] @ v[:, :, 1:],
    "less another's maximum": lambda q, k, v, s: (
        (q @ k.mT - (q @ k.mT * 2).amax(-1, keepdim=True)).softmax(-1) @ v
    ),
}


@pytest.mark.parametrize("name", NO_SINKS)
def test_columns_that_are_no_sinks(name):
    found = check(NO_SINKS[name], *qkv(), SLOPES, lower="eager")
    for site in found.report:
        assert "sinks" not in site.notes
        reasons = ("scores-unknown", "weights-unknown", "unknown-op")
        assert site.reason in reasons or "explicit" in mask_of(found)
