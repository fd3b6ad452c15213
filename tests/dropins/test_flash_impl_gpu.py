"""FDATTN in the place of torch's own flash kernels on CUDA: through SDPA, and beside what they give."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.launched import launched
from torch_fdattn.dropins import flash_impl
from torch_fdattn.ops.library import launches
from torch_fdattn.testing import attention_oracle, check_close, check_lse

pytestmark = pytest.mark.gpu
FORWARD, BACKWARD = "attention_forward", "attention_backward"


@contextlib.contextmanager
def fdattn():
    torch.nn.attention.activate_flash_attention_impl("FDATTN")
    flash_impl.fallbacks.clear()
    launches.clear()
    try:
        yield
    finally:
        torch.nn.attention.restore_flash_attention_impl()


def qkv(queries=500, keys=500, heads=(8, 2), dim=128, dtype=torch.bfloat16, grad=True):
    shapes = [
        (2, n, h, dim) for h, n in zip((*heads, heads[1]), (queries, keys, keys), strict=True)
    ]
    tensors = [torch.randn(x, device="cuda", dtype=dtype).transpose(1, 2) for x in shapes]
    return [x.requires_grad_(grad) for x in tensors]


def sdpa(q, k, v, **options):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(
            q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options
        )


def with_gradients(fn, inputs, **options):
    out = fn(*inputs, **options)
    return out, *torch.autograd.grad(out, inputs, gradient_of(out))


def gradient_of(out):
    """The same numbers whatever the dtype: all of them hold bfloat16's."""
    generator = torch.Generator("cuda").manual_seed(1)
    drawn = torch.randn(out.shape, device="cuda", generator=generator)
    return drawn.bfloat16().to(out.dtype)


def math_in_double(q, k, v, *, scale=None, is_causal=False):
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({}, {"is_causal": True}),
        ({"queries": 77, "keys": 900, "dim": 64}, {"scale": 0.2}),
        ({"heads": (6, 6), "dim": 72}, {"is_causal": True}),
        ({"heads": (4, 1), "dim": 256}, {}),
        # SDPA pads it to 64, and names the scale.
        ({"heads": (4, 4), "dim": 60}, {"is_causal": True}),
    ],
)
def test_sdpa_and_its_gradients_are_ours_and_right(sizes, options, dtype):
    """By the error rule: torch's own flash kernels give what torch does at this dtype."""
    inputs = qkv(**sizes, dtype=dtype)
    torchs = with_gradients(sdpa, inputs, **options)
    exact = with_gradients(
        math_in_double, [x.detach().double().requires_grad_() for x in inputs], **options
    )
    with fdattn():
        found = with_gradients(sdpa, inputs, **options)
        assert launched() == {FORWARD: 1, BACKWARD: 1}
        assert not flash_impl.fallbacks
    for name, ours, flash, wanted in zip(
        ("out", "dq", "dk", "dv"), found, torchs, exact, strict=True
    ):
        check_close(name, ours, wanted, [flash - wanted])


def test_what_the_op_returns_is_what_torchs_own_returns():
    inputs = qkv(grad=False)
    op = torch.ops.aten._scaled_dot_product_flash_attention
    torchs = op(*inputs, 0.0, True)
    with fdattn():
        found = op(*inputs, 0.0, True)
        assert launched()[FORWARD] == 1
    exact_lse = attention_oracle(*(x.double() for x in inputs), causal=True)[1]
    check_lse(found[1], exact_lse, torch.bfloat16)
    for ours, flash in zip(found, torchs, strict=True):
        if isinstance(flash, torch.Tensor):
            assert (ours.shape, ours.dtype, ours.stride(), ours.device) == (
                flash.shape, flash.dtype, flash.stride(), flash.device,
            )  # fmt: skip
        else:
            assert ours == flash


