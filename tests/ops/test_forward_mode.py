"""Forward-mode AD: tangents under the error rule, by finite differences, and in torch.func's transforms."""

import dataclasses
import re

import pytest
import torch
from torch.autograd import forward_ad
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import torch_fdattn
from torch_fdattn.ops.attention import reference
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import NO_SCORES
from torch_fdattn.testing import (
    attention_oracle,
    check_close,
    draw_features,
    draw_varlen,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:There is a performance drop"
)  # vmap of our ops is a loop
SEED = torch.tensor([3, 4])


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def tangents_of(leaves, seed=0):
    """NaN where the leaves are: what nobody may read of a tensor, nobody may read of its tangent."""
    generator = torch.Generator().manual_seed(seed)
    found = (torch.randn(x.shape, generator=generator).to(x) for x in leaves)
    return tuple(t.masked_fill(x.isnan(), float("nan")) for t, x in zip(found, leaves, strict=True))


def unexpanded(case):
    """torch makes no dual of a tensor whose elements share memory."""
    layouts = tuple("bshd" if x == "expanded" else x for x in case.layouts)
    return dataclasses.replace(case, layouts=layouts)


def check_tangents(case, leaves, ours, oracle):
    """Both functions' tangents of (out, lse) at `leaves`; what has no lse has a tangent of 0."""
    tangents = tangents_of(leaves, case.seed)
    (_, lse), found = torch.func.jvp(ours, leaves, tangents)

    def exactly(dtype):
        given = [tuple(x.to(dtype) for x in xs) for xs in (leaves, tangents)]
        return [x.double() for x in torch.func.jvp(oracle, *given)[1]]

    exact, torchs = exactly(torch.float64), exactly(case.dtype)
    assert (found[1][lse == float("-inf")] == 0).all()
    for name, x, wanted, at_dtype in zip(("out", "lse"), found, exact, torchs, strict=True):
        if name == "lse":
            x, wanted, at_dtype = (y[..., None] for y in (x, wanted, at_dtype))
        check_close(name, x, wanted, [at_dtype - wanted], case.dtype, case.error_factor)


@pytest.mark.parametrize(
    "seed", [pytest.param(x, marks=pytest.mark.slow if x >= 20 else []) for x in range(200)]
)
def test_drawn_attention(seed, record_drawn):
    case = unexpanded(draw_features(seed))
    if seed % 2 or case.dtype == torch.float32:  # of fp32 torch's error is a lottery: `errors.py`
        case = dataclasses.replace(case, dtype=torch.float64)
    record_drawn("attention, tangents", case.features())
    given = case.parameters("cpu")
    named = {name: x for name, x in given.items() if x.is_floating_point()}
    if case.dtype == torch.float64:
        named = {name: x.double() for name, x in named.items()}
    leaves = (*case.inputs("cpu"), *named.values())

    def call(op, options):
        return lambda q, k, v, *rest: op(
            q, k, v, **options, **(given | dict(zip(named, rest, strict=True)))
        )

    ours = call(torch_fdattn.attention, case.options("cpu"))
    check_tangents(case, leaves, ours, call(attention_oracle, case.oracle_options()))


@pytest.mark.parametrize(
    "seed", [pytest.param(x, marks=pytest.mark.slow if x >= 8 else []) for x in range(80)]
)
def test_drawn_varlen_attention(seed, record_drawn):
    case = dataclasses.replace(unexpanded(draw_varlen(seed)), page=0, dtype=torch.float64)
    record_drawn("varlen_attention, tangents", case.features())
    given = case.parameters("cpu")
    named = [name for name, x in given.items() if x.is_floating_point()]
    leaves = (*case.inputs("cpu"), *(given[name] for name in named))

    def ours(q, k, v, *rest):
        options = case.options("cpu") | given | dict(zip(named, rest, strict=True))
        out, lse = torch_fdattn.varlen_attention(q, k, v, *case.cu_seqlens("cpu"), **options)
        return out.transpose(0, 1), lse

    def oracle(q, k, v, *rest):
        return case.oracle(q, k, v, given | dict(zip(named, rest, strict=True)), "textbook")

    check_tangents(case, leaves, ours, oracle)


def qkv(dtype=torch.float64):
    shapes = (2, 4, 3, 16), (2, 2, 5, 16), (2, 2, 5, 24)
    return [torch.randn(x, dtype=dtype) for x in shapes]


