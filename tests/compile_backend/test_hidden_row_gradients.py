"""Gradients of queries that see no key, where they are NaN or go through what is learned."""

import math

import pytest
import torch

from tests.compile_backend.harness import Recorder, check, ops, qkv
from tests.compile_backend.test_hidden_rows import (
    CAUSAL,
    KEEP,
    LEAST,
    LENGTH,
    NUMBERS,
    results,
    wide,
)
from torch_fdattn.testing import check_close

#: Tokens of none of which a sequence has, of five, and of some: no query sees a key, or some see none.
NONE = KEEP & torch.tensor([[True], [False]])


LATE = torch.tensor([[0] * 3 + [1] * 5, [0] * 5 + [1] * 3]).bool()


def compared(fn, *args):
    """Rewritten, and held to the rule against fp64; NaN stands where eager has it."""
    backend = Recorder("eager")
    torch._dynamo.reset()
    found = results(torch.compile(fn, backend=backend, fullgraph=True), args)
    assert ops(backend.found) == ["attention"], str(backend.found.report)
    eager, exact = results(fn, args), results(fn, [wide(x) for x in args])
    for name, x in found.items():
        odd = eager[name].isnan()
        assert torch.equal(x.isnan(), odd), f"{name}: NaN elsewhere"
        x, right, by_torch = (y.masked_fill(odd, 0.0) for y in (x, exact[name], eager[name]))
        check_close(name, x, right, [by_torch.double() - right, torch.full_like(right, 3e-6)])
    return backend.found


def hidden_by(keep, fill):
    return torch.where(keep[:, None, None], 0.0, fill)


def test_a_fill_beside_a_sum_on_a_learned_bias():
    """Two numbers hide, one of them in a tensor that wants a gradient."""
    bias = torch.randn(4, 8, 8, requires_grad=True)

    def fn(q, k, v, keep, bias):
        padded = bias.masked_fill(~keep[:, None, None], LEAST)
        return ((q @ k.mT * 0.25).masked_fill(~CAUSAL, LEAST) + padded).softmax(-1) @ v

    compared(fn, *qkv(LENGTH), LATE, bias)


def test_a_bias_and_a_mask_in_one_tensor_that_wants_a_gradient():
    seen = CAUSAL & LATE[:, None, None]
    bias = torch.where(seen, torch.randn(1, 4, 8, 8), LEAST).requires_grad_()
    compared(lambda q, k, v, bias: (q @ k.mT * 0.25 + bias).softmax(-1) @ v, *qkv(LENGTH), bias)


@pytest.mark.parametrize("how", ["parameter", "table", "gathered", "projected"])
def test_a_learned_bias_costs_nothing_more(how):
    """A parameter holds no number that hides, whatever views and projections make of it."""
    table = torch.nn.Parameter(torch.randn(16, 4))
    distance = torch.arange(8)[:, None] - torch.arange(8) + 8
    whole = torch.nn.Parameter(torch.randn(1, 4, 8, 8))
    biases = {
        "parameter": lambda w: w,
        "table": lambda w: torch.nn.functional.embedding(distance, w).permute(2, 0, 1)[None],
        "gathered": lambda w: w[distance.flatten()].view(8, 8, 4).permute(2, 0, 1),
        "projected": lambda w: torch.nn.functional.linear(w, w[:4]).sigmoid().T[:, None, :8],
    }
    fn = lambda q, k, v, w: (q @ k.mT + biases[how](w)).softmax(-1) @ v  # noqa: E731
    args = *qkv(LENGTH), whole if how == "parameter" else table
    if how == "projected":
        args = *args[:3], torch.nn.Parameter(torch.randn(8, 8))
    found = check(fn, *args, lower="eager")
    assert ops(found) == ["attention"]
    assert "cat" not in found.graph
    assert "amax" not in found.graph


def test_what_a_parameter_is_filled_with_is_no_parameters():
    """A value that a padding brings, or the greater of two."""

    def fn(q, k, v, mask, bias):
        return (q @ k.mT * 0.25 + torch.minimum(bias, mask)).softmax(-1) @ v

    compared(fn, *qkv(LENGTH), hidden_by(LATE, LEAST), torch.nn.Parameter(torch.randn(4, 8, 8)))


