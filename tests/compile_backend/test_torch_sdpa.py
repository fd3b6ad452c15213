"""On a CPU, compiled by Inductor, attention is torch's SDPA where that is the same function and not slower than ours."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from tests.compile_backend import harness
from tests.compile_backend.harness import check, ops, qkv
from torch_fdattn.compile_backend import fdattn, torch_sdpa
from torch_fdattn.ops.attention import cpu
from torch_fdattn.ops.library import launches

OP = "scaled_dot_product_attention"


@pytest.fixture(autouse=True)
def as_inductor_gets_it(monkeypatch):
    """The pass as it is for Inductor, lowered by AOTAutograd alone."""
    launches.clear()
    monkeypatch.setattr(
        harness, "rewrite", lambda gm, **options: _rewrite(gm, sdpa_on_cpu=True, **options)
    )


_rewrite = harness.rewrite


def written(q, k, v, mask=None, scale=None):
    scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ v


def causal(q, k, v):
    return written(q, k, v, torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril())


def grouped(q, k, v):
    return causal(q, *(x.repeat_interleave(2, 1) for x in (k, v)))


def window(q, k, v):
    i = torch.arange(q.shape[2])
    distance = i[:, None] - i
    return written(q, k, v, (distance >= 0) & (distance < 3))


@pytest.mark.parametrize(
    "fn", [written, causal, grouped, lambda q, k, v: written(q, k, v, scale=0.3)]
)
def test_written_attention_becomes_sdpa(fn):
    found = check(fn, *qkv(kv_heads=2 if fn is grouped else 4))
    assert ops(found) == [OP]
    assert "torch.nn.functional.scaled_dot_product_attention" in found.graph or OP in found.graph
    assert not launches


def test_the_result_is_as_it_was_laid_out():
    def fn(q, k, v):
        return causal(q, k, v).transpose(1, 2).flatten(2).sin()

    assert ops(check(fn, *qkv())) == [OP]


@pytest.mark.parametrize("masked", [False, True])
def test_an_sdpa_site_stays(masked):
    """With a mask of data too, whose hidden rows are torch's own affair."""
    q, k, v = qkv()
    mask = torch.rand(2, 1, 8, 8) < 0.7
    mask[:, :, 3] = False

    def fn(q, k, v, mask):
        return sdpa(q, k, v, attn_mask=mask) if masked else sdpa(q, k, v, is_causal=True)

    found = check(fn, q, k, v, mask, exact=True)
    assert ops(found) == [OP]
    assert not launches


def softcapped(q, k, v):
    scores = torch.tanh(q @ k.transpose(-1, -2) * 0.25 / 20) * 20
    return scores.softmax(-1) @ v


def biased(q, k, v):
    return (q @ k.transpose(-1, -2) * 0.25 + torch.arange(8.0)).softmax(-1) @ v


def from_an_offset(q, k, v):
    return written(q, k, v, torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(2))


@pytest.mark.parametrize("fn", [softcapped, biased, window, from_an_offset])
def test_what_sdpa_has_no_word_for_is_ours(fn):
    assert ops(check(fn, *qkv())) == ["attention"]


def test_queries_that_are_the_last_of_the_keys_are_ours():
    """SDPA's causal mask begins at the first key."""

    def fn(q, k, v):
        return written(q, k, v, torch.ones(4, 8, dtype=torch.bool).tril(4))

    assert ops(check(fn, *qkv(4, 8))) == ["attention"]


def test_numbers_that_are_added_are_ours(monkeypatch):
    """Where the promise says that they hide no row, too."""
    promised = dict(sdpa_on_cpu=True, no_fully_masked_rows=True)
    monkeypatch.setattr(harness, "rewrite", lambda gm: _rewrite(gm, **promised))

    def fn(q, k, v, bias):
        return (q @ k.transpose(-1, -2) * 0.25 + bias).softmax(-1) @ v

    assert ops(check(fn, *qkv(), torch.randn(8, 8))) == ["attention"]


def test_rows_without_keys_are_ours():
    def fn(q, k, v, valid):
        return written(q, k, v, valid[:, None, None])

    valid = torch.ones(2, 8, dtype=torch.bool)
    valid[1] = False
    assert ops(check(fn, *qkv(grad=False), valid)) == ["attention"]


def test_values_of_another_head_dim_are_ours():
    q, k, _ = qkv()
    v = torch.randn(2, 4, 8, 32, requires_grad=True)
    assert ops(check(causal, q, k, v)) == ["attention"]


def test_symbolic_lengths_are_ours():
    """SDPA's own choices would add guards."""
    inputs = qkv(grad=False)
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 2)
    assert ops(check(written, *inputs)) == ["attention"]


def test_where_ours_is_faster(monkeypatch):
    def banded(q, k, v):
        i = torch.arange(q.shape[2])
        distance = i[:, None] - i
        return sdpa(q, k, v, attn_mask=(distance >= 0) & (distance < 3))

    assert ops(check(banded, *qkv())) == [OP]
    monkeypatch.setattr(torch_sdpa, "WINDOW_KEYS", 8)
    assert ops(check(banded, *qkv())) == ["attention"]
    for dtype, op in ((torch.float32, OP), (torch.bfloat16, "decode")):
        assert ops(check(sdpa, *qkv(1, 64, grad=False, dtype=dtype), rtol=2e-2, atol=2e-2)) == [OP]
        inputs = qkv(1, 512, grad=False, dtype=dtype)
        assert ops(check(lambda q, k, v: sdpa(q, k, v), *inputs, rtol=2e-2, atol=2e-2)) == [op]


def test_who_gets_it(monkeypatch):
    """Inductor alone, and not under TORCH_FDATTN_REFERENCE."""
    args = qkv(grad=False)
    expected = causal(*args)

    def run(**options):
        torch._dynamo.reset()
        launches.clear()
        found = torch.compile(causal, backend=fdattn, options=options)(*args)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        return dict(launches)

    assert run() == {}
    assert run(lower="aot_eager") == {"attention_forward/cpu": 1}
    monkeypatch.setattr(cpu, "REFERENCE_ALONE", True)
    assert run() == {"attention_forward/cpu": 1}