def packed(x):
    return x.transpose(1, 2).flatten(0, 1)


def merged(q, k, v):
    outs = torch.stack([q, k.repeat_interleave(2, 1)[:, :, :3]])
    return torch_fdattn.merge_states(outs, outs[..., 0])


OPS = {
    "attention": lambda q, k, v: torch_fdattn.attention(q, k, v, causal=True),
    "decode": lambda q, k, v: torch_fdattn.decode(q, k, v, int32(5, 3)),
    "varlen_attention": lambda q, k, v: torch_fdattn.varlen_attention(
        *map(packed, (q, k, v)), int32(0, 1, 6), int32(0, 3, 10), causal=True
    ),
    "merge_states": merged,
}
EVERY = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


@EVERY
def test_gradcheck(op):
    """By finite differences, with tangents for one input at a time and for several, in batches too."""
    inputs = [x.requires_grad_() for x in qkv()]
    assert torch.autograd.gradcheck(
        op, inputs, check_forward_ad=True, check_backward_ad=False, fast_mode=True,
        check_undefined_grad=False, check_batched_forward_grad=True,
    )  # fmt: skip


def test_gradcheck_of_everything_that_has_a_gradient():
    slopes = torch.rand(2, 4, dtype=torch.float64) * 0.1
    sinks, bias = torch.randn(4, dtype=torch.float64), torch.randn(4, 1, 5, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (*qkv(), slopes, sinks, bias)]

    def call(q, k, v, slopes, sinks, bias):
        return torch_fdattn.attention(
            q, k, v, causal=True, softcap=2.0, alibi_slopes=slopes, sinks=sinks, attn_mask=bias,
            dropout_p=0.3, dropout_seed=SEED,
        )  # fmt: skip

    assert torch.autograd.gradcheck(
        call, inputs, check_forward_ad=True, check_backward_ad=False, fast_mode=True
    )


@EVERY
def test_torch_func(op):
    """Both modes give one Jacobian, and vmap the results one by one."""
    q, k, v = qkv()

    def call(weights):
        out, lse = op(*(x * w for x, w in zip((q, k, v), weights, strict=True)))
        return torch.cat([out.flatten()[::60], lse.flatten()[::5]])

    ones = torch.ones(3, dtype=torch.float64)
    forward = torch.func.jacfwd(call)(ones)
    torch.testing.assert_close(forward, torch.func.jacrev(call)(ones))
    assert forward.abs().max() > 0.01
    found = torch.func.vmap(lambda q: op(q, k, v))(torch.stack([q, 2 * q]))
    for x, *each in zip(found, op(q, k, v), op(2 * q, k, v), strict=True):
        torch.testing.assert_close(x, torch.stack(each))
    # Of an autograd.Function torch knows no way, so there must be none where nothing is derived.
    functional = torch.func.functionalize(op)(q, k, v)
    torch.testing.assert_close(functional, tuple(op(q, k, v)))


@pytest.mark.parametrize("name", ["attention", "varlen_attention"])
def test_vmap_draws_dropout_as_its_randomness_says(name):
    """One seed for all, one for each, or refused, whether or not q is what is mapped over."""
    q, k, v = map(packed, qkv()) if name == "varlen_attention" else qkv()
    where = (int32(0, 1, 6), int32(0, 3, 10)) if name == "varlen_attention" else ()
    op = getattr(torch_fdattn, name)

    def of_q(q):
        return op(q, k, v, *where, dropout_p=0.5)[0]

    def of_mask(mask):
        return op(q, k, v, *where, attn_mask=mask, dropout_p=0.5)[0]

    for call, inputs in ((of_q, torch.stack([q, q])), (of_mask, torch.zeros(2, 1, 1).double())):
        for randomness, same in (("same", True), ("different", False)):
            first, second = torch.func.vmap(call, randomness=randomness)(inputs)
            assert torch.equal(first, second) is same
        with pytest.raises(RuntimeError, match="randomness"):
            torch.func.vmap(call)(inputs)

    def scaled(weights):
        return of_q(q * weights).flatten()[::50]

    torch.manual_seed(1)
    forward = torch.func.jacfwd(scaled, randomness="same")(torch.ones(16).double())
    torch.manual_seed(1)
    torch.testing.assert_close(forward, torch.func.jacrev(scaled)(torch.ones(16).double()))


