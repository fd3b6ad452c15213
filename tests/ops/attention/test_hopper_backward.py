"""Hopper's backward against the oracle, on an sm_90."""

import itertools

import pytest
import torch

import torch_fdattn
from tests.ops.attention.test_hopper import attend, normal
from tests.ops.decode.inputs import int32
from torch_fdattn.launch.launches import run
from torch_fdattn.ops.library import launches
from torch_fdattn.ops.options import AttentionOptions
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import NO_SCORES, Scores
from torch_fdattn.testing import attention_oracle

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a CUDA device of sm_90",
)

ALL = Mask()
HEAD_DIMS = pytest.mark.parametrize("head_dim", [64, 128, 256])


ORDERED = pytest.mark.parametrize("ordered", [False, True], ids=["any order", "ordered"])


def gradients(dout, dlse, q, k, v, out, lse, mask=ALL, scores=NO_SCORES, dtype=None, ordered=False):
    from torch_fdattn.ops.attention.backward import empty_rows
    from torch_fdattn.ops.attention.hopper.backward.launch import (
        hopper_backward_launches,
        takes,
        zero_sums,
    )

    options = AttentionOptions(mask, q.shape[3] ** -0.5, scores, dtype=dtype)
    assert takes(q, k, v, options)
    grads = [torch.full_like(x, torch.nan, dtype=dtype) for x in (q, k, v)]
    rows = empty_rows(q)
    sums = None if ordered else zero_sums(q, rows[0].shape[2])
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    run(hopper_backward_launches(dout, dlse, q, k, v, out, lse, options, *grads, rows, sums, counter))  # fmt: skip
    assert counter.item() == 0
    return grads


def check(q, k, v, mask=ALL, lens=None, wants_lse=False, ordered=False):
    out, lse = attend(q, k, v, mask)
    dout = torch.randn_like(out)
    dlse = torch.randn_like(lse) if wants_lse else None
    found = gradients(dout, dlse, q, k, v, out, lse, mask, ordered=ordered)
    if ordered:
        for _ in range(20):
            again = gradients(dout, dlse, q, k, v, out, lse, mask, ordered=True)
            assert all(map(torch.equal, again, found))
    doubles = [x.double().requires_grad_() for x in (q, k, v)]
    if lens is not None:
        kept = torch.arange(k.shape[2], device="cuda") < mask.kv_lens[:, None]
        doubles[1:] = [
            x.detach().masked_fill(~kept[:, None, :, None], 0.0).requires_grad_()
            for x in doubles[1:]
        ]
    options = dict(causal=mask.window_right == 0)
    if mask.window_left >= 0:
        options["window"] = (mask.window_left, mask.window_right)
    if mask.q_start is not None:
        options["q_start"] = mask.q_start.tolist()
    exact, exact_lse = attention_oracle(*doubles, lens, **options)
    results, given = [exact], [dout.double()]
    if wants_lse:
        results, given = [exact, exact_lse], [dout.double(), dlse.double()]
    expected = torch.autograd.grad(results, doubles, given)
    for grad, right in zip(found, expected, strict=True):
        assert torch.isfinite(grad).all()
        error = 1e-2 if q.dtype == torch.bfloat16 else 2e-3
        # A query that sees one key has a gradient of 0, in float32 a difference of equal numbers.
        assert (grad.double() - right).norm() <= error * right.norm() + 1e-6 * dout.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@HEAD_DIMS
@pytest.mark.parametrize(
    ("queries", "keys"), [(64, 128), (512, 512), (1, 700), (300, 1000), (1000, 1000)]
)
@ORDERED
def test_against_the_oracle(ordered, queries, keys, head_dim, causal, dtype):
    q = normal(2, 4, queries, head_dim, dtype=dtype)
    k, v = (normal(2, 2, keys, head_dim, dtype=dtype) for _ in range(2))
    check(q, k, v, Mask(window_right=0 if causal else -1), wants_lse=causal, ordered=ordered)


@pytest.mark.parametrize("head_dim", [40, 96, 160, 192])
@pytest.mark.parametrize("causal", [False, True])
@ORDERED
def test_other_head_dims(ordered, causal, head_dim):
    """Between NaN, which zeros that fill up must not be."""
    q, k, v = (
        torch.full((2, h, 300, head_dim + 8), torch.nan, device="cuda").bfloat16()[..., :head_dim]
        for h in (4, 2, 2)
    )
    for x in (q, k, v):
        x.normal_()
    check(q, k, v, Mask(window_right=0 if causal else -1), ordered=ordered)


