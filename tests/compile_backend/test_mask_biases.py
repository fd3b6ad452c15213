"""Masks of lengths, ALiBi, and biases that are added to scores."""

import math

import pytest
import torch
from expecttest import assert_expected_inline

from tests.compile_backend.harness import check, ops, qkv
from tests.compile_backend.mask_forms import (
    LEAST,
    LENGTHS,
    SLOPES,
    added,
    causal,
    expect,
    filled,
    index,
    sdpa,
    triangle,
)

LENGTH_MASKS = {
    "arange < lengths": lambda lengths: (index(8) < lengths[:, None])[:, None, None, :],
    "lengths > arange": lambda lengths: lengths.view(2, 1, 1, 1) > index(8),
    "at most the last": lambda lengths: index(8) <= (lengths - 1)[:, None, None, None],
    "not beyond": lambda lengths: ~(index(8)[None] >= lengths[:, None])[:, None, None],
}


@pytest.mark.parametrize("name", LENGTH_MASKS)
def test_lengths(name):
    make = LENGTH_MASKS[name]
    expect("lengths", lambda q, k, v, n: sdpa(q, k, v, make(n)), *qkv(), LENGTHS)
    expect("lengths", lambda q, k, v, n: filled(q, k, v, ~make(n), LEAST), *qkv(), LENGTHS)
    expect(
        "causal from an offset and lengths",
        lambda q, k, v, n: sdpa(q, k, v, make(n) & triangle()), *qkv(), LENGTHS,
    )  # fmt: skip


def test_lengths_of_none():
    """NaN of a sequence without keys, as before."""
    lengths = torch.tensor([0, 4])
    make = LENGTH_MASKS["arange < lengths"]
    args = qkv(grad=False)
    found = expect("lengths", lambda q, k, v, n: filled(q, k, v, ~make(n)), *args, lengths)
    assert "nan" in found.graph


def test_lengths_graph():
    make = LENGTH_MASKS["arange < lengths"]
    found = expect("lengths", lambda q, k, v, n: sdpa(q, k, v, make(n)), *qkv(), LENGTHS)
    assert_expected_inline(
        found.graph,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, L_n_: "i64[2]", L_q_: "f32[2, 4, 8, 16]", L_k_: "f32[2, 4, 8, 16]", L_v_: "f32[2, 4, 8, 16]"):
        l_n_ = L_n_
        l_q_ = L_q_
        l_k_ = L_k_
        l_v_ = L_v_
        clamp: "i64[2]" = l_n_.clamp(-536870912, 536870912);  l_n_ = None
        to: "i32[2]" = clamp.to(torch.int32);  clamp = None
        attention_default = torch.ops.fdattn.attention.default(l_q_, l_k_, l_v_, to, None, causal = False, scale = None);  l_q_ = l_k_ = l_v_ = to = None
        getitem_2: "f32[2, 4, 8, 16]" = attention_default[0];  attention_default = None
        return (getitem_2,)""",
    )


ALIBI = {
    "slopes that are counted": lambda q, k, v, s: added(
        q, k, v, causal(8) + index(4).float()[:, None, None] * index(8)
    ),
    "distance": lambda q, k, v, s: added(
        q, k, v, causal(q.shape[2]) - s[:, None, None] * (index(8)[:, None] - index(8)).abs()
    ),
    "keys alone": lambda q, k, v, s: added(
        q, k, v, causal(8) + s.view(1, 4, 1, 1) * (index(8) - 7).view(1, 1, 1, 8)
    ),
    "two additions": lambda q, k, v, s: (
        (q @ k.mT + s[:, None, None] * (index(8) - index(8)[:, None]) + causal(8)).softmax(-1) @ v
    ),
    "filled afterwards": lambda q, k, v, s: (
        (q @ k.mT + s[:, None, None] * index(8)).masked_fill(~triangle(), -math.inf).softmax(-1) @ v
    ),
}


@pytest.mark.parametrize("name", ALIBI)
def test_slopes_with_gradients(name):
    """Others are in test_snapshots.py."""
    expect("causal and ALiBi", ALIBI[name], *qkv(), SLOPES.clone().requires_grad_())


def test_alibi_of_both_sides():
    def fn(q, k, v, s):
        return (q @ k.mT - s[:, None, None] * (index(8)[:, None] - index(8)).abs()).softmax(-1) @ v

    expect("ALiBi", fn, *qkv(), SLOPES)


def test_slopes_that_are_cut_off_from_gradients():
    def fn(q, k, v, s):
        with torch.no_grad():
            bias = s[:, None, None] * index(8) + causal(8)
        return added(q, k, v, bias), s.sin()

    expect(
        "explicit mask (mask-gradient)", fn, *qkv(), SLOPES.clone().requires_grad_(), operand=True
    )


#: Shapes of a bias besides its full one, which test_snapshots.py has, and (H, 1, N).
BROADCAST = [(2, 1, 1, 8), (8, 8), (8, 1), (8,)]


BIASES = {
    "sdpa": lambda q, k, v, b: sdpa(q, k, v, b),
    "added": added,
    "scaled with the scores": lambda q, k, v, b: ((q @ k.mT + b) * 0.5).softmax(-1) @ v,
    "subtracted": lambda q, k, v, b: (q @ k.mT - b).softmax(-1) @ v,
    "with a causal mask": lambda q, k, v, b: (
        (q @ k.mT + b).masked_fill(~triangle(), -math.inf).softmax(-1) @ v
    ),
    "two of them": lambda q, k, v, b: (q @ k.mT + b + b.sin()).softmax(-1) @ v,
}


@pytest.mark.parametrize(
    "shape",
    [(4, 1, 8), *(pytest.param(shape, marks=pytest.mark.slow) for shape in BROADCAST)],
)
@pytest.mark.parametrize("name", BIASES)
def test_a_bias_with_gradient(name, shape):
    bias = torch.randn(shape, requires_grad=True)
    found = check(BIASES[name], *qkv(), bias, lower="eager")
    assert ops(found) == ["attention"], str(found.report)
    assert "attn_mask" in found.graph


def test_a_bias_of_three_dimensions():
    """Scores (B, S, N) of heads folded into the batch: the bias has no heads either."""
    args = [x.detach().flatten(0, 1).requires_grad_() for x in qkv()]
    bias = torch.randn(8, 8, 8, requires_grad=True)
    for fn in (BIASES["sdpa"], added):
        found = expect("explicit mask (mask-data)", fn, *args, bias, operand=True)
        assert ".unsqueeze(1)" in found.graph


def test_finite_numbers_in_a_bias_from_outside():
    """They hide keys that -inf would hide too, but of queries that see no other."""
    bias = torch.zeros(2, 1, 8, 8)
    bias[:, :, :3, :5] = LEAST
    bias[0, 0, 1] = LEAST
    bias[1, 0, 1] = -math.inf
    bias[1, 0, 1, :2] = LEAST
    args = qkv(grad=False)
    for fn in (BIASES["sdpa"], added):
        found = expect("explicit mask (mask-data)", fn, *args, bias, operand=True)
    assert_expected_inline(
        found.graph,
        """\
