"""Hopper's backward a thousand times over: exact gradients of exact inputs, and the same bits, on an sm_90."""

import pytest
import torch

import torch_fdattn
from tests.ops.attention.counting import ON_HOPPER, Checked, repeated
from tests.ops.attention.exact_inputs import (
    SCALE,
    Form,
    backward_of,
    exact_gradients,
    exact_slope_gradients,
    in_order,
    normal,
    selecting,
    slopes_backward_of,
    sparse_gradients,
)
from torch_fdattn.ops.library import launches
from torch_fdattn.testing import attention_oracle, check_close

pytestmark = ON_HOPPER

#: Tiles of 128 or 256 keys by 12 KV heads, or by 3: some of these are more than an H100 has SMs.
FORMS = {
    "full": Form((1024,) * 3, (1024,) * 3),
    "full, ragged": Form((900,) * 2, (1000,) * 2),
    "causal": Form((1024,) * 3, (1024,) * 3, (-1, 0)),
    "causal, ragged": Form((900,) * 3, (1000,) * 3, (-1, 0)),
    "window": Form((1000,) * 3, (1000,) * 3, (300, 20)),
    "wide window": Form((1300,) * 2, (1300,) * 2, (1010, 20)),
    "lengths": Form((700,) * 4, (1000, 0, 129, 513), (-1, 0), "lengths"),
    "packed": Form((700, 0, 1, 900, 257), (1000, 5, 129, 900, 300), (-1, 0), "packed"),
}
HEADS, HEAD_DIMS = 12, (64, 96, 128, 192, 256)
#: Packed sequences of wide heads are the portable kernel's.
EACH_FORM = pytest.mark.parametrize(
    ("form", "head_dim"), [(x, y) for x in FORMS for y in HEAD_DIMS if x != "packed" or y <= 128]
)
#: Of head dim 256 each gradient has one order anyway.
IN_ORDER = pytest.mark.parametrize("ordered", [False, True], ids=["any order", "ordered"])


def same(call):
    return call


def kernel_of(form: Form) -> str:
    return f"{'varlen_' if form.layout == 'packed' else ''}attention_backward/hopper"


def check_exact(
    form: Form, head_dim: int, kv_heads: int, dtype: torch.dtype, ordered: bool, grad_dtype: torch.dtype | None = None
) -> None:  # fmt: skip
    calls, form_of = [], in_order if ordered else same
    for _ in range(3):
        sequences = selecting(form, head_dim, HEADS, kv_heads, "cuda", largest=1)
        douts = sparse_gradients(sequences)
        expected = [x.to(grad_dtype or dtype) for x in exact_gradients(form, sequences, douts)]
        assert all(x.any() for x in expected)
        call = backward_of(form, sequences, douts, dtype, grad_dtype)
        calls.append(Checked(form_of(call), expected))
    repeated(kernel_of(form), calls, 1000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_heads", [HEADS, HEADS // 4])
@EACH_FORM
@IN_ORDER
def test_a_thousand_exact_gradients(ordered, form, head_dim, kv_heads, dtype):
    """dQ too: sums without rounding are the same in any order."""
    check_exact(FORMS[form], head_dim, kv_heads, dtype, ordered)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("form", ["full, ragged", "causal", "lengths"])
@IN_ORDER
def test_a_thousand_exact_gradients_in_float32(ordered, form, head_dim):
    """As ring attention asks for them."""
    check_exact(FORMS[form], head_dim, HEADS // 4, torch.bfloat16, ordered, torch.float32)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("form", [x for x in FORMS if x != "packed"])
@IN_ORDER
def test_a_thousand_exact_gradients_of_slopes(ordered, form, head_dim):
    """With those of q, k and v: sums over all of a warp's keys and all blocks of queries, which rounds none of them."""
    form, calls = FORMS[form], []
    form_of = in_order if ordered else same
    for _ in range(2):
        sequences = selecting(form, head_dim, HEADS, HEADS // 4, "cuda", largest=1)
        douts = sparse_gradients(sequences)
        expected = [x.bfloat16() for x in exact_gradients(form, sequences, douts)]
        expected.append(exact_slope_gradients(form, sequences, douts))
        assert all(x.any() for x in expected)
        call = slopes_backward_of(form, sequences, douts, torch.bfloat16)
        calls.append(Checked(form_of(call), expected))
    repeated(kernel_of(form), calls, 1000)


def drawn(form: Form, head_dim: int, softcap: float = 0.0):
    """(a call, its sequences, gradients of out) of normally distributed numbers, bfloat16."""
    sequences = [
        tuple(x.bfloat16().double() for x in each)
        for each in normal(form, head_dim, HEADS, HEADS // 2, "cuda")
    ]
    douts = [torch.randn_like(q).bfloat16().double() for q, _, _ in sequences]
    call = backward_of(form, sequences, douts, torch.bfloat16, softcap=softcap)
    return call, sequences, douts


@EACH_FORM
def test_same_bits_of_dk_and_dv(form, head_dim):
    call = drawn(FORMS[form], head_dim)[0]
    _, dk, dv = call()
    assert torch.isfinite(dk).all()
    assert torch.isfinite(dv).all()
    repeated(kernel_of(FORMS[form]), [Checked(call, (None, dk, dv))], 100)


def dq_by_torch(form: Form, sequences, douts, dtype: torch.dtype) -> torch.Tensor:
    """By the textbook's formula, computed in this dtype."""
    found = []
    for each, dout in zip(sequences, douts, strict=True):
        q, k, v = (x.to(dtype)[None].requires_grad_() for x in each)
        out = attention_oracle(q, k, v, window=form.window, scale=SCALE)[0]
        found += torch.autograd.grad(out, q, dout.to(dtype)[None])
    return torch.cat(found).double()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("form", ["full, ragged", "causal", "window"])
def test_each_dq_is_within_the_error_rule(form, head_dim):
    """Whatever the order in which tiles of keys add to it."""
    form = FORMS[form]
    call, sequences, douts = drawn(form, head_dim)
    exact = dq_by_torch(form, sequences, douts, torch.float64)
    error = dq_by_torch(form, sequences, douts, torch.bfloat16) - exact
    launches.clear()
    for _ in range(100):
        check_close("dq", call()[0], exact, [error])
    assert launches == {kernel_of(form): 100}


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@EACH_FORM
def test_same_bits_of_all_gradients_where_they_are_asked_for(form, head_dim, softcap):
    call, kernel = drawn(FORMS[form], head_dim, softcap)[0], kernel_of(FORMS[form])
    torch_fdattn.set_deterministic(True)
    try:
        launches.clear()
        first = call()
        assert launches == {kernel: 1}
        repeated(kernel, [Checked(call, first)], 100)
    finally:
        torch_fdattn.set_deterministic(False)
    launches.clear()
    call()
    assert launches == {kernel: 1}