def test_a_forward_and_a_backward_of_different_implementations_fit():
    inputs = qkv()
    torchs = with_gradients(sdpa, inputs, is_causal=True)
    out = sdpa(*inputs, is_causal=True)
    grad = gradient_of(out)
    with fdattn():
        mixed = [torch.autograd.grad(out, inputs, grad)]
        assert launched() == {BACKWARD: 1}
        out = sdpa(*inputs, is_causal=True)
        assert launched() == {BACKWARD: 1, FORWARD: 1}
    mixed.append(torch.autograd.grad(out, inputs, grad))
    assert launched() == {BACKWARD: 1, FORWARD: 1}
    for grads in mixed:
        for a, b in zip(grads, torchs[1:], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_dropout_is_torchs_own_with_its_seeds():
    inputs = qkv()
    torch.manual_seed(3)
    wanted = with_gradients(sdpa, inputs, is_causal=True, dropout_p=0.3)
    with fdattn():
        torch.manual_seed(3)
        found = with_gradients(sdpa, inputs, is_causal=True, dropout_p=0.3)
        assert set(flash_impl.fallbacks) == {"dropout"}
        assert not launches
    assert torch.equal(found[0], wanted[0])
    for a, b in zip(found[1:], wanted[1:], strict=True):  # flash's backward adds in any order
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_other_calls_are_torchs_own():
    op = torch.ops.aten._scaled_dot_product_flash_attention
    inputs = qkv(queries=300, grad=False)
    wanted = op(*inputs, 0.0, True)
    with fdattn():
        found = op(*inputs, 0.0, True)
        assert flash_impl.fallbacks["causal-lengths"] >= 1
        assert not launches
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


def test_restored():
    inputs = qkv(grad=False)
    wanted = sdpa(*inputs)
    with fdattn():
        sdpa(*inputs)
        assert launched()[FORWARD] == 1
    assert torch.equal(sdpa(*inputs), wanted)
    assert launched()[FORWARD] == 1


def packed(x, lens):
    return torch.cat([x[b, :, :n].transpose(0, 1) for b, n in enumerate(lens)])


@pytest.mark.parametrize("lens", [((500, 123), (500, 123)), ((300, 40), (200, 77))])
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (64, 0)])
def test_packed_sequences(lens, window):
    """Also with queries that see no key: their lse is torch's +inf."""
    q, k, v = qkv(grad=False)
    q, k, v = packed(q, lens[0]), packed(k, lens[1]), packed(v, lens[1])
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    cu_q, cu_k = (torch.tensor([0, a, a + b], dtype=torch.int32, device="cuda") for a, b in lens)
    op = torch.ops.aten._flash_attention_forward

    def call(q, k, v):
        return op(
            q, k, v, cu_q, cu_k, max(lens[0]), max(lens[1]), 0.0, window[1] == 0 and window[0] < 0,
            False, window_size_left=window[0], window_size_right=window[1],
        )  # fmt: skip

    torchs = with_gradients(lambda *x: call(*x)[0], (q, k, v))
    lse = call(q, k, v)[1]
    with fdattn():
        found = with_gradients(lambda *x: call(*x)[0], (q, k, v))
        assert launched()["varlen_attention_forward"] == 1
        assert launched()["varlen_attention_backward"] == 1
        assert not flash_impl.fallbacks
        torch.testing.assert_close(call(q, k, v)[1], lse, rtol=1e-3, atol=1e-3)
    for a, b in zip(found, torchs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_varlen_attn():
    """torch's own entry for packed sequences, which is written for flash's ops."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (packed(x, (500, 123)).requires_grad_() for x in qkv(heads=(8, 8), grad=False))
    cu = torch.tensor([0, 500, 623], dtype=torch.int32, device="cuda")

    def call(q, k, v):
        return varlen_attn(q, k, v, cu, cu, 500, 500, window_size=(-1, 0))

    torchs = with_gradients(call, (q, k, v))
    with fdattn():
        found = with_gradients(call, (q, k, v))
        assert launched()["varlen_attention_forward"] == 1
    for a, b in zip(found, torchs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_torch_compile():
    def step(q, k, v):
        return sdpa(q * 2, k, v, is_causal=True).transpose(1, 2).flatten(2) + 1

    inputs = qkv(heads=(4, 4))
    wanted = with_gradients(step, inputs)
    torch._dynamo.reset()
    with fdattn():
        found = with_gradients(torch.compile(step), inputs)
        assert launched() == {FORWARD: 1, BACKWARD: 1}
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_cuda_graph():
    q, k, v = qkv(grad=False)
    with fdattn():
        sdpa(q, k, v, is_causal=True)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = sdpa(q, k, v, is_causal=True)
        assert launched()[FORWARD] == 2
        q.copy_(torch.randn_like(q))
        graph.replay()
        assert torch.equal(captured, sdpa(q, k, v, is_causal=True))