@HEAD_DIMS
@pytest.mark.parametrize("mask", ["full", "causal", "lengths"])
@pytest.mark.parametrize("feature", ["softcap", "ALiBi", "slopes of sequences", "sinks", "all"])
@ORDERED
def test_changed_scores(ordered, feature, mask, head_dim):
    """Of q, k and v; those of slopes and sinks are `test_hopper_backward_parameters.py`'s."""
    q, k, v = (normal(2, h, n, head_dim) for h, n in ((4, 300), (2, 700), (2, 700)))
    options, lens = {}, [1, 517] if mask == "lengths" else None
    if feature in ("softcap", "all"):
        options["softcap"] = 1.5
    if feature in ("ALiBi", "all"):
        options["alibi_slopes"] = torch.rand(4, device="cuda") / 8
    if feature == "slopes of sequences":
        options["alibi_slopes"] = torch.rand(4, 2, device="cuda").mT / 8
    if feature in ("sinks", "all"):
        options["sinks"] = torch.tensor([1.0, -torch.inf, -3.0, 9.0], device="cuda").bfloat16()
    causal = mask == "causal"
    kv_lens = None if lens is None else int32(*lens, device="cuda")
    out, lse = torch_fdattn.attention(q, k, v, kv_lens, causal=causal, **options)
    dout = torch.randn_like(out)
    found = gradients(
        dout, None, q, k, v, out, lse, Mask(kv_lens, window_right=0 if causal else -1), Scores(**options), ordered=ordered
    )  # fmt: skip
    doubles = [x.double().requires_grad_() for x in (q, k, v)]
    exact = attention_oracle(*doubles, lens, causal=causal, **options)[0]
    for grad, right in zip(found, torch.autograd.grad(exact, doubles, dout.double()), strict=True):
        assert (grad.double() - right).norm() <= 1e-2 * right.norm()


@HEAD_DIMS
@pytest.mark.parametrize("window", [(0, 0), (100, 0), (300, 20), (1000, 0), (0, -1), (100, -1)])
@pytest.mark.parametrize("keys", [512, 700])
@ORDERED
def test_windows(ordered, keys, window, head_dim):
    q, k, v = (normal(1, h, keys, head_dim) for h in (4, 2, 2))
    check(q, k, v, Mask(window_left=window[0], window_right=window[1]), ordered=ordered)


@HEAD_DIMS
@pytest.mark.parametrize("window", [(1100, 0), (1030, 20)])
@ORDERED
def test_wide_windows(ordered, window, head_dim):
    """Tiles of head dim 64 are as large as without a window."""
    q, k, v = (normal(1, h, 1500, head_dim) for h in (4, 2, 2))
    check(q, k, v, Mask(window_left=window[0], window_right=window[1]), ordered=ordered)


@HEAD_DIMS
@pytest.mark.parametrize("causal", [False, True])
@ORDERED
def test_lengths_beyond_which_is_nan(ordered, causal, head_dim):
    q, k, v = (normal(4, h, 600, head_dim) for h in (4, 2, 2))
    lens = [600, 70, 129, 1]
    for x, (b, n) in itertools.product((k, v), enumerate(lens)):
        x[b, :, n:] = torch.nan
    mask = Mask(int32(*lens, device="cuda"), window_right=0 if causal else -1)
    check(q, k, v, mask, lens, ordered=ordered)


@HEAD_DIMS
@ORDERED
def test_a_softcap_with_lengths_beyond_which_is_nan(ordered, head_dim):
    q, k, v = (normal(2, h, 600, head_dim) for h in (4, 2, 2))
    lens = [70, 300]
    kept = [x.double() for x in (q, k, v)]
    for x, (b, n) in itertools.product((k, v), enumerate(lens)):
        x[b, :, n:] = torch.nan
    for x, (b, n) in itertools.product(kept[1:], enumerate(lens)):
        x[b, :, n:] = 0.0
    mask = Mask(int32(*lens, device="cuda"))
    out, lse = torch_fdattn.attention(q, k, v, mask.kv_lens, softcap=1.5)
    dout = torch.randn_like(out)
    found = gradients(dout, None, q, k, v, out, lse, mask, Scores(1.5), ordered=ordered)
    doubles = [x.requires_grad_() for x in kept]
    exact = attention_oracle(*doubles, lens, softcap=1.5)[0]
    for grad, right in zip(found, torch.autograd.grad(exact, doubles, dout.double()), strict=True):
        assert (grad.double() - right).norm() <= 1e-2 * right.norm()


