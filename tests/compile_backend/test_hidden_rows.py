"""Queries that see no key, whatever numbers hide their keys: what eager gives them, gradients included."""

import math
from unittest.mock import patch

import pytest
import torch

from tests.compile_backend.harness import Recorder, check, ops, qkv
from tests.pairwise import pairwise
from torch_fdattn.testing import check_close

LEAST = torch.finfo(torch.float32).min


LENGTH = 8


CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


#: Padding on the left: queries before the first token see none.
KEEP = torch.tensor([[0] * 3 + [1] * 5, [1] * 8]).bool()


WAYS = {
    "masked_fill": lambda s, seen, fill, given: s.masked_fill(~seen, fill),
    "where": lambda s, seen, fill, given: torch.where(seen, s, fill),
    "added": lambda s, seen, fill, given: s + torch.where(seen, 0.0, fill),
    "given": lambda s, seen, fill, given: s + given,
}


#: Of the causal mask and of the padding.
FILLS = ((-math.inf, LEAST), (LEAST, -math.inf), (LEAST, LEAST))


def two_masks(ways, fills, order):
    def fn(q, k, v, keep, *given):
        masks = list(zip((CAUSAL, keep[:, None, None, :]), fills, ways, given, strict=True))
        scores = q @ k.mT * 0.25
        for seen, fill, way, numbers in masks[::order]:
            scores = WAYS[way](scores, seen, fill, numbers)
        return scores.softmax(-1) @ v

    seen = CAUSAL, KEEP[:, None, None, :]
    return fn, [torch.where(x, 0.0, fill) for x, fill in zip(seen, fills, strict=True)]


@pairwise(first=WAYS, second=WAYS, fills=FILLS, order=[1, -1], grad=[False, True])
def test_two_masks_that_hide(first, second, fills, order, grad):
    """In the order in which they are written: a number over -inf, or -inf over a number, or their sum."""
    fn, given = two_masks((first, second), fills, order)
    args = *qkv(LENGTH, grad=grad), KEEP, *given
    backend = Recorder("eager")
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=backend, fullgraph=True)
    found, expected = results(compiled, args), results(fn, args)
    for name, x in found.items():
        same = torch.allclose(x, expected[name], 1e-4, 1e-5, equal_nan=True)
        assert same, (name, str(backend.found.report))
    assert len(backend.found.report.rewritten) == 1


def results(fn, args) -> dict[str, torch.Tensor]:
    out = fn(*args)
    leaves = [x for x in args if x.requires_grad]
    make = torch.Generator().manual_seed(3)
    found = {"out": out.detach()}
    if leaves:
        dout = torch.randn(out.shape, generator=make).to(out.dtype)
        grads = torch.autograd.grad(out, leaves, dout, allow_unused=True)
        found |= {
            f"d{i}": torch.zeros_like(x) if grad is None else grad
            for i, (x, grad) in enumerate(zip(leaves, grads, strict=True))
        }
    return found


#: Additions that hide a whole row and yet are numbers, whose digits the scores lose: (how, whether it is data).
FAR = (-100.0, -1e4, -1e6, -1e9, -1e12, -1e20, -1e30, LEAST)


def padded(fill):
    return lambda q, k, v, keep, mask: (
        (q @ k.mT * 0.25 + torch.where(keep[:, None, None], 0.0, fill)).softmax(-1) @ v
    )


NUMBERS = {
    "made in the graph": padded,
    "given": lambda fill: lambda q, k, v, keep, mask: (q @ k.mT * 0.25 + mask).softmax(-1) @ v,
    "1 - mask, times": lambda fill: lambda q, k, v, keep, mask: (
        (q @ k.mT * 0.25 + (1.0 - keep[:, None, None].to(q.dtype)) * fill).softmax(-1) @ v
    ),
    "beside a causal mask": lambda fill: lambda q, k, v, keep, mask: (
        (q @ k.mT * 0.25 + mask).masked_fill(~CAUSAL, -math.inf).softmax(-1) @ v
    ),
    "scaled afterwards": lambda fill: lambda q, k, v, keep, mask: (
        ((q @ k.mT + mask) * 0.25).softmax(-1) @ v
    ),
    "grouped heads": lambda fill: lambda q, k, v, keep, mask: (
        (q @ k[:, :2].repeat_interleave(2, 1).mT * 0.25 + mask).softmax(-1)
        @ v[:, :2].repeat_interleave(2, 1)
    ),
    "scores of three dimensions": lambda fill: lambda q, k, v, keep, mask: (
        (q[:, 0] @ k[:, 0].mT + mask[:, 0]).softmax(-1) @ v[:, 0]
    ),
    "by SDPA": lambda fill: lambda q, k, v, keep, mask: (
        torch.nn.functional.scaled_dot_product_attention(q, k, v, mask.expand(2, 1, 8, 8))
    ),
}  # fmt: skip


