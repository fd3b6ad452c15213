"""Attention as models write it, beyond the plain form: in place, over merged or grouped heads, transposed, at a temperature.

Each is rewritten, with eager's numbers and gradients. `test_written_form_twins.py` has the graphs that look the same
and mean something else.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.compile_backend.harness import check, ops, qkv

LEAST = torch.finfo(torch.float32).min


def hidden(length=8):
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def _scores(q, k):
    return q @ k.transpose(-1, -2)


def _in_place(*operations, soften=lambda s: s.softmax(-1)):
    """Attention whose scores are written to by these operations; each returns nothing that is used."""

    def fn(q, k, v):
        scores = _scores(q, k)
        for operation in operations:
            operation(scores)
        return soften(scores) @ v

    return fn


def _itruediv(q, k, v):
    scores = _scores(q, k)
    scores /= 4.0
    return scores.softmax(-1) @ v


def _imul(q, k, v):
    scores = _scores(q, k)
    scores *= 0.25
    scores += torch.full((8, 8), -math.inf).triu(1)
    return scores.softmax(-1) @ v


def _isub(q, k, v):
    scores = _scores(q, k) * 0.25
    scores -= torch.full((8, 8), 1e9).triu(1)
    return scores.softmax(-1) @ v


def _inactive_dropout(q, k, v):
    weights = (_scores(q, k) / 4).softmax(-1)
    F.dropout(weights, 0.1, training=False, inplace=True)
    return weights @ v


def _of_a_view(q, k, v):
    """The scores are a view of the product, which nothing reads any more."""
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(2, 4, 8, 8)
    scores.div_(4.0).masked_fill_(hidden(), -math.inf)
    return scores.softmax(-1) @ v


IN_PLACE = {
    "/=": _itruediv,
    "*= and +=": _imul,
    "-=": _isub,
    "div_, as a statement": _in_place(lambda s: s.div_(4)),
    "mul_, chained": lambda q, k, v: _scores(q, k).mul_(0.25).softmax(-1) @ v,
    "add_, chained": lambda q, k, v: (
        _scores(q, k).mul_(0.25).add_(torch.full((8, 8), LEAST).triu(1)).softmax(-1) @ v
    ),
    "masked_fill_": _in_place(lambda s: s.mul_(0.25), lambda s: s.masked_fill_(hidden(), -math.inf)),
    "masked_fill_ on a view of the product": _of_a_view,
    "an inactive dropout": _inactive_dropout,
    "an inactive dropout, assigned": lambda q, k, v: (
        F.dropout((_scores(q, k) / 4).softmax(-1), 0.1, False, True) @ v
    ),
    "tanh_, as a softcap": lambda q, k, v: (_scores(q, k).div_(20).tanh_() * 20).softmax(-1) @ v,
}  # fmt: skip


def _merged(x):
    return x.reshape(-1, *x.shape[2:])


def _bart(q, k, v, mask=None):
    """Also OPT's, without its maximum."""
    q, k, v = _merged(q * 0.25), _merged(k), _merged(v)
    weights = torch.bmm(q, k.transpose(1, 2))
    if mask is not None:
        weights = weights.view(2, 4, 8, 8) + mask
        weights = weights.view(8, 8, 8)
    weights = F.softmax(weights, dim=-1)
    out = torch.bmm(F.dropout(weights, p=0.1, training=False), v)
    return out.view(2, 4, 8, 16).transpose(1, 2).reshape(2, 8, 64)


def _bloom(q, k, v, alibi):
    """alibi (B · H, 1, S)."""
    scores = alibi.baddbmm(batch1=_merged(q), batch2=_merged(k).mT, beta=1.0, alpha=0.25)
    scores = scores.view(2, 4, 8, 8)
    scores = torch.masked_fill(scores, hidden(), LEAST)
    probabilities = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype).view(8, 8, 8)
    return (
        torch.bmm(probabilities, _merged(v)).view(2, 4, 8, 16).permute(0, 2, 1, 3).reshape(2, 8, 64)
    )


def _alibi():
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    positions = torch.arange(8.0).expand(2, 8)
    return (slopes[None, :, None] * positions[:, None]).reshape(8, 1, 8)


def _gpt_neox(q, k, v, mask=None):
    """As transformers had it up to 4.35."""
    scores = torch.zeros(8, 8, 8, dtype=q.dtype)
    scores = torch.baddbmm(
        scores, q.view(8, 8, 16), k.view(8, 8, 16).transpose(1, 2), beta=1.0, alpha=0.25
    )
    scores = scores.view(2, 4, 8, 8)
    least = torch.tensor(torch.finfo(scores.dtype).min, dtype=scores.dtype)
    scores = torch.where(~hidden(), scores, least)
    if mask is not None:
        scores = scores + mask
    return F.softmax(scores, dim=-1).to(v.dtype) @ v


