"""Masks: what is recovered of them, what stays a tensor, and always the same numbers and gradients as eager."""

import math

import pytest
import torch
from expecttest import assert_expected_inline

from tests.compile_backend.harness import check, mask_of, ops, qkv
from tests.compile_backend.mask_forms import (
    LEAST,
    PADDING,
    added,
    causal,
    expect,
    filled,
    index,
    sdpa,
    transformers_eager,
    transformers_mask,
    triangle,
    unpacked,
)

RECOVERED = {
    "causal": ("causal", lambda q, k, v: sdpa(q, k, v, transformers_mask(q, k))),
    "window": (
        "causal and window (2, 0)",
        lambda q, k, v: sdpa(q, k, v, transformers_mask(q, k, window=3)),
    ),
    "window, eager": (
        "causal and window (2, 0)",
        lambda q, k, v: transformers_eager(q, k, v, transformers_mask(q, k, window=3)),
    ),
    "band by triu and tril": (
        "window (1, 2)",
        lambda q, k, v: sdpa(q, k, v, triangle(diagonal=2).triu(-1)),
    ),
    "symmetric window": (
        "window (2, 2)",
        lambda q, k, v: sdpa(q, k, v, (index(8)[:, None] - index(8)).abs() <= 2),
    ),
    "one side": ("window (1, all)", lambda q, k, v: sdpa(q, k, v, index(8) >= index(8)[:, None] - 1)),
    "looks ahead": ("window (all, 1)", lambda q, k, v: sdpa(q, k, v, triangle(diagonal=1))),
    "strictly causal, first row free": (
        "explicit mask (mask-form)",
        lambda q, k, v: sdpa(q, k, v, triangle(diagonal=-1) | (torch.eye(8) > 0)[0]),
    ),
    "strictly causal": (
        "causal from an offset",
        lambda q, k, v: sdpa(q, k, v, triangle(diagonal=-1)),
    ),
    "floor division by one": (
        "causal",
        lambda q, k, v: sdpa(q, k, v, index(8) // 1 <= index(8)[:, None]),
    ),
    "numbers as conditions": (
        "causal",
        lambda q, k, v: filled(q, k, v, torch.ones(8, 8).tril() == 0),
    ),
    "equal, by its method": (
        "causal",
        lambda q, k, v: filled(q, k, v, torch.ones(8, 8).tril().__eq__(0)),
    ),
    "equal to a number that float32 rounds": (
        "causal",
        lambda q, k, v: filled(q, k, v, causal(8, -1e30) == -1e30),
    ),
    "1 - mask times the least number": (
        "causal",
        lambda q, k, v: added(q, k, v, (1.0 - torch.ones(8, 8).tril()) * LEAST),
    ),
    "positions without a jump": (
        "causal",
        lambda q, k, v: sdpa(q, k, v, unpacked(8) & triangle()),
    ),
    "repeated": (
        "causal",
        lambda q, k, v: sdpa(
            q, k, v, index(8).repeat(2, 1)[:, None, None] <= index(8).view(8, 1).repeat(1, 8)
        ),
    ),
    "indices of at least 0": (
        "full",
        lambda q, k, v: sdpa(q, k, v, (index(8)[:, None] >= 0) & ~(index(8) + 1 < 0)),
    ),
    "two added masks": (
        "causal and window (2, 0)",
        lambda q, k, v: added(
            q, k, v + 0, causal(8) + torch.where(triangle(diagonal=-3), -math.inf, 0.0)
        ),
    ),
}  # fmt: skip


NEAR_MISSES = {
    "repeated keys": lambda q, k, v: sdpa(q, k, v, index(4).repeat(2) <= index(8)[:, None]),
    "data": lambda q, k, v: sdpa(q, k, v, q[0, 0, :, :8] > 0),
    "numbers from data": lambda q, k, v: sdpa(q, k, v, q[0, 0, :, :8]),
    "a small bias": lambda q, k, v: sdpa(q, k, v, causal(8, -1.0)),
    "a bias of -1e4": lambda q, k, v: sdpa(q, k, v, causal(8, -1e4)),
    "a bias that scaling weakens": lambda q, k, v: (
        ((q @ k.mT + causal(8, LEAST)) * 1e-30).softmax(-1) @ v
    ),
    "one head": lambda q, k, v: sdpa(
        q, k, v, (index(4) > 0)[None, :, None, None] | triangle()
    ),
    "random": lambda q, k, v: sdpa(q, k, v, torch.rand(8, 8) > 0),
    "prefix": lambda q, k, v: sdpa(q, k, v, triangle() | (index(8) < 3)),
    "dilated": lambda q, k, v: sdpa(q, k, v, ((index(8)[:, None] - index(8)) % 2 == 0) & triangle()),
    "twice the query": lambda q, k, v: sdpa(q, k, v, index(8) <= 2 * index(8)[:, None]),
    "twice the key": lambda q, k, v: sdpa(q, k, v, 2 * index(8) <= index(8)[:, None]),
    "all but the diagonal": lambda q, k, v: sdpa(q, k, v, index(8) != index(8)[:, None]),
    "a sum of indices": lambda q, k, v: sdpa(q, k, v, index(8) + index(8)[:, None] < 9),
    "positions cut to whole numbers": lambda q, k, v: sdpa(
        q, k, v, torch.arange(2.5, 10.5, dtype=torch.int64)[None] < 6
    ),
    "bits of positions": lambda q, k, v: sdpa(
        q, k, v, index(8).float().view(torch.int32) <= index(8)[:, None]
    ),
    "either of two": lambda q, k, v: sdpa(q, k, v, triangle() | triangle(diagonal=3).triu(2)),
    "exclusive or": lambda q, k, v: sdpa(q, k, v, ~triangle() ^ triangle(diagonal=3)),
    "transposed": lambda q, k, v: sdpa(q, k, v, triangle().mT & (index(8) > 0)),
    "positions from data": lambda q, k, v: sdpa(
        q, k, v, index(8) <= (index(8) + (q[0, 0, :, 0] > 9).long())[:, None]
    ),
    "an offset for each head": lambda q, k, v: sdpa(
        q, k, v, index(8) <= (index(8)[:, None] + index(4)[:, None, None])
    ),
    "window wider for later queries": lambda q, k, v: sdpa(
        q, k, v, triangle() & (index(8)[:, None] - index(8) <= index(8)[:, None] // 2)
    ),
    "a cumulated mask": lambda q, k, v: sdpa(q, k, v, (torch.ones(8, 8).cumsum(-1) % 3 > 0)),
    "distance squared": lambda q, k, v: added(
        q, k, v, -0.1 * (index(8)[:, None] - index(8)).float().pow(2)
    ),
    "slopes for each query": lambda q, k, v: added(
        q, k, v, -0.1 * index(8)[:, None] * (index(8)[:, None] - index(8)).abs()
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses_stay_explicit(name):
    found = check(NEAR_MISSES[name], *qkv(), lower="eager")
    assert ops(found) == ["attention"], str(found.report)
    assert "explicit" in mask_of(found)
    assert "attn_mask" in found.graph


def test_masks_with_fewer_keys_than_queries():
    """Rows that see no key: zeros of SDPA, NaN where -inf, and the mean of all values where a number hides."""
    args = qkv(12, 8, grad=False)
    hidden = torch.ones(12, 8).triu(-3) > 0
    zeros = expect(
        "causal", lambda q, k, v: sdpa(q, k, v, ~(torch.ones(12, 8).triu(-3) > 0)), *args
    )
    assert "nan" not in zeros.graph
    nan = expect("causal", lambda q, k, v: filled(q, k, v, torch.ones(12, 8).triu(-3) > 0), *args)
    assert "masked_fill(unsqueeze, nan)" in nan.graph
    assert filled(*args, hidden).isnan().any()
    args = qkv(12, 8, kv_heads=2)
    mean = expect(
        "causal",
        lambda q, k, v: filled(
            q,
            k.repeat_interleave(2, 1),
            v.repeat_interleave(2, 1),
            torch.ones(12, 8).triu(-3) > 0,
            LEAST,
        ),
        *args,
    )
    assert_expected_inline(
        mean.graph,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, L_k_: "f32[2, 2, 8, 16]", L_v_: "f32[2, 2, 8, 16]", L_q_: "f32[2, 4, 12, 16]"):
        l_k_ = L_k_
        l_v_ = L_v_
        l_q_ = L_q_
        attention_default = torch.ops.fdattn.attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = 0.25);  l_q_ = l_k_ = None
        getitem: "f32[2, 4, 12, 16]" = attention_default[0]
        getitem_1: "f32[2, 4, 12]" = attention_default[1];  attention_default = None
        eq: "b8[2, 4, 12]" = getitem_1 == -inf;  getitem_1 = None
        unsqueeze: "b8[2, 4, 12, 1]" = eq.unsqueeze(-1);  eq = None
        mean: "f32[2, 2, 1, 16]" = l_v_.mean(2, keepdim = True);  l_v_ = None
        repeat_interleave_2: "f32[2, 4, 1, 16]" = mean.repeat_interleave(2, 1);  mean = None
        where: "f32[2, 4, 12, 16]" = torch.where(unsqueeze, repeat_interleave_2, getitem);  unsqueeze = repeat_interleave_2 = getitem = None
        return (where,)""",
    )


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_padding_beside_structure(window, eager):
    """Padding is data: it stays a mask of (B, 1, 1, N), beside flags."""

    def fn(q, k, v, padding):
        mask = transformers_mask(q, k, padding, window)
        return transformers_eager(q, k, v, mask) if eager else sdpa(q, k, v, mask)

    structure = "causal and window (2, 0)" if window else "causal"
    found = expect(
        f"{structure} and explicit padding (mask-data)", fn, *qkv(grad=False), PADDING, operand=True
    )
    if not window and not eager:
        assert_expected_inline(
            found.graph,
            """\
class GraphModule(torch.nn.Module):
    def forward(self, L_q_: "f32[2, 4, 8, 16]", L_k_: "f32[2, 4, 8, 16]", L_padding_: "i64[2, 8]", L_v_: "f32[2, 4, 8, 16]"):
        l_q_ = L_q_
        l_k_ = L_k_
        l_padding_ = L_padding_
        l_v_ = L_v_
        getitem_4: "i64[2, 1, 1, 8]" = l_padding_[(slice(None, None, None), None, None, slice(None, None, None))];  l_padding_ = None
        ne: "b8[2, 1, 1, 8]" = getitem_4 != 0;  getitem_4 = None
        attention_default = torch.ops.fdattn.attention.default(l_q_, l_k_, l_v_, None, None, causal = True, scale = None, attn_mask = ne);  l_q_ = l_k_ = l_v_ = ne = None
        getitem_5: "f32[2, 4, 8, 16]" = attention_default[0];  attention_default = None
        return (getitem_5,)""",
        )


def test_least_numbers_that_are_summed():
    """Twice the least number is -inf: a query that sees no key weighs those that were hidden once."""

    def fn(q, k, v, lengths):
        padding = torch.where(index(8) < lengths[:, None, None, None], 0.0, LEAST)
        return added(q, k, v, causal(8, LEAST) + padding)

    args = *qkv(grad=False), torch.tensor([0, 5])
    expect("explicit mask (mask-rows)", fn, *args, operand=True)


def test_all_keys_hidden_twice():
    def fn(q, k, v):
        rows = torch.where(index(8)[:, None] > 2, 0.0, LEAST)
        return (q @ k.mT + rows + rows).softmax(-1) @ v

    found = check(fn, *qkv(grad=False), lower="eager")
    assert "nan" in found.graph


@pytest.mark.parametrize("how", [lambda s: s * 2, lambda s: s.bfloat16().float()])
def test_hidden_scores_that_become_infinite(how):
    """Rows that see no key are NaN then."""

    def fn(q, k, v):
        scores = (q @ k.mT).masked_fill(index(8)[:, None] <= index(8), LEAST)
        return how(scores).softmax(-1) @ v

    found = check(fn, *qkv(grad=False), lower="eager", rtol=0.1, atol=0.1)
    assert ops(found) == ["attention"]
    assert "nan" in found.graph


def test_padding_in_training():
    """Where finite numbers hide all keys of a query, its output does not depend on q and k."""

    def fn(q, k, v, padding):
        out = transformers_eager(q, k, v, transformers_mask(q, k, padding))
        return out * padding[:, None, :, None]

    expect("causal and explicit padding (mask-data)", fn, *qkv(), PADDING, operand=True)


def vmapped(rule, batch, q_len, kv_len):
    """As transformers makes masks of rules for single indices, where they are not its own."""
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None)):
        rule = torch.vmap(rule, in_dims=dims)
    rule = torch.vmap(rule, in_dims=(0, None, None, None))
    return rule(index(batch), index(1), index(q_len), index(kv_len))


def test_masks_by_vmap():
    def fn(q, k, v, padding):
        mask = vmapped(lambda b, h, i, j: (j <= i) & (j > i - 3) & padding[b, j], 2, 8, 8)
        return sdpa(q, k, v, mask)

    expect(
        "causal and window (2, 0) and explicit padding (mask-data)", fn, *qkv(), PADDING.bool(),
        operand=True,
    )  # fmt: skip


def test_masks_by_vmap_that_are_not_understood():
    def fn(q, k, v, image):
        mask = vmapped(lambda b, h, i, j: (j <= i) | (image[b, i] == image[b, j]), 2, 8, 8)
        return sdpa(q, k, v, mask)

    expect("explicit mask (mask-data)", fn, *qkv(), PADDING, operand=True)


def test_attention_inside_of_vmap_is_left():
    def fn(q, k, v):
        return torch.vmap(lambda x: (x, sdpa(q, k, v)), out_dims=(0, None))(q)[1]

    found = check(fn, *qkv(grad=False), lower="eager", exact=True)
    assert found.report.reasons == ["functorch"]
