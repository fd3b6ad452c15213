"""What modifies scores, crossed: drawn cases against the fp64 oracle, gradients of parameters included."""

import dataclasses
import re

import numpy as np
import pytest
import torch

import torch_fdattn
from torch_fdattn.ops.attention import op as attention_op
from torch_fdattn.ops.library import INTERPRET
from torch_fdattn.testing import (
    assert_launched,
    attention_oracle,
    check_lse,
    draw_features,
    drawn_seeds,
    expected_attention,
    expected_path,
    gradients,
    make_tensor,
)

BOTH = pytest.mark.parametrize("op", [torch_fdattn.attention, torch_fdattn.decode])


def run(op, case, device):
    """(lse, other results by name) of a call and its backward."""
    inputs = [x.requires_grad_() for x in case.inputs(device)]
    given = {n: x.requires_grad_(x.is_floating_point()) for n, x in case.parameters(device).items()}
    out, lse = op(*inputs, **case.options(device), **given)
    parameters = {n: x for n, x in given.items() if x.requires_grad}
    leaves = [*inputs, *parameters.values()]
    found = torch.autograd.grad([out, lse], leaves, case.output_gradients(device))
    names = ("dq", "dk", "dv", *(f"d{name}" for name in parameters))
    return lse, {"out": out, **dict(zip(names, found, strict=True))}


@pytest.mark.interpreter
@pytest.mark.parametrize("seed", drawn_seeds(64, "FDATTN_DRAWN"))
def test_drawn(seed, device, record_drawn):
    case = draw_features(seed, device)
    record_drawn("attention's features", case.features())
    paths = [
        expected_path(f"attention_{way}", device, case.dtype) for way in ("forward", "backward")
    ]
    with assert_launched(*paths):
        lse, results = run(torch_fdattn.attention, case, device)
    expected_attention(case, device).check(lse, **results)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(x, marks=[] if x < 3 else pytest.mark.slow)
        for x in drawn_seeds(16, "FDATTN_DRAWN")
    ],
)
def test_drawn_decode_gradients(seed, device, record_drawn):
    case = draw_features(seed, device, decode=True)
    record_drawn("decode's features with gradients", case.features())
    paths = [
        expected_path(path, device, case.dtype) for path in ("decode_forward", "attention_backward")
    ]
    with assert_launched(*paths):
        lse, results = run(torch_fdattn.decode, case, device)
    expected_attention(case, device).check(lse, **results)


@pytest.mark.interpreter
def test_fewer_value_dims_than_keys_with_gaps_have(device):
    """A draw of GPU size that an H100 got wrong (`tests/compile_only/test_uniform_registers.py`)."""
    case = draw_features(127, "cuda", decode=True)
    if INTERPRET:
        case = dataclasses.replace(case, dtype=torch.float16)
    assert "every_other" in case.layouts
    assert 2 * case.v_dim < case.head_dim
    lse, results = run(torch_fdattn.decode, case, device)
    expected_attention(case, device).check(lse, **results)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("op", "way"),
    [
        pytest.param(torch_fdattn.attention, "backward", marks=pytest.mark.slow),
        (torch_fdattn.decode, "torch.func.vjp"),
    ],
)
def test_few_queries_keep_the_unrounded_output(op, way, device):
    """A head sees one key beside a sink: dP - D cancels to a fifteenth there, and an fp16 out costs it 3 % of dq."""
    case = dataclasses.replace(draw_features(752, decode=True), dtype=torch.float16)
    lse, results = (run if way == "backward" else vjp)(op, case, device)
    expected_attention(case, device).check(lse, **results)


def vjp(op, case, device):
    """As `run`, by torch.func."""
    inputs, given = case.inputs(device), case.parameters(device)
    parameters = {n: x for n, x in given.items() if x.is_floating_point()}
    options = case.options(device) | {n: x for n, x in given.items() if n not in parameters}

    def call(q, k, v, *values):
        return op(q, k, v, **options, **dict(zip(parameters, values, strict=True)))

    (out, lse), pull = torch.func.vjp(call, *inputs, *parameters.values())
    names = ("dq", "dk", "dv", *(f"d{name}" for name in parameters))
    found = pull(tuple(case.output_gradients(device)))
    return lse, {"out": out, **dict(zip(names, found, strict=True))}