def _deberta(q, k, v, bias, padding):
    q, k, v = _merged(q), _merged(k), _merged(v)
    scores = torch.bmm(q, k.transpose(-1, -2) / torch.sqrt(torch.tensor(16.0)))
    scores = scores + bias
    scores = scores.view(-1, 4, 8, 8)
    scores = scores.masked_fill(~padding[:, None, None], torch.finfo(q.dtype).min)
    weights = scores.softmax(-1)
    out = torch.bmm(weights.view(-1, 8, 8), v)
    return out.view(-1, 4, 8, 16).permute(0, 2, 1, 3).contiguous().flatten(2)


def _sequence_first(q, k, v):
    """As fairseq has it: tensors (S, B, H · D), whose heads are taken apart and merged with the batch in one view."""
    q, k, v = (x.permute(2, 0, 1, 3).reshape(8, 2, 64) for x in (q, k, v))
    q, k, v = (x.contiguous().view(8, 8, 16).transpose(0, 1) for x in (q * 0.25, k, v))
    weights = torch.bmm(q, k.transpose(1, 2)).view(2, 4, 8, 8)
    weights = weights.masked_fill(hidden(), -math.inf).view(8, 8, 8)
    return torch.bmm(weights.softmax(-1), v).transpose(0, 1).reshape(8, 2, 64)


MERGED = {
    "BART": (_bart, lambda: ()),
    "BART, masked": (_bart, lambda: (torch.zeros(2, 1, 8, 8).masked_fill(hidden(), LEAST),)),
    "BART, a causal mask of its own": (lambda q, k, v: _bart(q, k, v, torch.full((8, 8), -math.inf).triu(1)), lambda: ()),
    "BLOOM": (_bloom, _alibi),
    "BLOOM, ALiBi that is learned": (_bloom, lambda: (_alibi().requires_grad_(),)),
    "GPT-NeoX": (_gpt_neox, lambda: ()),
    "GPT-NeoX, padded": (_gpt_neox, lambda: (torch.zeros(2, 1, 1, 8).masked_fill(torch.arange(8) < 3, LEAST),)),
    "DeBERTa": (_deberta, lambda: (torch.randn(8, 8, 8, requires_grad=True), torch.ones(2, 8).tril(6) > 0)),
    "sequence first": (_sequence_first, lambda: ()),
}  # fmt: skip


def _max(q, k, v, make=lambda s: torch.max(s, torch.tensor(torch.finfo(s.dtype).min))):
    scores = _scores(q, k) * 0.25 + torch.full((8, 8), LEAST).triu(1)
    return make(scores).softmax(-1) @ v


CLAMPS = {
    "max with a number of the dtype": _max,
    "maximum": lambda q, k, v: _max(q, k, v, lambda s: torch.maximum(s, torch.tensor(LEAST))),
    "clamp": lambda q, k, v: _max(q, k, v, lambda s: s.clamp(min=torch.finfo(s.dtype).min)),
    "clamp_min": lambda q, k, v: _max(q, k, v, lambda s: torch.clamp_min(s, LEAST)),
    "clamp_": lambda q, k, v: _max(q, k, v, lambda s: s.clamp_(min=LEAST)),
    "clamp over -inf": lambda q, k, v: (
        (_scores(q, k) + torch.full((8, 8), -math.inf).triu(1)).clamp(min=LEAST).softmax(-1) @ v
    ),
    "clamp without a mask": lambda q, k, v: _scores(q, k).clamp(min=LEAST).softmax(-1) @ v,
}  # fmt: skip


