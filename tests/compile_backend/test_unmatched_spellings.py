"""Softmaxes and products in spellings that no form has: each is a site that is left, so that `require_all` fails."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.compile_backend.harness import check, qkv


def in_place(q, k, v):
    s = q @ k.mT
    s -= s.amax(-1, keepdim=True)
    s.exp_()
    s /= s.sum(-1, keepdim=True)
    return s @ v


def in_place_methods(q, k, v):
    s = q @ k.mT
    s.sub_(s.amax(-1, keepdim=True)).exp_()
    s.div_(s.sum(-1, keepdim=True))
    return s @ v


def in_place_by_other_names(q, k, v):
    s = q @ k.mT
    s.subtract_(s.amax(-1, keepdim=True))
    s.exp_()
    return s.divide_(s.sum(-1, keepdim=True)) @ v


def times_a_reciprocal(q, k, v):
    e = (q @ k.mT).exp()
    return (e * e.sum(-1, keepdim=True).reciprocal_()) @ v


def in_place_by_a_view(q, k, v):
    s = q @ k.mT
    s.view(8, 8, 8).exp_()
    s /= s.sum(-1, keepdim=True)
    return s @ v


def in_place_exp_alone(q, k, v):
    e = (q @ k.mT).exp_()
    return (e / e.sum(-1, keepdim=True)) @ v


def in_place_less_logsumexp(q, k, v):
    s = q @ k.mT
    s.sub_(s.logsumexp(-1, keepdim=True))
    s.exp_()
    return s @ v


def exp_into_scores(q, k, v):
    s = q @ k.mT
    torch.exp(s, out=s)
    return (s / s.sum(-1, keepdim=True)) @ v


def divided(power, total):
    """A softmax as a power that is divided by a total."""

    def fn(q, k, v):
        e = power(q @ k.mT)
        return (e / total(e)) @ v

    return fn


def of_a_head(fn):
    return lambda q, k, v: fn(q[0, 0], k[0, 0], v[0, 0])


def summed(e):
    return e.sum(-1, keepdim=True)


#: (the operation that is named, the function).
SPELLINGS = {
    "in place": ("exp_", in_place),
    "in place, methods": ("exp_", in_place_methods),
    "in place, by other names": ("exp_", in_place_by_other_names),
    "times a reciprocal": ("exp", times_a_reciprocal),
    "in place, by a view": ("exp_", in_place_by_a_view),
    "exp_ alone": ("exp_", in_place_exp_alone),
    "in place, less logsumexp": ("exp_", in_place_less_logsumexp),
    "exp into its input": ("exp", exp_into_scores),
    "exp2": ("exp2", divided(torch.exp2, summed)),
    "exp2_": ("exp2_", divided(lambda s: s.exp2_(), summed)),
    "special.exp2": ("exp2", divided(torch.special.exp2, summed)),
    "torch.pow": ("pow", divided(lambda s: torch.pow(math.e, s), summed)),
    "**": ("pow", divided(lambda s: math.e**s, summed)),
    "** of a tensor": ("pow", divided(lambda s: torch.tensor(math.e) ** s, summed)),
    "a product with ones": ("exp", divided(torch.exp, lambda e: e @ torch.ones(8, 1))),
    "norm": ("exp", divided(torch.exp, lambda e: e.norm(p=1, dim=-1, keepdim=True))),
    "vector_norm": (
        "exp", divided(torch.exp, lambda e: torch.linalg.vector_norm(e, 1, -1, keepdim=True)),
    ),
    "a sum by einsum": ("exp", divided(torch.exp, lambda e: torch.einsum("bhqk->bhq", e)[..., None])),
    "an einsum with ones": (
        "exp", divided(torch.exp, lambda e: torch.einsum("bhqk,k->bhq", e, torch.ones(8))[..., None]),
    ),
    "F.normalize": ("exp", lambda q, k, v: F.normalize((q @ k.mT).exp(), p=1, dim=-1) @ v),
    "_masked_softmax": (
        "_masked_softmax",
        lambda q, k, v: torch._masked_softmax(q @ k.mT, torch.zeros(2, 4, 8, 8).bool(), -1) @ v,
    ),
    "sparse.mm": ("sparse_mm", of_a_head(lambda q, k, v: torch.sparse.mm((q @ k.T).softmax(-1), v))),
    "linear over keys": ("linear", of_a_head(lambda q, k, v: F.linear(q, k).softmax(-1) @ v)),
    "linear over shared keys": (
        "linear", lambda q, k, v: F.linear(q, k[0, 0]).softmax(-1) @ v[0, 0]
    ),
    "linear twice": ("linear", of_a_head(lambda q, k, v: F.linear(F.linear(q, k).softmax(-1), v.T))),
    "linear over values": ("linear", of_a_head(lambda q, k, v: F.linear((q @ k.T).softmax(-1), v.T))),
    "linear over weights": (
        "linear", of_a_head(lambda q, k, v: F.linear(v.T, (q @ k.T).softmax(-1)).T)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_it_is_left_and_named(name):
    operation, fn = SPELLINGS[name]
    found = check(fn, *qkv(grad=False), lower="eager", exact=True)
    assert found.report.reasons == ["unknown-op"], str(found.report)
    (site,) = found.report
    assert site.detail.startswith(f"{operation} ("), site.detail


def weights_in_place_alone(q, k, v):
    s = q @ k.mT
    s.exp_()
    s.div_(s.sum(-1, keepdim=True))
    return s * 2


def scores_read_before(q, k, v):
    """A product of scores with values, before they are made weights that go nowhere."""
    s = q @ k.mT * 0.25
    out = s @ v
    s.exp_()
    s.div_(s.sum(-1, keepdim=True))
    return out, s * 2


class Gate(torch.nn.Module):
    """A router's logits, by `linear` over a parameter."""

    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(16, 8)

    def forward(self, q, k, v):
        return F.linear(q[0, 0], self.gate.weight.float() * 2).softmax(-1) @ v[0, 0]


#: No attention: a softmax that goes into no product, no softmax, no product of activations.
OTHERS = {
    "weights that go nowhere": weights_in_place_alone,
    "scores that were read before": scores_read_before,
    "squares by their sum": divided(lambda s: s**2, summed),
    "a tensor to a tensor's power": divided(lambda s: s.abs() ** s, summed),
    "by another norm": divided(torch.exp, lambda e: e.norm(p=2, dim=-1, keepdim=True)),
    "F.normalize": lambda q, k, v: F.normalize((q @ k.mT).exp(), dim=-1) @ v,
    "a product with no ones": divided(torch.exp, lambda e: e @ torch.full((8, 1), 2.0)),
    "a router by linear": Gate(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_attention(name):
    found = check(OTHERS[name], *qkv(grad=False), lower="eager")
    assert not found.report.left, str(found.report)