@pytest.mark.parametrize("fill", [-math.inf, LEAST, -1e9, -100.0])
@pytest.mark.parametrize("name", [x for x in NUMBERS if x != "1 - mask, times"])  # 0 * inf is NaN
def test_the_promise_that_no_row_is_fully_masked(name, fill):
    """The mask is taken as it is, and all rows are as in eager."""
    mask = hidden_by(KEEP & KEEP.any(-1, keepdim=True), fill)
    mask[..., 0] = 0.0  # which every query sees
    keep = mask[:, 0, 0] == 0
    fn, args = NUMBERS[name](fill), (*qkv(LENGTH), keep, mask)
    backend = Recorder("eager", no_fully_masked_rows=True)
    torch._dynamo.reset()
    found = results(torch.compile(fn, backend=backend, fullgraph=True), args)
    assert ops(backend.found) == ["attention"], str(backend.found.report)
    for helper in ("cat", "amax", "clamp"):
        assert helper not in backend.found.graph
    for each, x in results(fn, args).items():
        torch.testing.assert_close(found[each], x, rtol=1e-4, atol=1e-5)


def test_the_promise_is_an_option_of_the_backend():
    from torch_fdattn.compile_backend import fdattn

    options = {"no_fully_masked_rows": True, "lower": "eager", "require_all": True}
    fn, args = NUMBERS["given"](LEAST), (*qkv(LENGTH), KEEP, hidden_by(LATE | KEEP, LEAST))
    torch._dynamo.reset()
    found = torch.compile(fn, backend=fdattn, options=options, fullgraph=True)(*args)
    torch.testing.assert_close(found[1], fn(*args)[1], rtol=1e-4, atol=1e-5)


BIAS = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(1))


#: Sums below what our ops tell from -inf: of scores, the keys that are kept and an additive mask.
BELOW = {
    "subtracted": lambda s, keep, mask: s + BIAS - (~keep[:, None, None]).float() * -LEAST,
    "subtracted beside causal": lambda s, keep, mask: (
        s + torch.where(CAUSAL, 0.0, LEAST) - (~keep[:, None, None]).float() * -LEAST
    ),
    "scaled up": lambda s, keep, mask: ((s + BIAS) * 0.1 - (~keep[:, None, None]).float() * 3e37) * 10,
    "half of the least, twice": lambda s, keep, mask: (
        s + hidden_by(keep, LEAST / 2) + hidden_by(LATE, LEAST / 2)
    ),
    "half of the least, twice the same": lambda s, keep, mask: (
        s + hidden_by(keep, LEAST / 2) + hidden_by(keep, LEAST / 2)
    ),
    "-1e38, twice": lambda s, keep, mask: s + hidden_by(keep, -1e38) + hidden_by(LATE, -1e38),
    "-6e37 of data, twice": lambda s, keep, mask: s + mask * 6e37 + mask.flip(-1) * 6e37,
    "of several numbers": lambda s, keep, mask: s + mask * torch.linspace(1.2e38, 3e38, 8),
    "of two dtypes": lambda s, keep, mask: (
        s + torch.where(CAUSAL, 0.0, torch.finfo(torch.bfloat16).min) + hidden_by(keep, LEAST)
    ),
    "and scaled down": lambda s, keep, mask: (
        (s + hidden_by(keep, LEAST) + hidden_by(keep, LEAST)) * 0.25
    ),
    "and scaled down, of data": lambda s, keep, mask: (s + mask * 3e38 + mask * 3e38) * 0.25,
}  # fmt: skip


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("keep", [LATE, NONE])
@pytest.mark.parametrize("name", BELOW)
def test_sums_below_the_limit(name, keep, grad):
    """Where a row is hidden by several, the highest of them has all the weight."""

    def fn(q, k, v, keep, mask):
        return BELOW[name](q @ k.mT * 0.25, keep, mask).softmax(-1) @ v

    args = *qkv(LENGTH, grad=grad), keep, torch.where(keep[:, None, None], 0.0, -1.0)
    compared(fn, *args)