TEMPERATURES = {
    "a parameter times": (lambda q, k, v, t: (_scores(q, k) * t).softmax(-1) @ v, (), 0.3),
    "over a parameter": (lambda q, k, v, t: (_scores(q, k) / t).softmax(-1) @ v, (), 3.0),
    "of one element": (lambda q, k, v, t: (t * _scores(q, k)).softmax(-1) @ v, (1,), 0.3),
    "of each head": (lambda q, k, v, t: (_scores(q, k) * t).softmax(-1) @ v, (4, 1, 1), 0.3),
    "of each head and sequence": (lambda q, k, v, t: (_scores(q, k) / t).softmax(-1) @ v, (2, 4, 1, 1), 4.0),
    "of each query": (lambda q, k, v, t: (_scores(q, k) * t).softmax(-1) @ v, (8, 1), 0.3),
    "in place": (lambda q, k, v, t: _scores(q, k).mul_(t).softmax(-1) @ v, (), 0.3),
    "before a mask": (
        lambda q, k, v, t: (_scores(q, k) * t).masked_fill(hidden(), -math.inf).softmax(-1) @ v, (4, 1, 1), 0.3,
    ),
    "beside numbers": (lambda q, k, v, t: (_scores(q * 2, k) / 4 * t).softmax(-1) @ v, (), 0.5),
    "its exponential, of cosines (Swin v2)": (
        lambda q, k, v, t: (
            (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * t.clamp(max=math.log(100)).exp()).softmax(-1) @ v
        ), (4, 1, 1), 1.0,
    ),
    "under a softcap": (lambda q, k, v, t: (torch.tanh(_scores(q, k) * t / 20) * 20).softmax(-1) @ v, (), 0.3),
    "merged heads": (
        lambda q, k, v, t: torch.bmm((torch.bmm(_merged(q), _merged(k).mT) * t).softmax(-1), _merged(v)), (8, 1, 1), 0.3,
    ),
}  # fmt: skip


BADDBMM = {
    "three dimensions": lambda q, k, v: torch.bmm(
        torch.baddbmm(hidden() * LEAST, q[0], k[0].mT, beta=1, alpha=0.25).softmax(-1), v[0]
    ),
    "beta of two": lambda q, k, v: torch.bmm(
        torch.baddbmm(v[0, :, :, :8], q[0], k[0].mT, beta=2).softmax(-1), v[0]
    ),
    "a bias that is learned": lambda q, k, v: torch.bmm(
        torch.baddbmm(v[1, :, :, :8].contiguous(), q[0], k[0].mT).softmax(-1), v[0]
    ),
}  # fmt: skip

CLONES = {
    "weights": lambda q, k, v: (_scores(q, k) / 4).softmax(-1).clone() @ v,
    "scores": lambda q, k, v: (_scores(q, k) / 4).clone().softmax(-1) @ v,
    "torch.clone": lambda q, k, v: torch.clone((_scores(q, k) / 4).softmax(-1)) @ v,
    "contiguous": lambda q, k, v: (_scores(q, k) / 4).softmax(-1).contiguous() @ v,
}

TRANSPOSED = {
    "k qᵀ": lambda q, k, v: (k @ q.mT / 4).mT.softmax(-1) @ v,
    "k qᵀ, softmax over its keys": lambda q, k, v: (k @ q.mT / 4).softmax(-2).mT @ v,
    "k qᵀ, masked": lambda q, k, v: (
        (k @ q.mT / 4).masked_fill(hidden().mT, -math.inf).softmax(-2).transpose(-2, -1) @ v
    ),
    "k qᵀ, a bias": lambda q, k, v: (k @ q.mT / 4 + v[..., :8]).softmax(2).transpose(2, 3) @ v,
    "vᵀ weightsᵀ": lambda q, k, v: (v.mT @ (_scores(q, k) / 4).softmax(-1).mT).mT,
    "vᵀ weightsᵀ of k qᵀ": lambda q, k, v: v.mT @ (k @ q.mT / 4).softmax(-2),
    "heads first, and back": lambda q, k, v: (
        (_scores(q, k) / 4).transpose(0, 1).softmax(-1).transpose(0, 1) @ v
    ),
    "a mask over heads first": lambda q, k, v: (
        ((_scores(q, k) / 4).transpose(0, 1) + v[..., :8].transpose(0, 1)).softmax(-1).transpose(0, 1) @ v
    ),
    "einsum over keys first": lambda q, k, v: torch.einsum(
        "bhkq,bhkd->bqhd", torch.einsum("bhkd,bhqd->bhkq", k, q / 4).softmax(2), v
    ),
}  # fmt: skip

EINSUMS = {
    "...": lambda q, k, v: torch.einsum(
        "...qk,...kd->...qd", torch.einsum("...qd,...kd->...qk", q / 4, k).softmax(-1), v
    ),
    "b...": lambda q, k, v: torch.einsum(
        "b...qk,b...kd->b...qd", torch.einsum("b...qd,b...kd->b...qk", q / 4, k).softmax(-1), v
    ),
    "... in the first alone": lambda q, k, v: torch.einsum("...qd,...kd->...qk", q / 4, k).softmax(-1) @ v,
    "... of merged heads": lambda q, k, v: torch.einsum(
        "...qk,...kd->...qd", torch.einsum("...qd,...kd->...qk", _merged(q), _merged(k)).softmax(-1), _merged(v)
    ),
    "one head of K and V": lambda q, k, v: torch.einsum(
        "bhqk,bkd->bhqd", torch.einsum("bhqd,bkd->bhqk", q / 4, k[:, 0]).softmax(-1), v[:, 0]
    ),
}  # fmt: skip