@pytest.mark.interpreter
def test_slopes_gradient_does_not_carry_the_rounding_of_the_saved_lse(device):
    """A row's part is linear in its weights, all of which are too large or too small by what the lse was rounded."""
    q, k, v = (x.detach() for x in qkv(device, kv_len=64, dtype=torch.float32))
    slopes = parameters(device)["alibi_slopes"]
    options = None, None, None, -1, -1, 0, 0, 32**-0.5
    rest = 0.0, slopes, None, None
    out, lse = torch.ops.fdattn.attention_forward(q, k, v, *options, torch.float32, *rest)
    dout = make_tensor(out.shape, dtype=torch.float32, device=device)

    # Each row's part of the gradient, in fp64.
    query, key, value, wide = (x.double() for x in (q, k, v, dout))
    group = q.shape[1] // k.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    ends = torch.arange(q.shape[2], device=device)[:, None] + k.shape[2] - q.shape[2]
    away = (torch.arange(k.shape[2], device=device) - ends).abs().double()
    scores = query @ key.mT * 32**-0.5 - slopes.double()[:, None, None] * away
    weights, slope = scores.softmax(-1), wide @ value.mT
    parts = -(weights * (slope - (weights * slope).sum(-1, keepdim=True)) * away).sum(-1)

    # An lse that is rounded by three units in the last place, to the worst side.
    ulp = torch.nextafter(lse, torch.full_like(lse, torch.inf)) - lse
    shift = 3 * ulp * parts.sign().float()
    found = [
        torch.ops.fdattn.attention_backward_all(
            dout, None, q, k, v, out, saved, True, False, False, *options, None, *rest
        )[3]
        for saved in (lse, lse + shift)
    ]
    carried = (parts.abs() * 3 * ulp).sum((0, 2))
    assert ((found[1] - found[0]).abs() <= 0.5 * carried).all()  # 1.0 where it is carried


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_shards_of_keys_have_their_own_part_of_slopes_gradients(dtype, device):
    """Of the lse of all keys, which the weights of a shard do not add up to."""
    q, k, v = (x.detach() for x in qkv(device, kv_len=64, dtype=dtype))
    slopes = parameters(device)["alibi_slopes"].requires_grad_()
    out, lse = torch_fdattn.attention(q, k, v, alibi_slopes=slopes)
    dout = make_tensor(out.shape, dtype=dtype, device=device)
    (whole,) = torch.autograd.grad(out, slopes, dout)
    # So few queries keep their unrounded output, and shards are to have the same.
    out, lse = torch.ops.fdattn.attention_forward(
        q, k, v, None, None, None, -1, -1, 0, 0, 32**-0.5, torch.float32, 0.0, slopes.detach(), None, None
    )  # fmt: skip
    start, found = torch.full((2,), 59, dtype=torch.int32, device=device), 0
    for first in (0, 32):
        shard, where = slice(first, first + 32), torch.full_like(start, first)
        found += torch.ops.fdattn.attention_backward_all(
            dout, None, q, k[:, :, shard], v[:, :, shard], out.detach(), lse.detach(), True, False, False,
            None, start, where, -1, -1, 0, 0, 32**-0.5, None, 0.0, slopes.detach(), None, None,
        )[3]  # fmt: skip
    torch.testing.assert_close(found, whole, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("seed", range(40))
def test_fp64_agrees_with_the_oracle(seed):
    case = dataclasses.replace(draw_features(seed), dtype=torch.float64)
    lse, results = run(torch_fdattn.attention, case, "cpu")
    expected_attention(case, "cpu").check(lse, **results)


def parameters(device="cpu", dtype=torch.float32):
    return dict(
        alibi_slopes=torch.tensor([0.1, -0.2, 0.3, 0.0], device=device, dtype=dtype),
        sinks=torch.tensor([0.5, -1.0, 0.0, 2.0], device=device, dtype=dtype),
    )


def qkv(device, *, q_len=5, kv_len=37, head_dim=32, v_dim=24, dtype=torch.float32):
    shapes = (2, 4, q_len, head_dim), (2, 2, kv_len, head_dim), (2, 2, kv_len, v_dim)
    return [make_tensor(shape, dtype=dtype, device=device).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(
    "op", [torch_fdattn.attention, pytest.param(torch_fdattn.decode, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "name", ["all", *(pytest.param(x, marks=pytest.mark.slow) for x in ("softcap", "alibi_slopes", "sinks"))]
)  # fmt: skip
def test_gradcheck(op, name):
    q, k, v = qkv("cpu", q_len=2, kv_len=5, head_dim=16, v_dim=24, dtype=torch.float64)
    given = {n: x for n, x in parameters(dtype=torch.float64).items() if name in (n, "all")}
    softcap = 2.0 if name in ("softcap", "all") else 0.0
    leaves = [x.requires_grad_() for x in given.values()]

    def call(q, k, v, *values):
        return op(q, k, v, causal=True, softcap=softcap, **dict(zip(given, values, strict=True)))

    assert torch.autograd.gradcheck(call, (q, k, v, *leaves), fast_mode=True)


@pytest.mark.interpreter
@BOTH
def test_rows_that_see_nothing_but_their_sink(op, device):
    """out 0 and lse the sink; the sink's gradient there is lse's own, and nothing else has one."""
    q, k, v = qkv(device)
    start = torch.tensor([-3, -9], dtype=torch.int32, device=device)
    given = {name: x.requires_grad_() for name, x in parameters(device).items()}
    out, lse = op(q, k, v, causal=True, q_start=start, **given)
    assert (out[1] == 0).all()
    torch.testing.assert_close(lse[1], given["sinks"][:, None].expand(4, 5))
    dlse = torch.zeros_like(lse)
    dlse[1] = 1.0
    found = torch.autograd.grad(
        (out, lse), (q, k, v, *given.values()), (torch.zeros_like(out), dlse)
    )
    *others, dsinks = found
    torch.testing.assert_close(dsinks, torch.full_like(dsinks, 5.0))
    assert all((x == 0).all() for x in others)


@pytest.mark.interpreter
@BOTH
def test_sinks_of_no_weight(op, device):
    q, k, v = qkv(device)
    nothing = torch.full((4,), float("-inf"), device=device, requires_grad=True)
    lens = torch.tensor([0, 37], dtype=torch.int32, device=device)
    found, expected = op(q, k, v, lens, sinks=nothing), op(q, k, v, lens)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    (dsinks,) = torch.autograd.grad(found[0].sum() + found[1][1].sum(), nothing)
    assert (dsinks == 0).all()


@pytest.mark.interpreter
@BOTH
def test_a_cap_far_exceeded(op, device):
    """Scores of 1e4: tanh is 1, its slope 0, and nothing is NaN."""
    q, k, v = qkv(device)
    out, lse = op(q, k, v, scale=1e4, softcap=3.0)
    dq, dk, dv = torch.autograd.grad(
        (out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse))
    )
    double = [x.detach().double().requires_grad_() for x in (q, k, v)]
    options = dict(causal=op is torch_fdattn.decode, scale=1e4, softcap=3.0)
    exact = attention_oracle(*double, **options)
    check_lse(lse.detach(), exact[1].detach(), torch.float32)
    ones = [torch.ones_like(x) for x in exact]
    for a, b in zip((dq, dk, dv), gradients(exact, double, ones), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=2e-3)


@pytest.mark.interpreter
@BOTH
def test_garbage_beyond_the_lengths(op, device):
    q, k, v = (x.detach() for x in qkv(device))
    lens = torch.tensor([11, 30], dtype=torch.int32, device=device)
    results = []
    for garbage in (0.0, float("nan")):
        for x in (k, v):
            x[0, :, 11:], x[1, :, 30:] = garbage, garbage
        leaves = [x.clone().requires_grad_() for x in (q, k, v, *parameters(device).values())]
        named = dict(zip(parameters(), leaves[3:], strict=True))
        outputs = op(*leaves[:3], lens, softcap=4.0, **named)
        results.append(
            (*outputs, *torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), leaves))
        )
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("head_dim", "v_dim", "dtype"),
    [
        pytest.param(*dims, dtype, marks=() if i == turn else pytest.mark.slow)
        for i, dims in enumerate([(512, 512), (264, 16), (16, 264), (320, 128)])
        for turn, dtype in enumerate([torch.float16, torch.float32])
    ],
    ids=str,
)
def test_head_dims_above_256(head_dim, v_dim, dtype, device):
    case = dataclasses.replace(
        draw_features(0, device), q_len=21, kv_len=37, head_dim=head_dim, v_dim=v_dim, dtype=dtype, batch=1,
        heads=4, kv_heads=2, causal=True, kv_lens=None, q_start=None, kv_start=None, window=None, kv_block=0,
        kv_stride=0, scale=None, mask="",
    )  # fmt: skip
    lse, results = run(torch_fdattn.attention, case, device)
    expected_attention(case, device).check(lse, **results)