@EVERY
def test_the_primal_has_its_gradient_beside_a_tangent(op):
    """A tangent that is detached is a number in a loss (as of MeanFlow, say), and the loss has its gradient."""
    q, k, v = qkv()
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)

    def loss(jvp):
        (out, lse), tangents = jvp(lambda x: op(x * weight, k, v), (q,), (torch.ones_like(q),))
        return sum((x * y.detach()).sum() for x, y in zip((out, lse), tangents, strict=True))

    def by_hand(f, primals, tangents):
        eps = 1e-6
        ends = [f(primals[0] + x * tangents[0]) for x in (eps, -eps)]
        return f(*primals), [(x - y) / (2 * eps) for x, y in zip(*ends, strict=True)]

    found, expected = (torch.autograd.grad(loss(x), weight)[0] for x in (torch.func.jvp, by_hand))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    "way", ["grad of jvp", "jvp of grad", "jvp of jvp", "grad of grad", "duals"]
)
def test_second_derivatives_are_errors(name, way):
    q, k, v = qkv()
    op = OPS[name]
    ones = torch.ones_like(q)

    def total(x):
        return sum(x.sin().sum() for x in op(x, k, v))

    def tangent(x):
        return torch.func.jvp(total, (x,), (ones,))[1]

    def duals(x):
        with forward_ad.dual_level():
            y = total(forward_ad.make_dual(x.requires_grad_(), ones))
            torch.autograd.grad(forward_ad.unpack_dual(y).tangent, x)

    ways = {
        "grad of jvp": torch.func.grad(tangent),
        "jvp of grad": lambda x: torch.func.jvp(torch.func.grad(total), (x,), (ones,)),
        "jvp of jvp": lambda x: torch.func.jvp(tangent, (x,), (ones,)),
        "grad of grad": torch.func.grad(lambda x: torch.func.grad(total)(x).sum()),
        "duals": duals,
    }
    named = "attention" if name == "decode" else name
    with pytest.raises(NotImplementedError, match=f"fdattn.{named} has no second derivative"):
        ways[way](q)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["attention", "decode", "varlen_attention"])
def test_tangents_beside_the_kernels(name, device):
    """The kernels' lse is all that the tangents need."""
    inputs = [x.to(device) for x in qkv(torch.float32)]
    tangents = tangents_of(inputs)
    begins = [x.to(device) for x in (int32(0, 1, 6), int32(0, 3, 10))]

    def call(*x):
        if name == "varlen_attention":
            return torch_fdattn.varlen_attention(*map(packed, x), *begins, causal=True)
        return getattr(torch_fdattn, name)(*x, causal=True)

    (out, lse), found = torch.func.jvp(call, tuple(inputs), tangents)
    torch.testing.assert_close((out, lse), call(*inputs))
    begins = [x.cpu() for x in begins]
    exactly = [tuple(x.double().cpu() for x in xs) for xs in (inputs, tangents)]
    for x, exact in zip(found, torch.func.jvp(call, *exactly)[1], strict=True):
        torch.testing.assert_close(x.double().cpu(), exact, rtol=1e-4, atol=1e-5)


def test_one_tangent_alone_and_dtypes():
    """bf16 in and out, a tangent of v only: lse has none, and out's is attention over it."""
    q, k, v = qkv(torch.bfloat16)
    dv = torch.randn_like(v)
    (out, _), (dout, dlse) = torch.func.jvp(lambda v: torch_fdattn.attention(q, k, v), (v,), (dv,))
    assert dout.dtype == out.dtype == torch.bfloat16
    assert dlse.dtype == torch.float32
    assert not dlse.any()
    torch.testing.assert_close(dout, torch_fdattn.attention(q, k, dv)[0], rtol=2e-2, atol=2e-2)


def test_autocast():
    q, k, v = (x.float() for x in qkv())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, tangent = torch.func.jvp(lambda q: torch_fdattn.attention(q, k, v)[0], (q,), (q,))
    assert (out.dtype, tangent.dtype) == (torch.bfloat16, torch.bfloat16)
    exact = torch.func.jvp(lambda q: torch_fdattn.attention(q, k, v)[0], (q,), (q,))
    torch.testing.assert_close((out.float(), tangent.float()), exact, rtol=5e-2, atol=5e-2)


def test_compiled():
    q, k, v = qkv()

    def step(q, t):
        return torch.func.jvp(lambda x: torch_fdattn.attention(x, k, v, causal=True), (q,), (t,))

    found = torch.compile(step, backend="aot_eager", fullgraph=True)(q, torch.ones_like(q))
    torch.testing.assert_close(found, step(q, torch.ones_like(q)))