def _grouped(q):
    """(B, G, 2, S, D)"""
    return q.view(2, 2, 2, 8, 16)


def _few(k):
    """(B, G, S, D)"""
    return k[:, :2]


GROUPED = {
    "products": lambda q, k, v: (
        (_grouped(q) @ _few(k)[:, :, None].mT / 4).softmax(-1) @ _few(v)[:, :, None]
    ).flatten(1, 2),
    "not merged again": lambda q, k, v: (
        (_grouped(q) @ _few(k).unsqueeze(2).mT / 4).softmax(-1) @ _few(v).unsqueeze(2)
    ),
    "einsum": lambda q, k, v: torch.einsum(
        "bgnqk,bgkd->bgnqd", torch.einsum("bgnqd,bgkd->bgnqk", _grouped(q) / 4, _few(k)).softmax(-1), _few(v)
    ),
    "einsum over sequences first": lambda q, k, v: torch.einsum(
        "bgnqk,bkgd->bqgnd",
        torch.einsum("bqgnd,bkgd->bgnqk", _grouped(q).permute(0, 3, 1, 2, 4) / 4, _few(k).transpose(1, 2)).softmax(-1),
        _few(v).transpose(1, 2),
    ).flatten(2),
    "masked": lambda q, k, v: (
        (_grouped(q) @ _few(k)[:, :, None].mT / 4).masked_fill(hidden(), -math.inf).softmax(-1) @ _few(v)[:, :, None]
    ).flatten(1, 2),
    "a bias of each head": lambda q, k, v: (
        (_grouped(q) @ _few(k)[:, :, None].mT + v[0, ..., :8].view(2, 2, 8, 8)).softmax(-1) @ _few(v)[:, :, None]
    ),
    "a bias of each group": lambda q, k, v: (
        (_grouped(q) @ _few(k)[:, :, None].mT + v[:, :2, None, :, :8]).softmax(-1) @ _few(v)[:, :, None]
    ),
    "K and V expanded": lambda q, k, v: (
        (_grouped(q) @ _few(k)[:, :, None].expand(-1, -1, 2, -1, -1).mT).softmax(-1)
        @ _few(v)[:, :, None].expand(-1, -1, 2, -1, -1)
    ),
    "windows and heads": lambda q, k, v: (_grouped(q) @ _grouped(k).mT / 4).softmax(-1) @ _grouped(v),
    "...": lambda q, k, v: torch.einsum(
        "...qk,...kd->...qd", torch.einsum("...qd,...kd->...qk", _grouped(q) / 4, _grouped(k)).softmax(-1), _grouped(v)
    ),
    "a temperature of each head": lambda q, k, v: (
        (_grouped(q) @ _few(k)[:, :, None].mT * v[0, 0, :4, 0].view(2, 2, 1, 1)).softmax(-1) @ _few(v)[:, :, None]
    ),
}  # fmt: skip

BOOL_ADDED = {
    "a mask of one for each key": lambda q, k, v: (_scores(q, k) / 4 + ~hidden()).softmax(-1) @ v,
    "given": lambda q, k, v: (_scores(q, k) / 4 + (v[:, :1, :, :8] > 0)).softmax(-1) @ v,
    "in place": lambda q, k, v: _scores(q, k).div_(4).add_(v[0, 0, :, :8] > 0).softmax(-1) @ v,
}  # fmt: skip

ALL = {
    f"{group}: {name}": form
    for group, forms in {
        "in place": IN_PLACE, "clamp": CLAMPS, "baddbmm": BADDBMM, "clone": CLONES, "transposed": TRANSPOSED,
        "einsum": EINSUMS, "grouped": GROUPED, "bool": BOOL_ADDED,
    }.items()
    for name, form in forms.items()
}  # fmt: skip


def rewritten(fn, *args):
    found = check(fn, *args, lower="eager")
    assert ops(found) == ["attention"], str(found.report)
    assert "softmax" not in found.graph
    return found


@pytest.mark.parametrize("name", ALL)
def test_form(name):
    torch.manual_seed(0)
    rewritten(ALL[name], *qkv())


@pytest.mark.parametrize("name", MERGED)
def test_merged_heads(name):
    torch.manual_seed(0)
    fn, make = MERGED[name]
    made = make()
    rewritten(fn, *qkv(), *(made if isinstance(made, tuple) else (made,)))


@pytest.mark.parametrize("name", TEMPERATURES)
def test_temperature(name):
    torch.manual_seed(0)
    fn, shape, size = TEMPERATURES[name]
    temperature = (size * (1 + torch.rand(shape))).requires_grad_()
    rewritten(fn, *qkv(), temperature)
