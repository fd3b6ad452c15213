"""What takes the place of an attention: its strides, its dtype, and writes into its result or its inputs."""

import pytest
import torch
import torch.nn.functional as F

from tests.compile_backend.harness import Recorder, check, ops, qkv
from tests.compile_backend.test_forms import rewritten, sdpa


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    args = qkv(dtype=dtype)
    tolerance = {} if dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    rewritten(lambda q, k, v: sdpa(q, k, v, is_causal=True), *args, **tolerance)


def test_autocast():
    """Explicit casts, for what autocast did: its region need not be where the op stands."""

    def fn(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return sdpa(q, k, v), (q @ k.mT * 0.25).softmax(-1) @ v

    found = check(fn, *qkv(), lower="eager", rtol=3e-2, atol=3e-2)
    assert ops(found) == ["attention", "attention"]
    assert found.graph.count(".to(torch.bfloat16)") == 6


def test_a_view_of_the_result_needs_its_strides():
    """q lies sequence first, and our output as q does; the product's result was contiguous."""

    def fn(q, k, v):
        return ((q @ k.mT).softmax(-1) @ v).view(8, 8, 16)

    args = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in qkv()]
    found = rewritten(fn, *(x.requires_grad_() for x in args))
    assert ".contiguous()" in found.graph


def test_no_copy_where_strides_do_not_matter():
    def fn(q, k, v, w):
        return F.linear(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).reshape(2, 8, 64), w)

    args = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in qkv()]
    found = rewritten(fn, *(x.requires_grad_() for x in args), torch.randn(8, 64) / 8)
    assert ".contiguous()" not in found.graph


def test_a_result_that_is_returned_has_its_strides():
    args = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in qkv()]

    def fn(q, k, v):
        return (q @ k.mT).softmax(-1) @ v

    torch._dynamo.reset()
    out = torch.compile(fn, backend=Recorder("eager"))
    assert out(*args).stride() == fn(*args).stride()


WRITES = {
    "scaled": lambda out, q: out.mul_(2),
    "a residual": lambda out, q: out.add_(q),
    "a view": lambda out, q: (out.transpose(1, 2)[:, 0].mul_(2), out + 1)[1],
    "an item": lambda out, q: (out.__setitem__((slice(None), 0), 0.0), out + 1)[1],
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("chunk", [None, 4])
def test_a_result_that_is_written_to(name, chunk):
    """In training our op keeps its output for the backward, where a product keeps only its operands."""

    def fn(q, k, v):
        scores = q @ k.mT * 0.25
        if chunk:
            at = torch.arange(8) // chunk
            scores = scores.masked_fill(at != at[:, None], -torch.inf)
        return WRITES[name](scores.softmax(-1) @ v, q)

    found = check(fn, *qkv())
    assert ops(found) == ["varlen_attention" if chunk else "attention"]
    assert "clone" in found.graph
    assert "clone" not in check(fn, *qkv(grad=False)).graph


@pytest.mark.parametrize("merge", [False, True])
def test_a_copy_of_the_result_that_is_written_to(merge):
    """A product's result has to be copied to be contiguous, ours not where q is (B, S, H, D)."""

    def fn(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = (q @ k.mT * 0.25).softmax(-1) @ v
        out = out.transpose(1, 2)
        out = out.flatten(2).contiguous() if merge else out.contiguous()
        out[:, :2].mul_(2)
        return out + 1

    found = check(fn, *qkv())
    assert ops(found) == ["attention"]


@pytest.mark.parametrize("fill", [-torch.inf, torch.finfo(torch.float32).min])
def test_no_keys(fill):
    """Sums over nothing are 0, whatever a query that sees no key gets otherwise."""

    def fn(q, k, v):
        hidden = torch.arange(q.shape[2])[:, None] > torch.arange(k.shape[2])
        return (q @ k.mT).masked_fill(hidden, fill).softmax(-1) @ v

    q, k, v = qkv(3)
    assert ops(check(fn, q, k[:, :, :0], v[:, :, :0])) == ["attention"]


def test_a_cache_that_is_updated_behind_a_transposed_query():
    """What is read after the write can be read later still."""

    def fn(q, k, v, cache, at):
        q = q.transpose(1, 2)
        cache = cache.clone()
        cache.index_copy_(2, at, k)
        return (q @ cache.mT * 0.25).softmax(-1) @ cache

    q, k, v = qkv(1, grad=False)
    found = check(fn, q.transpose(1, 2), k, v, torch.randn(2, 4, 12, 16), torch.tensor([5]))
    assert ops(found) == ["decode"], str(found.report)