class GraphModule(torch.nn.Module):
    def forward(self, L_k_: "f32[2, 4, 8, 16]", L_q_: "f32[2, 4, 8, 16]", L_mask_: "f32[2, 1, 8, 8]", L_v_: "f32[2, 4, 8, 16]"):
        l_k_ = L_k_
        l_q_ = L_q_
        l_mask_ = L_mask_
        l_v_ = L_v_
        amax: "f32[2, 1, 8, 1]" = l_mask_.amax(-1, keepdim = True)
        eq: "b8[2, 1, 8, 1]" = amax == -inf
        masked_fill: "f32[2, 1, 8, 1]" = amax.masked_fill(eq, 0.0);  eq = None
        sub: "f32[2, 1, 8, 8]" = l_mask_ - masked_fill;  l_mask_ = masked_fill = None
        le: "b8[2, 1, 8, 1]" = amax <= -1e+16;  amax = None
        masked_fill_1: "f32[2, 4, 8, 16]" = l_q_.masked_fill(le, 0.0);  l_q_ = le = None
        attention_default = torch.ops.fdattn.attention.default(masked_fill_1, l_k_, l_v_, None, None, causal = False, scale = 0.25, attn_mask = sub);  masked_fill_1 = l_k_ = l_v_ = sub = None
        getitem: "f32[2, 4, 8, 16]" = attention_default[0]
        getitem_1: "f32[2, 4, 8]" = attention_default[1];  attention_default = None
        eq_1: "b8[2, 4, 8]" = getitem_1 == -inf;  getitem_1 = None
        unsqueeze: "b8[2, 4, 8, 1]" = eq_1.unsqueeze(-1);  eq_1 = None
        masked_fill_2: "f32[2, 4, 8, 16]" = getitem.masked_fill(unsqueeze, nan);  getitem = unsqueeze = None
        return (masked_fill_2,)""",
    )


def test_a_mask_in_float16():
    """-3e4 is far from what every score in float16 is above, and -65504 is its least."""

    def fn(q, k, v, fill):
        mask = torch.full((8, 8), fill, dtype=q.dtype).triu(1)
        return (q @ k.mT + mask).softmax(-1) @ v

    args, close = qkv(dtype=torch.float16, grad=False), {"rtol": 2e-2, "atol": 2e-2}
    expect(
        "explicit mask (mask-form)", lambda q, k, v: fn(q, k, v, -3e4), *args, operand=True, **close
    )
    expect("causal", lambda q, k, v: fn(q, k, v, -65504.0), *args, **close)


def test_a_mask_whose_least_number_is_another_dtypes():
    """float32's least number is -inf in bfloat16."""

    def fn(q, k, v):
        mask = torch.full((8, 8), LEAST).triu(1).to(q.dtype)
        return (q @ k.mT + mask).softmax(-1) @ v

    expect("causal", fn, *qkv(dtype=torch.bfloat16, grad=False), rtol=2e-2, atol=2e-2)
