"""layout="bshd": the same calls on (batch, sequence, heads, head dim), without copies."""

import warnings

import pytest
import torch

import torch_fdattn as fa
from torch_fdattn.ops import layout

OPS = torch.ops.fdattn


def bshd(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous()


@pytest.fixture
def qkv(device):
    """(B, H, S, D), and v of another head dim."""
    q = torch.randn(2, 4, 12, 32, device=device)
    k, v = torch.randn(2, 2, 20, 32, device=device), torch.randn(2, 2, 20, 16, device=device)
    return q, k, v


@pytest.fixture
def cache(device):
    """q, k_cache, v_cache, kv_lens."""
    k, v = torch.randn(2, 2, 2, 64, 32, device=device)
    lens = torch.tensor([40, 64], dtype=torch.int32, device=device)
    return torch.randn(2, 4, 3, 32, device=device), k, v, lens


def same(found, expected) -> None:
    """(out, lse), out in the other layout, and laid out as it is shaped."""
    torch.testing.assert_close(found[0].transpose(1, 2), expected[0])
    torch.testing.assert_close(found[1], expected[1])
    assert found[0].is_contiguous()


@pytest.mark.parametrize("attention", [fa.attention, OPS.attention])
def test_attention(attention, qkv):
    mask = torch.randn(4, 1, 20, device=qkv[0].device)
    options = dict(causal=True, attn_mask=mask)
    same(attention(*map(bshd, qkv), layout="bshd", **options), attention(*qkv, **options))


@pytest.mark.parametrize("attention", [fa.attention, OPS.attention])
def test_gradients_are_in_the_layout(attention, qkv):
    inputs = [x.requires_grad_() for x in qkv]
    turned = [bshd(x).detach().requires_grad_() for x in qkv]
    out, lse = attention(*inputs, causal=True)
    found, found_lse = attention(*turned, causal=True, layout="bshd")
    weights = torch.randn_like(out)
    expected = torch.autograd.grad((out * weights).sum() + lse.sum(), inputs)
    grads = torch.autograd.grad((found * bshd(weights)).sum() + found_lse.sum(), turned)
    for grad, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad.transpose(1, 2), other)


def test_compiled(qkv):
    turned = [*map(bshd, qkv)]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(q, k, v):
        return fa.attention(q, k, v, causal=True, layout="bshd")

    same(call(*turned), fa.attention(*qkv, causal=True))


@pytest.mark.parametrize("decode", [fa.decode, OPS.decode])
def test_decode(decode, cache):
    *tensors, lens = cache
    expected = fa.decode(*tensors, lens)
    same(decode(*map(bshd, tensors), lens, layout="bshd"), expected)


def test_decode_writes_into_given_tensors(cache):
    *tensors, lens = cache
    turned, expected = [*map(bshd, tensors)], fa.decode(*cache)
    out, lse = torch.empty_like(turned[0]), torch.empty_like(expected[1])
    workspace = fa.decode_workspace(*turned, layout="bshd")
    assert workspace.shape == fa.decode_workspace(*tensors).shape
    found = fa.decode(*turned, lens, layout="bshd", out=(out, lse), workspace=workspace)
    assert found[0] is out
    assert found[0].data_ptr() == out.data_ptr()
    assert found[1].data_ptr() == lse.data_ptr()
    same((out, lse), expected)


def test_a_plan(cache):
    *tensors, lens = cache
    turned, expected = [*map(bshd, tensors)], fa.decode(*cache)
    plan = fa.plan_decode(*turned, lens, layout="bshd")
    for _ in range(3):
        same(plan(*turned, lens), expected)
    out = torch.empty_like(turned[0]), torch.empty_like(expected[1])
    assert plan(*turned, lens, out=out)[0] is out[0]
    same(out, expected)
    with pytest.raises(ValueError, match="q must be as planned"):
        plan(*tensors, lens)


@pytest.fixture
def pages(device):
    """k and v pages, a table, lengths."""
    table = torch.tensor([[3, 1], [0, 7]], dtype=torch.int32, device=device)
    lens = torch.tensor([20, 9], dtype=torch.int32, device=device)
    return *torch.randn(2, 8, 2, 16, 32, device=device), table, lens


@pytest.mark.parametrize("decode", [fa.paged_decode, OPS.paged_decode])
def test_pages(decode, pages, device):
    k, v, table, lens = pages
    q = torch.randn(2, 4, 1, 32, device=device)
    expected = fa.paged_decode(q, k, v, table, lens)
    turned = *map(bshd, (q, k, v)), table, lens
    same(decode(*turned, layout="bshd"), expected)
    plan = fa.plan_paged_decode(*turned, layout="bshd")
    same(plan(*turned[:3], lens, page_table=table), expected)