def test_a_mask_of_another_dtype_than_the_products():
    """float16's least number leaves digits of scores in float32: it is no fill there."""

    def fn(q, k, v, keep):
        scores = (q @ k.mT * 0.25).float()
        return (scores + hidden_by(keep, -65504.0)).softmax(-1).to(v.dtype) @ v

    compared(fn, *qkv(LENGTH, dtype=torch.float16, grad=False), NONE)
    compared(fn, *qkv(LENGTH, dtype=torch.float16), NONE)


def far(keep):
    """A number that hides nothing for certain, and is -inf when it is added five times."""
    return torch.where(keep[:, None, :, None], 0.0, -8e37)


NANS = {
    "filled, and added": lambda s, keep, bias: (
        s.masked_fill(~CAUSAL, -math.inf) + hidden_by(keep, -math.inf)
    ),
    "added, and filled": lambda s, keep, bias: (s + hidden_by(keep, -math.inf)).masked_fill(
        ~CAUSAL, -math.inf
    ),
    "a bias, and filled": lambda s, keep, bias: (s + bias).masked_fill(
        ~(CAUSAL & keep[:, None, None]), -math.inf
    ),
    "filled, and a bias": lambda s, keep, bias: (
        s.masked_fill(~(CAUSAL & keep[:, None, None]), -math.inf) + bias
    ),
    "a bias, and added": lambda s, keep, bias: (
        s + bias + torch.where(CAUSAL & keep[:, None, None], 0.0, -math.inf)
    ),
    "a fill between": lambda s, keep, bias: (
        (s + bias).masked_fill(~CAUSAL, -math.inf) + hidden_by(keep, -math.inf)
    ),
    "filled by the least, and a logarithm": lambda s, keep, bias: (
        s.masked_fill(~CAUSAL, LEAST) + keep[:, None, :, None].float().log()
    ),
    "a logarithm, and filled by the least": lambda s, keep, bias: (
        s + keep[:, None, :, None].float().log()
    ).masked_fill(~CAUSAL, LEAST),
    "a fill between a bias and a logarithm": lambda s, keep, bias: (
        torch.where(CAUSAL, s + bias, LEAST) + keep[:, None, :, None].float().log()
    ),
    "filled by the least, and several sums": lambda s, keep, bias: (
        torch.where(CAUSAL, s, LEAST) + far(keep) + far(keep) + far(keep) + far(keep) + far(keep)
    ),
}


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("name", NANS)
def test_gradients_of_nan_are_where_eager_has_them(name, kv_heads):
    """Beside an output of NaN: through a sum, and not where a fill hides."""

    def fn(q, k, v, keep, bias):
        k, v = (x.repeat_interleave(4 // kv_heads, 1) for x in (k, v))
        return NANS[name](q @ k.mT * 0.25, keep, bias).softmax(-1) @ v

    bias = torch.nn.Parameter(torch.randn(4, 8, 8))
    compared(fn, *qkv(LENGTH, kv_heads=kv_heads), LATE, bias)


def test_infinity_that_is_added_is_left():
    """Eager's rows are NaN there."""

    def fn(q, k, v, keep):
        return (q @ k.mT - hidden_by(keep, -math.inf)).softmax(-1) @ v

    args = *qkv(LENGTH, grad=False), KEEP
    assert check(fn, *args, lower="eager").report.reasons == ["mask-value"]


def test_half_precisions_sums():
    """Two of its least numbers are -inf, and one leaves no digits of scores to either attention."""

    def overflow(q, k, v, keep):
        scores = q @ k.mT * 0.25 + torch.where(keep[:, None, None], 0.0, -1e4).half()
        near = torch.where(CAUSAL, 0.0, -30000.0).half()
        return (scores + torch.where(keep[:, None, None], near, -65504.0)).softmax(-1) @ v

    def filled(q, k, v, keep):
        scores = (q @ k.mT * 0.25).masked_fill(~CAUSAL, -65504.0)
        near = torch.where(CAUSAL.T, 0.0, -5e3).half()
        return (scores + hidden_by(keep, -65504.0).half() + near).softmax(-1) @ v

    for fn in (overflow, filled):
        compared(fn, *qkv(LENGTH, dtype=torch.float16), NONE)
        compared(fn, *qkv(LENGTH, dtype=torch.float16), LATE)
