"""Hopper's backward of packed sequences against the oracle, on an sm_90: sequence by sequence."""

import itertools
import math

import pytest
import torch

import torch_fdattn
from tests.ops.decode.inputs import int32
from torch_fdattn.ops.library import launches
from torch_fdattn.testing import attention_oracle

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a CUDA device of sm_90",
)

HERE, PORTABLE = ({f"varlen_attention_backward/{kernel}": 1} for kernel in ("hopper", "triton"))
#: Around a block of queries and one of keys.
LENGTHS = (1, 63, 64, 65, 0, 700)
HEADS, KV_HEADS = 4, 2
HEAD_DIMS = pytest.mark.parametrize("head_dim", [40, 64, 128])
NAN = float("nan")


def begins(lens, before=0):
    return int32(*itertools.accumulate(lens, initial=before), device="cuda")


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda", dtype=dtype)


def tokens(lens, heads, head_dim, before=0, after=0, dtype=torch.bfloat16):
    """Of sequences, between NaN of none."""
    x = normal(before + sum(lens) + after, heads, head_dim, dtype=dtype)
    x[:before] = x[before + sum(lens) :] = NAN
    return x


def gradients(out, dout, *inputs, dlse=None, ordered=False):
    """(gradients, the kernels that the op launched)."""
    launches.clear()
    results, given = (out[0], dout) if dlse is None else (out, (dout, dlse))
    torch_fdattn.set_deterministic(ordered)
    try:
        found = torch.autograd.grad(results, inputs, given, retain_graph=True)
    finally:
        torch_fdattn.set_deterministic(False)
    return found, dict(launches)


def check(
    lens, head_dim, key_lens=None, used=None, around=(0, 0), dtype=torch.bfloat16, wants_lse=False, q_start=None,
    **options,
):  # fmt: skip
    """In any order and ordered. used: how many keys of each sequence count, of which the others are NaN; around: tokens of no
    sequence."""
    before = around[0]
    key_lens = lens if key_lens is None else key_lens
    q = tokens(lens, HEADS, head_dim, *around, dtype)
    k, v = (tokens(key_lens, KV_HEADS, head_dim, *around, dtype) for _ in range(2))
    spans = list(itertools.pairwise(begins(lens, before).tolist()))
    key_spans = list(itertools.pairwise(begins(key_lens, before).tolist()))
    if used is not None:
        for (first, end), n in zip(key_spans, used, strict=True):
            k[first + n : end] = v[first + n : end] = NAN
        options["kv_lens"] = int32(*used, device="cuda")
    if q_start is not None:
        options["q_start"] = int32(*q_start, device="cuda")
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = torch_fdattn.varlen_attention(
        *inputs, begins(lens, before), begins(key_lens, before), **options
    )
    dout = tokens(lens, HEADS, head_dim, *around, dtype)
    dlse = tokens(lens, HEADS, 1, *around, torch.float32)[..., 0].T if wants_lse else None
    if dlse is not None:  # a row without keys gives -inf whatever it sees
        dlse = dlse.masked_fill(out[1] == -math.inf, 0.0)
    expected = [torch.zeros(x.shape, dtype=torch.float64, device="cuda") for x in inputs]
    for b, ((first, end), (first_key, end_key)) in enumerate(zip(spans, key_spans, strict=True)):
        if used is not None:
            end_key = first_key + used[b]
        if first == end or first_key == end_key:
            continue
        places = slice(first, end), slice(first_key, end_key), slice(first_key, end_key)
        own = [
            x.detach()[place].double().transpose(0, 1)[None].requires_grad_()
            for x, place in zip(inputs, places, strict=True)
        ]
        asked = {x: y for x, y in options.items() if x not in ("kv_lens", "q_start")}
        slopes = asked.get("alibi_slopes")
        if slopes is not None and slopes.dim() == 2:
            asked["alibi_slopes"] = slopes[b]
        if q_start is not None:
            asked["q_start"] = [q_start[b]]
        exact, exact_lse = attention_oracle(*own, **asked)
        spread = dout[first:end].double().transpose(0, 1)[None]
        # The backward is given out as it was rounded, in place of which the oracle takes a gradient of lse. Where a sink
        # takes most of a weight, or a query sees one key, it is much of what is left.
        rounded = out[0][first:end].double().transpose(0, 1)[None]
        of_lse = (spread * (exact.detach() - rounded)).sum(-1)
        if dlse is not None:
            of_lse += dlse[:, first:end].double()[None]
        of_lse.masked_fill_(exact_lse.isinf(), 0.0)
        found_exactly = torch.autograd.grad((exact, exact_lse), own, (spread, of_lse))
        for x, place, grad in zip(expected, places, found_exactly, strict=True):
            x[place] = grad[0].transpose(0, 1)
    for ordered in (False, True):
        found, made = gradients(out, dout, *inputs, dlse=dlse, ordered=ordered)
        assert made == HERE
        size = dout[before : before + sum(lens)].double().norm()
        check_gradients(found, expected, spans, key_spans, used, size)


