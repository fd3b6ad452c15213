"""Gradients of sinks and of ALiBi's slopes with Hopper's backward, on an sm_90."""

import itertools

import pytest
import torch

import torch_fdattn
from tests.ops.attention.streaming import gradients_of_saved
from tests.ops.attention.test_hopper import normal
from tests.ops.decode.inputs import int32
from torch_fdattn.ops.library import launches

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a CUDA device of sm_90",
)

HEADS, KV_HEADS, LENS = 4, 2, (1, 517)
#: Head dims with masks: (left, right), and lengths of keys.
CASES = pytest.mark.parametrize(
    ("head_dim", "window", "lens"),
    [
        (64, (-1, 0), None), (64, (-1, -1), LENS), (128, (-1, -1), None), (128, (-1, 0), None), (128, (100, 20), None),
        (128, (-1, 0), LENS), (96, (-1, 0), None), (256, (-1, 0), None), (256, (-1, -1), LENS),
    ],
)  # fmt: skip
HERE, PORTABLE = {"attention_backward/hopper": 1}, {"attention_backward/triton": 1}


def slopes_of(*shape):
    return (torch.rand(shape, device="cuda") / 8).requires_grad_()


def backward_of(results, given, *inputs):
    """(gradients, the kernels that the op launched)."""
    launches.clear()
    found = torch.autograd.grad(results, inputs, given, retain_graph=True)
    return found, dict(launches)


def check(found, expected, size, name):
    """size: the same sum of absolute values, which cancel in what is expected."""
    wrong = (found.double() - expected).abs()
    assert (wrong <= 1e-4 * size).all(), (name, wrong / size)


def check_call(head_dim, window, lens, kernels, queries=300, ordered=False, **parameters):
    """By autograd, with a gradient of lse, too; then twenty times over the same bits, of what has one order."""
    q, k, v = (normal(2, h, n, head_dim).requires_grad_() for h, n in ((HEADS, queries), (KV_HEADS, 700), (KV_HEADS, 700)))  # fmt: skip
    kv_lens = None if lens is None else int32(*lens, device="cuda")
    results = torch_fdattn.attention(q, k, v, kv_lens, window=window, **parameters)
    dout, dlse = torch.randn_like(results[0]), torch.randn_like(results[1])
    dlse.masked_fill_(results[1].isinf(), 0.0)
    inputs = q, k, v, *parameters.values()
    (dq, dk, dv, *of_parameters), made = backward_of(results, (dout, dlse), *inputs)
    assert made == kernels
    right = gradients_of_saved(q, k, v, *results, dout, dlse, window, lens, **parameters)
    for name, grad in zip(("dq", "dk", "dv"), (dq, dk, dv), strict=True):
        assert (grad.double() - right[name]).norm() <= 1e-2 * right[name].norm(), name
    for name, grad in zip(parameters, of_parameters, strict=True):
        check(grad, *right[name], name)
    for _ in range(20):
        again = backward_of(results, (dout, dlse), *inputs)[0]
        kept = slice(0 if ordered else 1, None)
        assert all(map(torch.equal, again[kept], (dq, dk, dv, *of_parameters)[kept]))


@CASES
def test_sinks(head_dim, window, lens):
    check_call(head_dim, window, lens, HERE, sinks=torch.randn(HEADS, device="cuda").requires_grad_())  # fmt: skip


@CASES
def test_slopes_and_sinks(head_dim, window, lens):
    """Slopes of each sequence."""
    sinks = torch.randn(HEADS, device="cuda").requires_grad_()
    check_call(head_dim, window, lens, HERE, alibi_slopes=slopes_of(2, HEADS), sinks=sinks)


@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize("queries", [17, 65, 900])
def test_slopes_of_all_sequences(queries, head_dim):
    """Of few queries, and of more than keys, of which the first see none."""
    check_call(head_dim, (-1, 0), None, HERE, queries, alibi_slopes=slopes_of(HEADS))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("window", "lens"), [((-1, 0), None), ((-1, -1), LENS), ((100, 0), None)])
def test_in_order(window, lens, head_dim):
    sinks = torch.randn(HEADS, device="cuda").requires_grad_()
    torch_fdattn.set_deterministic(True)
    try:
        check_call(head_dim, window, lens, HERE, 700, ordered=True, alibi_slopes=slopes_of(2, HEADS), sinks=sinks)  # fmt: skip
    finally:
        torch_fdattn.set_deterministic(False)


def test_a_softcap_leaves_slopes_to_the_portable_kernel():
    q, k, v = (normal(1, h, 300, 128) for h in (HEADS, KV_HEADS, KV_HEADS))
    slopes, sinks = slopes_of(HEADS), torch.zeros(HEADS, device="cuda").requires_grad_()
    for inputs, kernels in (((slopes,), PORTABLE), ((sinks,), HERE)):
        options = dict(alibi_slopes=slopes.detach(), sinks=sinks.detach())
        options["alibi_slopes" if inputs[0] is slopes else "sinks"] = inputs[0]
        out, _ = torch_fdattn.attention(q, k, v, causal=True, softcap=2.0, **options)
        assert backward_of(out, torch.randn_like(out), *inputs)[1] == kernels


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("ordered", [False, True])
def test_sinks_of_packed_sequences(ordered, head_dim):
    """Between tokens of no sequence; a sequence without tokens, and one of two tiles of keys."""
    lens = (65, 0, 1, 300)
    begins = int32(*itertools.accumulate(lens, initial=5), device="cuda")
    q, k, v = (normal(sum(lens) + 75, h, head_dim).requires_grad_() for h in (HEADS, KV_HEADS, KV_HEADS))  # fmt: skip
    sinks = torch.randn(HEADS, device="cuda").requires_grad_()
    results = torch_fdattn.varlen_attention(q, k, v, begins, causal=True, sinks=sinks)
    dout, dlse = torch.randn_like(results[0]), torch.randn_like(results[1])
    dlse[:, :5] = dlse[:, 5 + sum(lens) :] = 0.0
    torch_fdattn.set_deterministic(ordered)
    try:
        (dsinks,), made = backward_of(results, (dout, dlse), sinks)
    finally:
        torch_fdattn.set_deterministic(False)
    assert made == {"varlen_attention_backward/hopper": 1}
    expected = size = 0.0
    for first, end in itertools.pairwise(begins.tolist()):
        own, rows = (x[first:end].transpose(0, 1)[None] for x in (q, k, v, results[0], dout)), slice(first, end)  # fmt: skip
        *inputs, out, spread = own
        lse, of_lse = results[1][None, :, rows], dlse[None, :, rows]
        found = gradients_of_saved(*inputs, out, lse, spread, of_lse, (-1, 0), None, sinks=sinks)
        expected, size = expected + found["sinks"][0], size + found["sinks"][1]
    check(dsinks, expected, size, "sinks")


def test_a_captured_training_step():
    """Sums behind the launches are captured with them."""
    q, k, v = (normal(1, h, 1000, 128).requires_grad_() for h in (HEADS, KV_HEADS, KV_HEADS))
    parameters = dict(alibi_slopes=slopes_of(HEADS), sinks=torch.zeros(HEADS, device="cuda").requires_grad_())  # fmt: skip
    inputs, dout = (q, k, v, *parameters.values()), normal(1, HEADS, 1000, 128)

    def step():
        out, _ = torch_fdattn.attention(q, k, v, causal=True, **parameters)
        return torch.autograd.grad(out, inputs, dout)

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(5):
        for x in found:
            x.fill_(torch.nan)
        graph.replay()
        assert all(map(torch.equal, found[1:], expected[1:]))
