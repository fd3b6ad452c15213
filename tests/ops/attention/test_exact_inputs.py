"""That inputs of `exact_inputs.py` have exact results: of the op on a CPU, and of a backward rounded as kernels round."""

import itertools

import pytest
import torch

from tests.ops.attention.exact_inputs import (
    FP8,
    MOST_KEYS,
    SCALE,
    Form,
    backward_of,
    call_of,
    exact,
    exact_gradients,
    exact_slope_gradients,
    selecting,
    selecting_the_nearest,
    selecting_with_sinks,
    slopes_backward_of,
    sparse_gradients,
)
from torch_fdattn.testing.oracle import visible_keys

FORMS = {
    "full": Form((70, 70), (300, 300)),
    "causal": Form((130, 130), (300, 300), (-1, 0)),
    "window": Form((300,), (300,), (100, 20)),
    "lengths": Form((70, 70, 70), (300, 0, 40), (-1, 0), "lengths"),
    "packed": Form((100, 0, 1, 64), (200, 5, 128, 30), (-1, 0), "packed"),
    "pages": Form((100, 0, 1, 64), (200, 5, 128, 64), (50, 0), "pages"),
}
WITH_BACKWARD = [name for name, form in FORMS.items() if form.layout != "pages"]
DENSE = [name for name, form in FORMS.items() if form.layout in ("dense", "lengths")]
HALF = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str
)


@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@HALF
def test_results_are_exact(dtype, form, head_dim):
    sequences = selecting(form, head_dim, 4, 2, "cpu")
    expected, lse = exact(form, sequences)
    assert torch.equal(expected.to(dtype).double(), expected)  # no rounding hides anything
    counts = lse[lse > -torch.inf].exp()
    assert {1, 2, 4, 8, MOST_KEYS} >= set(counts.round().int().tolist()) > {1, 2}
    out, found_lse = call_of(form, sequences, dtype)()
    assert torch.equal(out, expected.to(dtype))
    torch.testing.assert_close(found_lse.double(), lse)


@pytest.mark.parametrize("form", DENSE)
def test_results_of_float8_are_exact(form):
    form = FORMS[form]
    sequences = selecting(form, 64, 4, 2, "cpu")
    assert torch.equal(call_of(form, sequences, FP8)()[0], exact(form, sequences)[0].bfloat16())


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_results_with_sinks_are_exact(form):
    sequences, options = selecting_with_sinks(form, 64, 4, 2, "cpu")
    expected, lse = exact(form, sequences, **options)
    assert torch.equal(expected.bfloat16().double(), expected)
    # Of keys, and one for the sink: 1 where a row sees no key.
    counts = set(lse.flatten().exp().round().int().tolist())
    assert {1, 2, 4, 8, MOST_KEYS} >= counts > {2}
    out, found_lse = call_of(form, sequences, torch.bfloat16, **options)()
    assert torch.equal(out, expected.bfloat16())
    torch.testing.assert_close(found_lse.double(), lse)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_results_of_the_nearest_are_exact(form):
    """To what bfloat16 shows: integers, or halves of two keys at both sides of a row."""
    sequences, options = selecting_the_nearest(form, 64, 4, 2, "cpu")
    expected, lse = exact(form, sequences, **options)
    rounded = expected.bfloat16()
    assert torch.equal(rounded * 2, (rounded * 2).round())
    torch.testing.assert_close(rounded.double(), expected, rtol=1e-4, atol=0.0)
    out, found_lse = call_of(form, sequences, torch.bfloat16, **options)()
    assert torch.equal(out, rounded)
    assert lse[lse > -torch.inf].min() < -500  # a key that is far away counts, too
    torch.testing.assert_close(found_lse.double(), lse, rtol=1e-5, atol=1e-5)