@HEAD_DIMS
@pytest.mark.parametrize("shape", [(256, 256), (300, 1000)])
@ORDERED
def test_gradients_in_float32(ordered, shape, head_dim):
    """As steps of ring attention ask for."""
    q, k, v = (normal(2, h, n, head_dim) for h, n in zip((4, 2, 2), (shape[0], shape[1], shape[1]), strict=True))  # fmt: skip
    out, lse = attend(q, k, v, Mask(window_right=0))
    dout = torch.randn_like(out)
    found = gradients(dout, None, q, k, v, out, lse, Mask(window_right=0), dtype=torch.float32, ordered=ordered)  # fmt: skip
    doubles = [x.double().requires_grad_() for x in (q, k, v)]
    exact = attention_oracle(*doubles, causal=True)[0]
    for grad, right in zip(found, torch.autograd.grad(exact, doubles, dout.double()), strict=True):
        assert grad.dtype == torch.float32
        assert (grad.double() - right).norm() <= 1e-2 * right.norm()


@ORDERED
def test_rows_without_keys(ordered):
    """More queries than keys: the first rows see none, and have no gradient."""
    q, k, v = normal(1, 4, 300, 128), normal(1, 2, 100, 128), normal(1, 2, 100, 128)
    out, lse = attend(q, k, v, Mask(window_right=0))
    dq, dk, dv = gradients(
        torch.randn_like(out), None, q, k, v, out, lse, Mask(window_right=0), ordered=ordered
    )
    assert (dq[:, :, :200] == 0).all()
    assert all(torch.isfinite(x).all() for x in (dq, dk, dv))


@ORDERED
def test_positions(ordered):
    q, k, v = normal(2, 4, 100, 128), normal(2, 2, 900, 128), normal(2, 2, 900, 128)
    check(q, k, v, Mask(q_start=int32(800, 3, device="cuda"), window_right=0), ordered=ordered)


def test_strides():
    qkv = normal(2, 300, 12, 128).transpose(1, 2)
    check(qkv[:, :4], qkv[:, 4:8], qkv[:, 8:], Mask(window_right=0))


@HEAD_DIMS
@ORDERED
def test_exact_gradients_of_v(ordered, head_dim):
    """Of equal weights and small integers nothing is rounded: registers that wgmma reads too late would show."""
    q, k = torch.zeros(2, 8, 2048, head_dim, device="cuda").bfloat16(), normal(2, 2, 2048, head_dim)
    out, lse = attend(q, k, torch.zeros_like(k))
    dout = torch.randint(-8, 9, q.shape, device="cuda").bfloat16()
    expected = (dout.double().unflatten(1, (2, 4)).sum((2, 3), keepdim=True) / 2048).expand(2, 2, 1, 2048, head_dim)[:, :, 0]  # fmt: skip
    for _ in range(100):
        dq, dk, dv = gradients(dout, None, q, k, torch.zeros_like(k), out, lse, ordered=ordered)
        assert torch.equal(dv, expected.bfloat16())
        assert (dq == 0).all()
        assert (dk == 0).all()


@HEAD_DIMS
def test_same_bits_but_of_dq(head_dim):
    """Whose sums have one order above head dim 128."""
    q, k, v = (normal(2, h, 1500, head_dim) for h in (8, 2, 2))
    out, lse = attend(q, k, v, Mask(window_right=0))
    dout = torch.randn_like(out)
    first = gradients(dout, None, q, k, v, out, lse, Mask(window_right=0))
    for _ in range(20):
        again = gradients(dout, None, q, k, v, out, lse, Mask(window_right=0))
        assert all(map(torch.equal, again[1:], first[1:]))
        assert head_dim <= 128 or torch.equal(again[0], first[0])
        torch.testing.assert_close(again[0], first[0], rtol=2e-2, atol=1e-3)


@HEAD_DIMS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 2, 8192), (2, 16, 4, 3000), (3, 24, 24, 900)])
def test_same_bits_of_the_ordered_form(shape, causal, head_dim):
    """More tiles than programs, several sections; two launches at the same time, too."""
    batch, heads, kv_heads, length = shape
    q, k, v = (normal(batch, h, length, head_dim) for h in (heads, kv_heads, kv_heads))
    mask = Mask(window_right=0 if causal else -1)
    out, lse = attend(q, k, v, mask)
    given = torch.randn_like(out), None, q, k, v, out, lse, mask
    first = gradients(*given, ordered=True)
    in_any_order = gradients(*given)
    assert all(map(torch.equal, first[1:], in_any_order[1:]))
    torch.testing.assert_close(first[0], in_any_order[0], rtol=2e-2, atol=1e-3)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(gradients(*given, ordered=True))
        torch.cuda.synchronize()
        for grads in found:
            assert all(map(torch.equal, grads, first))