@pytest.mark.parametrize("attention", [fa.varlen_attention, OPS.varlen_attention])
def test_packed_sequences_over_pages(attention, pages, device):
    k, v, table, lens = pages
    q = torch.randn(7, 4, 32, device=device)
    begins = torch.tensor([0, 3, 7], dtype=torch.int32, device=device)
    options = dict(page_table=table, kv_lens=lens, causal=True)
    expected = fa.varlen_attention(q, k, v, begins, **options)
    found = attention(q, bshd(k), bshd(v), begins, layout="bshd", **options)
    torch.testing.assert_close(found, expected)
    packed = torch.randn(2, 7, 2, 32, device=device)  # (T, H, D) in both
    expected = fa.varlen_attention(q, *packed, begins)
    torch.testing.assert_close(attention(q, *packed, begins, layout="bshd"), expected)


def test_append_kv(cache, pages, device):
    q, k_cache, v_cache, lens = cache
    k, v = torch.randn(2, 2, 2, 3, 32, device=device)
    cos, sin = torch.rand(2, 64, 16, device=device)
    lens = lens - 3
    turned = [*map(bshd, (k_cache, v_cache, k, v))]
    turned_q = bshd(q)
    fa.append_kv(*turned, lens, q=turned_q, cos=cos, sin=sin, layout="bshd")
    fa.append_kv(k_cache, v_cache, k, v, lens, q=q, cos=cos, sin=sin)
    for found, expected in ((turned[0], k_cache), (turned[1], v_cache), (turned_q, q)):
        torch.testing.assert_close(found.transpose(1, 2), expected)

    k_pages, v_pages, table, lens = pages
    lens = lens - 3
    turned = [*map(bshd, (k_pages, v_pages, k, v))]
    fa.paged_append_kv(*turned[:2], table, *turned[2:], lens, layout="bshd")
    fa.paged_append_kv(k_pages, v_pages, table, k, v, lens)
    torch.testing.assert_close(turned[0].transpose(1, 2), k_pages)
    torch.testing.assert_close(turned[1].transpose(1, 2), v_pages)


def test_merge_states(qkv):
    q, k, v = qkv
    parts = [fa.attention(q, k[:, :, s], v[:, :, s]) for s in (slice(0, 8), slice(8, 20))]
    outs, lses = map(torch.stack, zip(*parts, strict=True))
    turned = outs.transpose(2, 3).contiguous()
    found = fa.merge_states(turned, lses, layout="bshd")
    expected = fa.merge_states(outs, lses)
    torch.testing.assert_close(found[0].transpose(1, 2), expected[0])
    torch.testing.assert_close(found[1], expected[1])
    with pytest.raises(ValueError, match="outs must be"):
        fa.merge_states(outs[0], lses, layout="bshd")


def test_what_is_refused(qkv, cache):
    for call in (
        lambda **kw: fa.attention(*qkv, **kw),
        lambda **kw: OPS.attention(*qkv, **kw),
        lambda **kw: fa.decode(*cache, **kw),
        lambda **kw: fa.plan_decode(*cache, **kw),
        lambda **kw: OPS.varlen_attention(*(x[0] for x in qkv), cache[-1], **kw),
    ):
        with pytest.raises(ValueError, match="layout must be one of bhsd, bshd, got 'sbhd'"):
            call(layout="sbhd")
    with pytest.raises(TypeError, match="layout must be a str, got NoneType"):
        fa.attention(*qkv, layout=None)
    with pytest.raises(ValueError, match=r"q must have 4 dimensions \(batch, sequence, heads"):
        fa.attention(qkv[0][0], *qkv[1:], layout="bshd")


#: q and k as (B, S, H, D): 16 tokens, 8 heads over 2 KV heads.
_TURNED = (1, 16, 8, 16), (1, 16, 2, 16)


def _call(q_shape, k_shape, device, **options):
    q, k = (torch.randn(shape, device=device) for shape in (q_shape, k_shape))
    return fa.attention(q, k, k, **options)


def test_exchanged_dims_are_warned_of_once(device):
    layout._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            _call(*_TURNED, device, causal=True)
            _call((1, 20, 8, 16), (1, 20, 2, 16), device, causal=True)
            with warnings.catch_warnings():  # as libraries do in between
                warnings.simplefilter("default")
    assert [str(x.message).count('layout="bshd" takes these') for x in caught] == [1]
    assert caught[0].filename == __file__  # the caller's line, however deep the op ran


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (_TURNED, dict(causal=False)),  # nothing is hidden
        (_TURNED, dict(causal=True, layout="bshd")),
        (((1, 8, 16, 16), (1, 2, 16, 16)), dict(causal=True)),
        (((1, 4, 16, 16), (1, 4, 8, 16)), dict(causal=True)),  # rows without keys, of few heads
    ],
)
def test_others_are_not_warned_of(shapes, options, device):
    layout._warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _call(*shapes, device, **options)


def test_given_positions_are_not_warned_of(device):
    layout._warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        starts = torch.zeros(1, dtype=torch.int32, device=device)
        _call(*_TURNED, device, causal=True, q_start=starts)