@pytest.mark.parametrize("fill", FAR)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_hide_a_row(name, fill):
    """The row attends by the digits that are left of its scores, and passes gradients on as it does."""
    torch.manual_seed(0)
    keep = KEEP & torch.tensor([[False], [True]])  # of one sequence no key is seen
    mask = torch.where(keep[:, None, None], 0.0, fill)
    args = *qkv(LENGTH), keep, mask
    fn = NUMBERS[name](fill)
    backend = Recorder("eager")
    torch._dynamo.reset()
    found = results(torch.compile(fn, backend=backend, fullgraph=True), args)
    assert ops(backend.found) == ["attention"], str(backend.found.report)
    by_formula = NUMBERS["given"](fill) if name == "by SDPA" else fn
    eager = results(by_formula, args)
    exact = results(by_formula, [wide(x) for x in args])
    with patch.object(torch.Tensor, "softmax", lambda s, dim: SoftmaxOfSavedLse.apply(s, dim)):
        streamed = results(by_formula, args)
    for each, x in found.items():
        errors = [run[each].double() - exact[each] for run in (eager, streamed)]
        # One sample of fp32's error is a lottery.
        errors += [torch.full_like(exact[each], 3e-6)]
        check_close(each, x, exact[each], errors)


class SoftmaxOfSavedLse(torch.autograd.Function):
    """As FlashAttention's backward has it: a saved lse loses digits beside a large fill, the output does not."""

    @staticmethod
    def forward(ctx, scores, dim):
        weights = torch.softmax(scores, dim)
        ctx.save_for_backward(scores, weights, scores.logsumexp(dim, keepdim=True))
        ctx.dim = dim
        return weights

    @staticmethod
    def backward(ctx, dweights):
        scores, weights, lse = ctx.saved_tensors
        mean = (weights * dweights).sum(ctx.dim, keepdim=True)
        return (scores - lse).exp() * (dweights - mean), None


def wide(x):
    return x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x


@pytest.mark.parametrize("how", ["filled", "added"])
def test_rows_of_nan_have_gradients_of_nan(how):
    """Where -inf hides all keys of a query: as in eager, to a fill no gradient passes but through the values."""

    def fn(q, k, v, keep):
        scores = q @ k.mT * 0.25
        if how == "filled":
            return scores.masked_fill(~keep[:, None, None], -math.inf).softmax(-1) @ v
        return (scores + torch.where(keep[:, None, None], 0.0, -math.inf)).softmax(-1) @ v

    args = *qkv(LENGTH), KEEP & torch.tensor([[False], [True]])
    backend = Recorder("eager")
    torch._dynamo.reset()
    found = results(torch.compile(fn, backend=backend, fullgraph=True), args)
    assert ops(backend.found) == ["attention"]
    for name, x in results(fn, args).items():
        torch.testing.assert_close(found[name], x, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_what_a_softcap_makes_of_hidden_rows_is_left():
    """Their gradient goes through the slope of the cap at scores that the sum has swallowed."""

    def fn(q, k, v, keep):
        scores = 20 * torch.tanh(q @ k.mT / 20)
        return (scores + torch.where(keep[:, None, None], 0.0, LEAST)).softmax(-1) @ v

    found = check(fn, *qkv(LENGTH), KEEP, lower="eager")
    assert found.report.reasons == ["mask-value"]
    assert ops(check(fn, *qkv(LENGTH, grad=False), KEEP, lower="eager")) == ["attention"]


def test_learned_slopes_of_hidden_rows():
    """They get a gradient of a row that a sum hides, as in eager."""

    def fn(q, k, v, keep, slopes):
        bias = slopes[:, None, None] * (torch.arange(8) - torch.arange(8)[:, None])
        mask = torch.where(keep[:, None, None] & CAUSAL, bias, LEAST)
        return (q @ k.mT + mask).softmax(-1) @ v

    args = *qkv(LENGTH), KEEP, torch.rand(4, requires_grad=True)
    assert ops(check(fn, *args, lower="eager")) == ["attention"]


@pytest.mark.parametrize(
    ("name", "lower"),
    [("given", "aot_eager"), ("beside a causal mask", "eager"), ("made in the graph", "aot_eager")],
)
def test_sizes_that_are_symbols(name, lower):
    """No guards are added but those of the head dim, and the sums are the same."""
    keep = KEEP & torch.tensor([[False], [True]])
    mask = torch.where(keep[:, None, None], 0.0, -1e4)
    check(
        NUMBERS[name](-1e4),
        *qkv(LENGTH),
        keep,
        mask,
        lower=lower,
        dynamic=True,
        rtol=2e-3,
        atol=2e-3,
    )