def test_two_streams():
    q, k, v = (normal(1, 8, 2048, 128) for _ in range(3))
    out, lse = attend(q, k, v)
    expected = gradients(out, None, q, k, v, out, lse)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(gradients(out, None, q, k, v, out, lse))
        torch.cuda.synchronize()
        for grads in found:
            assert all(map(torch.equal, grads[1:], expected[1:]))


def backward_of(out, dout, *inputs):
    """(gradients, the kernels that the op launched)."""
    launches.clear()
    found = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    return found, dict(launches)


HERE, PORTABLE = {"attention_backward/hopper": 1}, {"attention_backward/triton": 1}


def test_the_op_comes_here_each_time():
    """But where its gradient lies as no descriptor can; where the same bits are asked for, too."""
    q, k, v = (normal(2, h, 400, 128).requires_grad_() for h in (4, 2, 2))
    out, _ = torch_fdattn.attention(q, k, v, causal=True)
    dout = torch.randn_like(out)
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = attention_oracle(*doubles, causal=True)[0]
    expected = torch.autograd.grad(exact, doubles, dout.double())
    shifted = torch.empty(dout.numel() + 4, dtype=dout.dtype, device="cuda")[4:].view(dout.shape)
    shifted.copy_(dout)
    for given, kernels in [(dout, HERE)] * 4 + [(shifted, PORTABLE), (dout, HERE)]:
        found, made = backward_of(out, given, q, k, v)
        assert made == kernels
        for grad, right in zip(found, expected, strict=True):
            assert (grad.double() - right).norm() <= 1e-2 * right.norm()
    assert backward_of(out, dout[:1, :1, :1].expand(out.shape), q, k, v)[1] == PORTABLE
    torch_fdattn.set_deterministic(True)
    try:
        first, made = backward_of(out, dout, q, k, v)
        assert made == HERE
        for _ in range(20):
            again, made = backward_of(out, dout, q, k, v)
            assert made == HERE
            assert all(map(torch.equal, again, first))
        assert backward_of(out, shifted, q, k, v)[1] == PORTABLE
    finally:
        torch_fdattn.set_deterministic(False)
    assert backward_of(out, dout, q, k, v)[1] == HERE


def test_a_captured_training_step_in_order():
    q, k, v = (normal(1, 4, 2048, 128).requires_grad_() for _ in range(3))
    dout = normal(1, 4, 2048, 128)
    torch_fdattn.set_deterministic(True)
    try:
        expected = torch.autograd.grad(torch_fdattn.attention(q, k, v)[0], (q, k, v), dout)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = torch.autograd.grad(torch_fdattn.attention(q, k, v)[0], (q, k, v), dout)
    finally:
        torch_fdattn.set_deterministic(False)
    for _ in range(20):
        for x in found:
            x.zero_()
        graph.replay()
        assert all(map(torch.equal, found, expected))


def test_a_captured_training_step():
    q, k, v = (normal(1, 4, 1024, 128).requires_grad_() for _ in range(3))
    dout = normal(1, 4, 1024, 128)
    expected = torch.autograd.grad(torch_fdattn.attention(q, k, v)[0], (q, k, v), dout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(torch_fdattn.attention(q, k, v)[0], (q, k, v), dout)
    for _ in range(5):
        for x in found:
            x.zero_()
        graph.replay()
        assert all(map(torch.equal, found[1:], expected[1:]))
        torch.testing.assert_close(found[0], expected[0], rtol=2e-2, atol=1e-3)


@ORDERED
def test_ten_thousand_launches_of_mixed_shapes(ordered):
    """They do not hang, and the last of each shape is right."""
    shapes = [(1, 1, 1, 1), (1, 2, 130, 700), (2, 4, 64, 64), (3, 2, 257, 2000), (1, 16, 1024, 1024)]  # fmt: skip
    calls = []
    for (batch, heads, queries, keys), head_dim in itertools.product(shapes, (64, 128, 256)):
        q, k = normal(batch, heads, queries, head_dim), normal(batch, heads, keys, head_dim)
        out, lse = attend(q, k, k)
        calls.append((out, None, q, k, k, out, lse))
    expected = [gradients(*call, ordered=ordered) for call in calls]
    # dQ of the ordered form alone.
    compared = slice(0 if ordered else 1, 3)
    for i in range(10_000):
        found = gradients(*calls[i % len(calls)], ordered=ordered)
        if i >= 10_000 - len(calls):
            assert all(map(torch.equal, found[compared], expected[i % len(calls)][compared]))