def check_gradients(found, expected, spans, key_spans, used, size):
    """size: of the gradient of out."""
    error = 1e-2 if found[0].dtype == torch.bfloat16 else 2e-3
    for name, grad, right, places in zip(
        ("dq", "dk", "dv"), found, expected, (spans, key_spans, key_spans), strict=True
    ):
        assert torch.isfinite(grad).all(), name
        assert (grad.double() - right).norm() <= error * right.norm() + 1e-6 * size, name
        for first, end in places:
            # A query that sees one key has a gradient of 0, in float32 a difference of equal numbers.
            wrong = (grad[first:end].double() - right[first:end]).norm()
            assert wrong <= 3 * error * right[first:end].norm() + 1e-6 * size, (name, first, end)
        rest = torch.cat([grad[: places[0][0]], grad[places[-1][1] :]])
        assert (rest == 0).all(), name
    if used is not None:
        for (first, end), n in zip(key_spans, used, strict=True):
            assert all((x[first + n : end] == 0).all() for x in found[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@HEAD_DIMS
@pytest.mark.parametrize("lens", [LENGTHS, (30,) * 30, (1,), (128, 256, 64)])
def test_against_the_oracle(lens, head_dim, causal, dtype):
    check(lens, head_dim, causal=causal, dtype=dtype, wants_lse=causal)


@pytest.mark.parametrize("causal", [False, True])
@HEAD_DIMS
@pytest.mark.parametrize(
    ("lens", "key_lens"),
    [
        ((100, 64, 7, 0, 300), (700, 0, 128, 50, 65)),
        ((0, 0, 1), (3, 0, 200)),
        ((0, 130), (0, 257)),
    ],
)  # fmt: skip
def test_other_lengths_of_keys(lens, key_lens, head_dim, causal):
    """Queries without keys, keys without queries, and more queries than keys, of which the first see none."""
    check(lens, head_dim, key_lens, causal=causal)


@HEAD_DIMS
@pytest.mark.parametrize("window", [(0, 0), (100, 0), (300, 20), (0, -1), (100, -1), (-1, 30)])
def test_windows(window, head_dim):
    check(LENGTHS, head_dim, window=window)


@HEAD_DIMS
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_beyond_which_is_nan(causal, head_dim):
    check(LENGTHS, head_dim, used=[1, 40, 0, 65, 0, 517], causal=causal)


@HEAD_DIMS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature", ["softcap", "ALiBi", "slopes of sequences", "sinks", "all"])
def test_changed_scores(feature, causal, head_dim):
    """Of q, k and v; between NaN of no sequence."""
    options = {}
    if feature in ("softcap", "all"):
        options["softcap"] = 1.5
    if feature in ("ALiBi", "all"):
        options["alibi_slopes"] = torch.rand(HEADS, device="cuda") / 8
    if feature == "slopes of sequences":
        options["alibi_slopes"] = torch.rand(HEADS, len(LENGTHS), device="cuda").mT / 8
    if feature in ("sinks", "all"):
        options["sinks"] = torch.tensor([1.0, -torch.inf, -3.0, 9.0], device="cuda").bfloat16()
    check(LENGTHS, head_dim, around=(5, 70), causal=causal, **options)


@HEAD_DIMS
def test_positions(head_dim):
    check((100, 65, 0, 30), head_dim, (900, 300, 5, 64), q_start=[800, 3, 0, 40], causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("around", [(1, 1), (5, 70), (300, 300)])
@HEAD_DIMS
def test_tokens_of_no_sequence(head_dim, around, causal):
    """NaN there reaches nothing, and their gradients are 0."""
    check(LENGTHS, head_dim, around=around, causal=causal, wants_lse=causal)


@HEAD_DIMS
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_nan_stays_in_its_sequence(softcap, head_dim):
    lens = (70, 100, 70)
    q, k, v = (tokens(lens, h, head_dim) for h in (HEADS, KV_HEADS, KV_HEADS))
    dout = normal(sum(lens), HEADS, head_dim)
    results = []
    for garbage in (0.0, NAN):
        inputs = [x.clone() for x in (q, k, v)]
        for x in inputs:
            x[70:170] = garbage
        inputs = [x.requires_grad_() for x in inputs]
        out = torch_fdattn.varlen_attention(*inputs, begins(lens), causal=True, softcap=softcap)
        found, made = gradients(out, dout, *inputs)
        assert made == HERE
        results.append([torch.cat([x[:70], x[170:]]) for x in found])
        found, _ = gradients(out, dout, *inputs, ordered=True)
        results.append([torch.cat([x[:70], x[170:]]) for x in found])
    without, ordered_without, beside, ordered_beside = results
    assert all(map(torch.equal, ordered_without, ordered_beside))
    for first, again in zip(without, beside, strict=True):
        assert torch.isfinite(again).all()
        torch.testing.assert_close(again, first, rtol=2e-2, atol=1e-3)


def test_slices_of_one_tensor():
    """As a merged projection gives; their gradients are contiguous."""
    lens = (100, 1, 200)
    qkv = normal(sum(lens), HEADS + 2 * KV_HEADS, 128)
    inputs = [x.detach().requires_grad_() for x in qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)]
    dout = normal(sum(lens), HEADS, 128)
    found = []
    for tensors in (inputs, [x.detach().contiguous().requires_grad_() for x in inputs]):
        out = torch_fdattn.varlen_attention(*tensors, begins(lens), causal=True)
        grads, made = gradients(out, dout, *tensors)
        assert made == HERE
        found.append(grads)
    assert all(map(torch.equal, found[0][1:], found[1][1:]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=2e-2, atol=1e-3)


@HEAD_DIMS
def test_gradients_in_float32(head_dim):
    lens = begins(LENGTHS)
    q, k, v = (tokens(LENGTHS, h, head_dim) for h in (HEADS, KV_HEADS, KV_HEADS))
    out, lse = torch_fdattn.varlen_attention(q, k, v, lens, causal=True)
    dout = torch.randn_like(out)
    mask = None, None, None, -1, 0, 0, 0, head_dim**-0.5
    found = []
    for dtype in (torch.float32, None):
        launches.clear()
        found.append(
            torch.ops.fdattn.varlen_attention_backward(
                dout, None, q, k, v, out, lse, lens, None, *mask, dtype
            )
        )
        assert launches == HERE
    for single, half in zip(*found, strict=True):
        assert single.dtype == torch.float32
        torch.testing.assert_close(single, half.float(), rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_exact_gradients_of_v(head_dim):
    """Of equal weights and small integers nothing is rounded: registers that wgmma reads too late would show."""
    lens = (1, 2, 4, 32, 1024, 64, 256)
    q = torch.zeros(sum(lens), 8, head_dim, device="cuda").bfloat16().requires_grad_()
    k, v = (normal(sum(lens), 2, head_dim).requires_grad_() for _ in range(2))
    v.data.zero_()
    out = torch_fdattn.varlen_attention(q, k, v, begins(lens))
    dout = torch.randint(-8, 9, q.shape, device="cuda").bfloat16()
    expected = torch.cat(
        [
            (x.double().unflatten(1, (2, 4)).sum((0, 2)) / len(x)).expand(len(x), 2, head_dim)
            for x in dout.split(lens)
        ]
    )
    for _ in range(100):
        (dq, dk, dv), made = gradients(out, dout, q, k, v)
        assert made == HERE
        assert torch.equal(dv, expected.bfloat16())
        assert (dq == 0).all()
        assert (dk == 0).all()


def test_the_op_comes_here_each_time():
    """But where its gradient lies as no descriptor can. Where the same bits are asked for, they are given."""
    q, k, v = (tokens(LENGTHS, h, 128).requires_grad_() for h in (HEADS, KV_HEADS, KV_HEADS))
    out = torch_fdattn.varlen_attention(q, k, v, begins(LENGTHS), causal=True)
    dout = torch.randn_like(out[0])
    expected, made = gradients(out, dout, q, k, v, ordered=True)
    assert made == HERE
    assert all(map(torch.equal, expected, gradients(out, dout, q, k, v, ordered=True)[0]))
    shifted = torch.empty(dout.numel() + 4, dtype=dout.dtype, device="cuda")[4:].view(dout.shape)
    shifted.copy_(dout)
    for given, kernels in [(dout, HERE)] * 4 + [(shifted, PORTABLE), (dout, HERE)]:
        found, made = gradients(out, given, q, k, v)
        assert made == kernels
        for grad, right in zip(found, expected, strict=True):
            assert (grad.double() - right.double()).norm() <= 1e-2 * right.double().norm()
    assert gradients(out, dout[:1, :1].expand(dout.shape), q, k, v)[1] == PORTABLE


@pytest.mark.parametrize("head_dim", [160, 256])
def test_wide_heads_are_the_portable_kernels(head_dim):
    lens = (300, 1, 200)
    q, k, v = (tokens(lens, h, head_dim).requires_grad_() for h in (HEADS, KV_HEADS, KV_HEADS))
    out = torch_fdattn.varlen_attention(q, k, v, begins(lens), causal=True)
    dout = torch.randn_like(out[0])
    found, made = gradients(out, dout, q, k, v)
    assert made == PORTABLE
    for *own, spread, dq, dk, dv in zip(
        *(x.split(lens) for x in (q, k, v, dout, *found)), strict=True
    ):
        doubles = [x.detach().double().transpose(0, 1)[None].requires_grad_() for x in own]
        exact = attention_oracle(*doubles, causal=True)[0]
        expected = torch.autograd.grad(exact, doubles, spread.double().transpose(0, 1)[None])
        for grad, right in zip((dq, dk, dv), expected, strict=True):
            right = right[0].transpose(0, 1)
            assert (grad.double() - right).norm() <= 1e-2 * right.norm() + 1e-6 * spread.norm()


def test_many_short_sequences_are_the_portable_kernels():
    """Padding would be most of the sums of dQ."""
    lens = (30,) * 40
    q, k, v = (tokens(lens, h, 128).requires_grad_() for h in (HEADS, KV_HEADS, KV_HEADS))
    out = torch_fdattn.varlen_attention(q, k, v, begins(lens), causal=True)
    assert gradients(out, torch.randn_like(out[0]), q, k, v)[1] == PORTABLE


def test_in_order_where_lengths_do_not_grow():
    """Whatever comes out, it comes."""
    q, k, v = (normal(400, h, 128).requires_grad_() for h in (HEADS, KV_HEADS, KV_HEADS))
    out = torch_fdattn.varlen_attention(
        q, k, v, int32(0, 100, 200, 400, device="cuda"), int32(0, 300, 100, 400, device="cuda")
    )
    gradients(out, torch.randn_like(out[0]), q, k, v, ordered=True)
    torch.cuda.synchronize()


def test_gradients_of_slopes_are_the_portable_kernels():
    slopes = (torch.rand(HEADS, device="cuda") / 8).requires_grad_()
    q, k, v = (tokens(LENGTHS, h, 128).requires_grad_() for h in (HEADS, KV_HEADS, KV_HEADS))
    out = torch_fdattn.varlen_attention(q, k, v, begins(LENGTHS), alibi_slopes=slopes)
    assert gradients(out, torch.randn_like(out[0]), q, k, v, slopes)[1] == PORTABLE


def test_a_captured_training_step():
    lens = begins(LENGTHS)
    inputs = [tokens(LENGTHS, h, 128).requires_grad_() for h in (HEADS, KV_HEADS, KV_HEADS)]
    dout = normal(sum(LENGTHS), HEADS, 128)

    def step():
        return torch.autograd.grad(
            torch_fdattn.varlen_attention(*inputs, lens, causal=True)[0], inputs, dout
        )

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(5):
        for x in found:
            x.zero_()
        graph.replay()
        assert all(map(torch.equal, found[1:], expected[1:]))
        torch.testing.assert_close(found[0], expected[0], rtol=2e-2, atol=1e-3)


def test_launches_of_mixed_lengths():
    """They do not hang, and the last of each is right: lengths change in place, of the same launch."""
    drawn = [(0, 0, 1), (700, 3, 1), (64, 64, 64), (1, 0, 1000), (300, 300, 300), (0, 1300, 0)]
    for head_dim in (64, 128):
        q, k, v = (normal(1300, h, head_dim).requires_grad_() for h in (HEADS, KV_HEADS, KV_HEADS))
        lens = begins(drawn[0])
        dout = normal(1300, HEADS, head_dim)
        expected = {}
        for i in range(2000):
            own = drawn[i % len(drawn)]
            lens.copy_(begins(own))
            out = torch_fdattn.varlen_attention(q, k, v, lens, causal=True)
            found, made = gradients(out, dout, q, k, v)
            assert made == HERE
            if own not in expected:
                expected[own] = found
            elif i >= 2000 - len(drawn):
                assert all(map(torch.equal, found[1:], expected[own][1:]))
                torch.testing.assert_close(found[0], expected[own][0], rtol=2e-2, atol=1e-3)