def as_kernels_do(dout, q, k, v, out, lse, window):
    """Gradients of a sequence by float32 sums, where weights and dS are rounded to the inputs' dtype."""
    dtype, group = q.dtype, q.shape[0] // k.shape[0]
    dout, q, k, v, out = (x.float() for x in (dout, q, k, v, out))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    seen = visible_keys(q.shape[1], k.shape[1], window=window)
    scores = (q @ k.mT * (SCALE * 1.4426950408889634)).masked_fill(~seen, -torch.inf)
    p = torch.exp2(scores - lse.masked_fill(lse == -torch.inf, 2e38)[..., None] * 1.4426950408889634)  # fmt: skip
    ds = (p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))).to(dtype).float()
    of_heads = SCALE * (ds.mT @ q), p.to(dtype).float().mT @ dout
    grads = SCALE * (ds @ k), *(x.unflatten(0, (-1, group)).sum(1) for x in of_heads)
    return [x.to(dtype) for x in grads]


@pytest.mark.parametrize("form", DENSE)
def test_gradients_of_slopes_are_exact(form):
    """Of any order of sums: the products' absolute values have 24 bits together."""
    form = FORMS[form]
    sequences = selecting(form, 64, 4, 2, "cpu", largest=1)
    douts = sparse_gradients(sequences)
    expected, total = exact_slope_gradients(form, sequences, douts), 0.0
    for (q, k, v), dout in zip(sequences, douts, strict=True):
        k, v = (x.repeat_interleave(2, 0) for x in (k, v))
        seen = visible_keys(q.shape[1], k.shape[1], window=form.window)
        p = (SCALE * q @ k.mT).masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
        ds = p * (dout @ v.mT - (dout * (p @ v)).sum(-1, keepdim=True))
        last = k.shape[1] - q.shape[1]
        away = torch.arange(k.shape[1]) - torch.arange(last, last + q.shape[1])[:, None]
        parts = ds * away.abs() * 2**8
        assert torch.equal(parts, parts.round())
        assert (parts.abs().sum((1, 2)) < 2**24).all()
        total = total - parts.sum((1, 2)) / 2**8
    assert torch.equal(total.float(), expected)
    found = slopes_backward_of(form, sequences, douts, torch.float32)()[3]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(("head_dim", "kv_heads"), [(64, 4), (128, 1)])
@pytest.mark.parametrize("form", WITH_BACKWARD)
@HALF
def test_gradients_are_exact(dtype, form, head_dim, kv_heads):
    form = FORMS[form]
    sequences = selecting(form, head_dim, 4, kv_heads, "cpu", largest=1)
    douts = sparse_gradients(sequences)
    expected = [x.to(dtype) for x in exact_gradients(form, sequences, douts)]
    assert all(x.any() for x in expected)
    call = backward_of(form, sequences, douts, dtype)
    for grad, right in zip(call(), expected, strict=True):
        torch.testing.assert_close(grad, right, rtol=1e-2, atol=1e-2)
    dout, _, q, k, v, out, lse = call.args[:7]
    if form.layout == "packed":
        ends, key_ends = ([0, *itertools.accumulate(x)] for x in (form.queries, form.keys))
        for b in range(len(form.keys)):
            own, keys = slice(*ends[b : b + 2]), slice(*key_ends[b : b + 2])
            state = (x[part].transpose(0, 1) for x, part in ((dout, own), (q, own), (k, keys), (v, keys), (out, own)))  # fmt: skip
            dq, dk, dv = as_kernels_do(*state, lse[:, own], form.window)
            for grad, right, part in ((dq, expected[0], own), (dk, expected[1], keys), (dv, expected[2], keys)):  # fmt: skip
                assert torch.equal(grad, right[part].transpose(0, 1))
        return
    for b, keys in enumerate(form.keys):
        state = dout[b], q[b], k[b, :, :keys], v[b, :, :keys], out[b], lse[b]
        dq, dk, dv = as_kernels_do(*state, form.window)
        for grad, right in ((dq, expected[0]), (dk, expected[1]), (dv, expected[2])):
            assert torch.equal(grad, right[b, :, : grad.shape[1]])
            assert not right[b, :, grad.shape[1] :].any()
