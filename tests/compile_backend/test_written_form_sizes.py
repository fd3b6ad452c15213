"""Merged and grouped heads at sizes where dims are one, or symbols; and what is left of a form elsewhere."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.compile_backend.harness import Recorder, check, ops, qkv


def hidden(q, k):
    first = k.shape[2] - q.shape[2]
    return torch.arange(k.shape[2]) > torch.arange(q.shape[2])[:, None] + first


def merged(q, k, v):
    """As BART has it, filled in place where heads are taken apart."""
    batch, heads, length, dim = q.shape
    mask = hidden(q, k)
    q, k, v = (x.reshape(batch * heads, -1, dim) for x in (q * dim**-0.5, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(batch, heads, length, k.shape[1])
    scores.masked_fill_(mask, -math.inf)
    weights = scores.view(batch * heads, length, k.shape[1]).softmax(-1)
    out = torch.bmm(weights, v).view(batch, heads, length, dim)
    return out.transpose(1, 2).reshape(batch, length, heads * dim)


def grouped(q, k, v):
    batch, heads, length, dim = q.shape
    scores = q.view(batch, 2, heads // 2, length, dim) @ k[:, :, None].mT * 0.25
    scores = scores.masked_fill(hidden(q, k), -math.inf)
    return (scores.softmax(-1) @ v[:, :, None]).flatten(1, 2)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    ("batch", "heads", "q_len", "kv_len"),
    [(1, 4, 8, 8), (1, 1, 8, 8), (2, 1, 8, 8), (1, 4, 1, 12), (4, 1, 1, 12), (2, 4, 1, 1)],
)
def test_dims_of_one(batch, heads, q_len, kv_len, grad):
    found = check(merged, *qkv(q_len, kv_len, heads, batch=batch, grad=grad), lower="eager")
    assert ops(found) == ["decode" if q_len < kv_len and not grad else "attention"]


@pytest.mark.parametrize("fn", [merged, grouped])
def test_batches_and_lengths_that_are_symbols(fn):
    torch._dynamo.reset()
    backend = Recorder("eager")
    compiled = torch.compile(fn, backend=backend, fullgraph=True)
    for batch, length in ((2, 8), (3, 12), (4, 16)):
        args = qkv(length, length, 4, kv_heads=2 if fn is grouped else 4, batch=batch)
        results = compiled(*args), fn(*args)
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
        grads = (torch.autograd.grad(x.sin().sum(), args) for x in results)
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    assert ops(backend.found) == ["attention"] * 2
    assert {x.notes for x in backend.found.report} == {("mask: causal",)}


def test_an_active_dropout_in_place_on_a_view_of_the_result():
    """In training ours keeps its output for the backward."""

    def fn(q, k, v):
        out = (q @ k.mT / 4).softmax(-1) @ v
        F.dropout(out.view(8, 8, 16), 0.5, training=True, inplace=True)
        return out + 0

    found = check(fn, *qkv())
    assert ops(found) == ["attention"]
    assert "clone" in found.graph