class Sizes(TorchDispatchMode):
    """The most elements that a result of any operation has."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for x in results if isinstance(results, (tuple, list)) else [results]:
            if (
                isinstance(x, torch.Tensor)
                and "view" not in str(func)
                and "expand" not in str(func)
            ):
                self.most = max(self.most, x.numel())
        return results


@pytest.mark.parametrize("window", [None, (100, 0)])
def test_memory_is_linear_in_the_length(window, monkeypatch):
    """Blocks of 16 rows where that many scores fill the room; their number changes no result."""
    q, k, v = (torch.randn(1, 1, 600, 16) for _ in range(3))
    lse = torch_fdattn.attention(q, k, v, causal=True, window=window)[1]
    positions = Mask(window_left=-1 if window is None else 100, window_right=0)
    found = []
    for room in (2**30, 600 * 100, 1):
        monkeypatch.setattr(reference, "TANGENT_SCORES", room)
        with Sizes() as sizes:
            found.append(
                reference.attention_tangent_reference(
                    q, k, v, lse, q, k, v, NO_SCORES, positions, 0.25
                )
            )
        assert sizes.most <= 600 * min(max(room // 600, 16), reference.QUERY_BLOCK)
    for x in found[1:]:
        torch.testing.assert_close(x, found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["attention", "varlen_attention", "merge_states"])
def test_opcheck(name, device):
    ops = torch.ops.fdattn
    q, k, v = (x.float().to(device).transpose(1, 2).contiguous().transpose(1, 2) for x in qkv())
    mask = (None, None, None, -1, 0, 0, 0, 0.25)
    slopes = torch.rand(4, device=device)
    options = 2.0, slopes, None, None, 0.0, None
    if name == "merge_states":
        outs, lses = torch.randn(2, *q.shape, device=device), torch.randn(2, 2, 4, 3, device=device)
        opcheck(
            ops.merge_states_tangent, (outs, lses, lses.logsumexp(0), outs, None, torch.float32)
        )
        return
    tangents = q, None, v, slopes, None, None
    if name == "attention":
        _, lse = ops.attention_forward(q, k, v, *mask, None, *options)
        opcheck(ops.attention_tangent, (q, k, v, lse, *tangents, *mask, *options))
        return
    q, k, v = map(packed, (q, k, v))
    tangents = q, None, v, slopes, None, None
    begins = [x.to(device) for x in (int32(0, 1, 6), int32(0, 3, 10))]
    _, lse = ops.varlen_attention_forward(q, k, v, *begins, None, *mask, None, *options)
    opcheck(ops.varlen_attention_tangent, (q, k, v, lse, *begins, *tangents, *mask, *options))


def test_raw_tangents_check_their_inputs():
    q, k, v = qkv()
    mask = (None, None, None, -1, 0, 0, 0, 0.25)
    lse = torch.zeros(2, 4, 3).double()
    for tangents, message in (
        ((k, None, None, None, None, None), "q_tangent must have shape (2, 4, 3, 16) like q, got (2, 2, 5, 16)"),
        ((q.float(), None, None, None, None, None), "q_tangent must have dtype torch.float64 like q, got torch.float32"),
        ((None, None, None, None, q, None), "sinks_tangent must be None where sinks is, got a tensor"),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            torch.ops.fdattn.attention_tangent(q, k, v, lse, *tangents, *mask)
    with pytest.raises(ValueError, match=re.escape("lse must have shape (2, 4, 3) like q")):
        torch.ops.fdattn.attention_tangent(q, k, v, lse[:, :2], q, *[None] * 5, *mask)


def test_quantised_caches_and_pages_have_no_tangent():
    q, k, v = qkv(torch.float32)
    cache = k.to(torch.int8)
    with pytest.raises(
        NotImplementedError, match=r"^decode has no forward-mode derivative with a quantised"
    ):
        torch.func.jvp(lambda q: torch_fdattn.decode(q, cache, cache)[0], (q,), (q,))
    table = int32(0, 1)[:, None]
    with pytest.raises(
        NotImplementedError, match=r"^paged_decode has no forward-mode derivative over pages"
    ):
        torch.func.jvp(lambda q: torch_fdattn.paged_decode(q, k, v, table)[0], (q,), (q,))