@pytest.mark.parametrize(
    "numbers",
    [
        dict(kv_block=np.int64(2), kv_stride=np.int32(4), scale=np.float32(0.5), softcap=np.float64(2)),
        dict(kv_block=np.array(2), kv_stride=np.array(4), scale=np.array(0.5), softcap=np.array(2.0)),
        dict(kv_block=True, kv_stride=True, scale=True, softcap=True),
    ],
    ids=["scalars", "arrays", "bools"],
)  # fmt: skip
def test_kernels_are_given_pythons_numbers(numbers, device, monkeypatch):
    """Triton's launcher refuses NumPy's."""
    given, attend = [], attention_op.attend_eagerly

    def noted(key, q, k, v, options):
        given.extend((*options.mask[3:], options.scale, options.scores.softcap))
        return attend(key, q, k, v, options)

    monkeypatch.setattr(attention_op, "attend_eagerly", noted)
    q = torch.randn(1, 2, 5, 16, device=device)
    torch_fdattn.attention(q, q, q, window=(np.int64(3), np.int8(0)), causal=np.bool_(False),
        q_start=torch.zeros(1, dtype=torch.int32, device=device), **numbers)  # fmt: skip
    assert [type(x) for x in given] == [int, int, int, int, float, float]


@pytest.mark.interpreter
def test_strided_parameters(device):
    """Columns of a table and expanded scalars are read by their strides."""
    q, k, v = qkv(device)
    table = torch.randn(4, 3, device=device) * 0.1
    one = torch.tensor(0.3, device=device).expand(2, 4)
    for given in (
        dict(alibi_slopes=table[:, 1], sinks=table[:, 2]), dict(alibi_slopes=table.expand(2, 4, 3)[..., 0]),
        dict(alibi_slopes=one, sinks=one[0]),
    ):  # fmt: skip
        dense = {name: x.clone() for name, x in given.items()}
        pairs = zip(*(torch_fdattn.attention(q, k, v, **x) for x in (given, dense)), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@BOTH
def test_only_a_parameter_has_a_gradient(op, device):
    """The others' gradients are not returned, and parameters keep their dtypes."""
    q, k, v = (x.detach() for x in qkv(device))
    given = {name: x.half() for name, x in parameters(device).items()}
    given["sinks"].requires_grad_()
    out, lse = op(q, k, v, **given)
    (out.sum() + lse.sum()).backward()
    assert given["sinks"].grad.dtype == torch.float16
    assert given["alibi_slopes"].grad is None
    assert q.grad is None


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_training_step(backend, device):
    torch._dynamo.reset()
    leaves = [*qkv(device), *(x.requires_grad_() for x in parameters(device).values())]
    leaves.append(torch.randn(4, 1, 37, device=device, requires_grad=True))

    def step(q, k, v, slopes, sinks, bias):
        out, lse = torch_fdattn.attention(
            q, k, v, causal=True, softcap=3.0, alibi_slopes=slopes, sinks=sinks, attn_mask=bias
        )
        return out.square().sum() + lse.sum()

    eager = torch.autograd.grad(step(*leaves), leaves)
    compiled = torch.compile(step, backend=backend, fullgraph=True)(*leaves)
    for a, b in zip(torch.autograd.grad(compiled, leaves), eager, strict=True):
        torch.testing.assert_close(a, b)
        assert a.stride() == b.stride()


WRONG = {
    "negative softcap": (dict(softcap=-1.0), ValueError, "softcap must be positive, or 0 for none, got -1.0"),
    "softcap NaN": (dict(softcap=float("nan")), ValueError, "softcap must be positive"),
    "softcap that is 0 in fp32": (dict(softcap=1e-50), ValueError, "softcap must be positive, or 0 for none, got 1e-50"),
    "softcap a string": (dict(softcap="2"), TypeError, "softcap must be a number"),
    "slopes of other heads": (dict(alibi_slopes=torch.ones(5)), ValueError, "alibi_slopes must have shape (4,) like q's heads, got (5,)"),
    "slopes of other batch": (dict(alibi_slopes=torch.ones(3, 4)), ValueError, "alibi_slopes must have shape (2, 4)"),
    "integer slopes": (dict(alibi_slopes=torch.ones(4).int()), TypeError, "alibi_slopes must be bfloat16"),
    "slopes elsewhere": (dict(alibi_slopes=torch.ones(4, device="meta")), ValueError, "alibi_slopes must be on cpu like q, got meta"),
    "slopes a list": (dict(alibi_slopes=[0.1] * 4), TypeError, "alibi_slopes must be a torch.Tensor, got list"),
    "slopes without positions": (dict(alibi_slopes=torch.ones(4), kv_block=4, kv_stride=8), ValueError, "q_start must be given when kv_block is"),
    "sinks of other heads": (dict(sinks=torch.ones(2)), ValueError, "sinks must have shape (4,) like q's heads, got (2,)"),
    "integer sinks": (dict(sinks=torch.ones(4).int()), TypeError, "sinks must be bfloat16"),
    "mask of other keys": (dict(attn_mask=torch.ones(5, 36)), ValueError, "attn_mask must be broadcastable to (2, 4, 5, 37) (batch, heads, queries, keys), got shape (5, 36)"),
    "mask of rank 5": (dict(attn_mask=torch.ones(1, 1, 1, 5, 37)), ValueError, "attn_mask must be broadcastable to (2, 4, 5, 37)"),
    "mask of KV heads": (dict(attn_mask=torch.ones(2, 2, 5, 37)), ValueError, "got shape (2, 2, 5, 37)"),
    "integer mask": (dict(attn_mask=torch.ones(5, 37).long()), TypeError, "attn_mask must be boolean, or bfloat16, float16, float32 (or float64 on CPU), got torch.int64"),
    "mask elsewhere": (dict(attn_mask=torch.ones(5, 37, device="meta")), ValueError, "attn_mask must be on cpu like q, got meta"),
    "mask a list": (dict(attn_mask=[True] * 37), TypeError, "attn_mask must be a torch.Tensor, got list"),
    "value head dim": (dict(v=torch.ones(2, 2, 37, 520)), ValueError, "v's head_dim must be from 1 to 512, got 520"),
    "head dim": (dict(q=torch.ones(2, 4, 5, 520)), ValueError, "q's head_dim must be from 1 to 512, got 520"),
    "fewer values": (dict(v=torch.ones(2, 2, 36, 24)), ValueError, "v must have shape (2, 2, 37, 24) like k, got (2, 2, 36, 24)"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    changed, kind, message = WRONG[name]
    call = dict(zip("qkv", qkv("cpu"), strict=True)) | changed
    with pytest.raises(kind, match=re.escape(message)):
        torch_fdattn.attention(**call)
