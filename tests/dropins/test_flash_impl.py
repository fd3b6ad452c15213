"""FDATTN among torch's flash attention implementations.

These ops have no CPU kernels, so on the CPU ours are put there, over a stand-in for torch's own, and the
dispatcher, autograd and Inductor do the rest. tests/dropins/test_flash_impl_gpu.py has the CUDA key.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import torch_fdattn
from tests.dropins.flash_ops import FLASH, FLASH_BACKWARD, OPS, SDPA, SDPA_BACKWARD, close
from torch_fdattn.dropins import flash_impl
from torch_fdattn.ops.library import launches

registry = torch.nn.attention


def qkv(queries=24, keys=24, heads=(4, 2), dim=32, dtype=torch.float16, batch=2, grad=False):
    shapes = [
        (batch, h, n, dim) for h, n in zip((*heads, heads[1]), (queries, keys, keys), strict=True)
    ]
    return [torch.randn(shape, dtype=dtype).requires_grad_(grad) for shape in shapes]


def expected(q, k, v, **options):
    return F.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), enable_gqa=True, **options
    )


def test_importing_registers_and_does_not_activate():
    assert "FDATTN" in registry.list_flash_attention_impls()
    assert registry.current_flash_attention_impl() is None


def test_the_modules_are_loaded_by_their_names():
    dropins = torch_fdattn.dropins
    assert dropins.__getattr__("flash_impl") is flash_impl
    assert dropins.__getattr__("transformers").NAME == "fdattn"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = dropins.nothing


def kernels(key="CUDA"):
    found = []
    for name in OPS:
        there = torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
        found.append(str(torch.library.get_kernel(name, key)) if there else None)
    return found


def test_activating_takes_the_cuda_kernels_and_restoring_gives_them_back():
    before = kernels()
    assert not any("flash_impl" in (x or "") for x in before)
    registry.activate_flash_attention_impl("FDATTN")
    try:
        assert registry.current_flash_attention_impl() == "FDATTN"
        assert all("flash_impl.py" in x for x in kernels())
        registry.activate_flash_attention_impl("FDATTN")  # again: over torch's own, not over ours
        assert all("flash_impl.py" in x for x in kernels())
    finally:
        registry.restore_flash_attention_impl()
    assert registry.current_flash_attention_impl() is None
    assert kernels() == before


def test_a_torch_without_such_names_is_left_alone(monkeypatch):
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    assert torch_fdattn.dropins.register_flash_impl() is False


def test_hip_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(NotImplementedError, match="FDATTN needs a CUDA build of torch"):
        flash_impl.activate("CPU")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("causal", "scale", "sizes"),
    [
        (True, None, {}),
        (False, 0.3, {"queries": 5, "keys": 40}),
        (False, None, {"queries": 40, "keys": 5, "heads": (6, 2), "dim": 16}),
        (True, 0.2, {"heads": (3, 3), "dim": 72}),
    ],
)
def test_forward_and_backward_are_ours_and_right(causal, scale, sizes, dtype, active):
    inputs = qkv(**sizes, dtype=dtype, grad=True)
    out, lse, cum_q, cum_k, max_q, max_k, rng, unused, debug = SDPA(
        *inputs, 0.0, causal, scale=scale
    )
    assert (cum_q, cum_k, max_q, max_k) == (None, None, inputs[0].shape[2], inputs[1].shape[2])
    assert (rng.shape, rng.dtype, unused.shape) == ((2,), torch.uint64, ())
    assert (debug.numel(), debug.dtype) == (0, dtype)
    want = expected(*inputs, is_causal=causal, scale=scale)
    slack = 8 if dtype == torch.bfloat16 else 1
    assert (out - want).abs().max() < 4e-3 * slack
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, grad)
    wanted = torch.autograd.grad(want, inputs, grad.float())
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() < 1e-2 * slack * b.abs().max().clamp(min=1)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
    scores = (
        inputs[0].float()
        @ inputs[1].float().repeat_interleave(inputs[0].shape[1] // inputs[1].shape[1], 1).mT
        * (scale or inputs[0].shape[-1] ** -0.5)
    )
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-2, atol=1e-2)
    assert (lse.dtype, lse.is_contiguous()) == (torch.float32, True)
    assert not active
    assert launches["attention_forward/cpu"] == launches["attention_backward/cpu"] == 1


def layouts():
    """(B, H, S, D) of memory in another order, in slices of larger tensors, and broadcast."""
    bshd = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv()]
    slices = [torch.randn(2, 4, 40, 64, dtype=torch.float16)[:, ::2, 8:32, 16:48] for _ in range(3)]
    broadcast = [x[:1].expand(2, -1, -1, -1) for x in qkv()]
    return [bshd, slices, broadcast]


@pytest.mark.parametrize("which", range(3))
def test_strides_are_those_that_compiled_graphs_are_promised(which, active):
    inputs = [x.detach().requires_grad_() for x in layouts()[which]]
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = SDPA(*inputs, 0.0, True)
        fakes = SDPA_BACKWARD(fake[0], *inputs, *fake[:6], 0.0, True, *fake[6:8])
    found = SDPA(*inputs, 0.0, True)
    founds = SDPA_BACKWARD(torch.ones_like(found[0]), *inputs, *found[:6], 0.0, True, *found[6:8])
    tensors = [(found[i], fake[i]) for i in (0, 1, 6, 7, 8)] + list(zip(founds, fakes, strict=True))
    for a, b in tensors:
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    close(found[0], expected(*inputs, is_causal=True))
    assert not active


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_torch_compile(backend, active):
    def step(q, k, v):
        return SDPA(q, k, v, 0.0, True, scale=0.3)[0].transpose(1, 2).flatten(2)

    inputs = qkv(grad=True)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    found, want = compiled(*inputs), step(*inputs)
    close(found, want)
    for a, b in zip(
        torch.autograd.grad(found.sum(), inputs),
        torch.autograd.grad(want.sum(), inputs),
        strict=True,
    ):
        close(a, b)
    assert not active
    assert launches["attention_forward/cpu"] == 2


def sdpa_cases():
    """A code of UNSUPPORTED_REASONS, and a call of SDPA's op that it names."""
    q, k, v = qkv()
    yield "dropout", (q, k, v, 0.5, True), {}
    yield "debug-mask", (q, k, v, 0.0, True, True), {}
    yield "dtype", [x.float() for x in (q, k, v)], {}
    yield "dtype", (q, k, v.bfloat16()), {}
    yield "rank", [x[0] for x in (q, k, v)], {}
    yield "empty", (q[:, :, :0], k, v), {}
    yield "empty", (q, k[:, :, :0], v[:, :, :0]), {}
    yield "head-dim", [x[..., :8] for x in (q, k, v)], {}
    yield "head-dim", [x[..., :20] for x in (q, k, v)], {}
    yield "head-dim", (q, k, v[..., :16]), {}
    yield "head-dim", qkv(dim=264), {}
    yield "shape", qkv(heads=(3, 2)), {}
    yield "shape", (q, k, v[:, :, :5]), {}
    yield "shape", (q[:1], k, v), {}
    yield "scale", (q, k, v), {"scale": -1.0}
    yield "scale", (q, k, v), {"scale": 0.0}
    yield "scale", (q, k, v), {"scale": math.nan}
    yield "causal-lengths", (*qkv(queries=5), 0.0, True), {}
    long = torch.empty(1, dtype=torch.float16).expand(1, 1, 2**29, 16)
    yield "length", (long, long, long), {}
    yield "device", (q, k.to("meta"), v), {}


def varlen_cases():
    x = torch.randn(24, 4, 32, dtype=torch.float16)
    cu = torch.tensor([0, 9, 24], dtype=torch.int32)
    plain = (x, x, x, cu, cu, 15, 15, 0.0, True, False)

    def other(**places):
        names = ("q", "k", "v", "cu_q", "cu_k", "max_q", "max_k", "dropout", "causal", "debug")
        return tuple(places.get(name, y) for name, y in zip(names, plain, strict=True))

    yield "dropout", other(dropout=0.5), {}
    yield "debug-mask", other(debug=True), {}
    yield "alibi", plain, {"alibi_slopes": torch.ones(4)}
    yield "cu-seqlens", other(cu_q=cu.long()), {}
    yield "cu-seqlens", other(cu_k=None), {}
    yield "cu-seqlens", other(cu_q=None), {}
    yield "cu-seqlens", other(cu_k=cu[:2]), {}
    yield "cu-seqlens", plain, {"seqused_k": torch.tensor([9, 15])}
    yield "rank", other(q=x[None]), {}
    yield "head-dim", other(v=x[..., :16]), {}
    if "block_table" in str(FLASH.default._schema):
        yield "split", plain, {"num_splits": 2}
    dense = [y.transpose(1, 2) for y in qkv(queries=5)]
    yield "causal-lengths", (*dense, None, None, 5, 24, 0.0, True, False), {}
    yield "rank", (x, x, x, None, None, 24, 24, 0.0, False, False), {}


CASES = [(SDPA, *case) for case in sdpa_cases()] + [(FLASH, *case) for case in varlen_cases()]


@pytest.mark.parametrize(
    ("op", "code", "args", "options"), CASES, ids=[f"{c[0].__name__}-{c[1]}" for c in CASES]
)
def test_what_ours_does_not_do_goes_to_torchs_own(op, code, args, options, active):
    kernel = flash_impl._KERNELS[op.default._schema.name.removeprefix("aten::")]
    assert kernel(*args, **options) == code
    if any(x.device.type == "meta" or x.numel() > 2**28 for x in args[:3]):
        return  # no kernel is asked, or none could answer
    found = op(*args, **options)
    assert (found[0] == 7).all()
    assert flash_impl.fallbacks == {code: 1}
    assert active == {op.default._schema.name: 1}
    assert not launches


def test_every_reason_is_tried():
    """Those of pages and of a given out by test_flash_pages.py."""
    assert {case[1] for case in CASES} | {"lse", "out", "paged", "split"} == set(
        flash_impl.UNSUPPORTED_REASONS
    )


def test_backwards_that_ours_does_not_do(active):
    """Above all those of dropout, whose forward was torch's."""
    q, k, v = qkv(grad=True)
    out = SDPA(q, k, v, 0.5, True)[0]
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all((x == 7).all() for x in grads)
    assert flash_impl.fallbacks == {"dropout": 2}
    o, lse = torch.ones_like(q), torch.zeros(q.shape[:-1])
    seeds = torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64)
    with torch.no_grad():
        SDPA_BACKWARD(o, q, k, v, o, lse[..., None], None, None, 24, 24, 0.0, True, *seeds)
        cu = torch.tensor([0, 24, 48], dtype=torch.int32)
        packed = [x.transpose(1, 2).flatten(0, 1) for x in (o, q, k, v, o)]
        wrong = torch.zeros(2, 4, 24)  # as flash had it once, by sequence
        FLASH_BACKWARD(*packed, wrong, cu, cu, 24, 24, 0.0, True, *seeds)
    assert flash_impl.fallbacks == {"dropout": 2, "lse": 2}
    assert active == {
        SDPA.default._schema.name: 1,
        SDPA_BACKWARD.default._schema.name: 2,
        FLASH_BACKWARD.default._schema.name: 1,
    }


def test_without_a_kernel_to_fall_back_to():
    handle = flash_impl.activate("CPU")
    try:
        with pytest.raises(
            NotImplementedError, match=r"leaves this call to torch \(dropout: .*no CPU kernel"
        ):
            SDPA(*qkv(), 0.5)
    finally:
        handle.remove()
    assert kernels("CPU") == [None] * len(OPS)  # while the handle is still held


def attend_each(q, k, v, cu_q, cu_k, lens, **options):
    """Bottom-right attention of each sequence, by `torch_fdattn.attention`, which has tests of its own."""
    outs, lses = [], []
    for b in range(len(cu_q) - 1):
        queries, end = (
            slice(cu_q[b], cu_q[b + 1]),
            cu_k[b + 1] if lens is None else cu_k[b] + lens[b],
        )
        keys = slice(cu_k[b], end)
        parts = (x[part].transpose(0, 1)[None] for x, part in ((q, queries), (k, keys), (v, keys)))
        out, lse = torch_fdattn.attention(*parts, **options)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.parametrize(
    ("causal", "window", "lens"),
    [
        (True, (None, None), None),
        (False, (-1, -1), None),
        (False, (3, 2), None),
        (True, (4, -1), (7, 11)),
    ],
)
def test_packed_sequences(causal, window, lens, active):
    """Also a sequence of more queries than keys, some of whose rows see none: flash's lse is +inf there."""
    cu_q, cu_k = ((torch.tensor(x, dtype=torch.int32)) for x in ((0, 9, 24), (0, 13, 24)))
    q, k, v = (torch.randn(24, h, 32, dtype=torch.float16).requires_grad_() for h in (4, 2, 2))
    options = {"scale": 0.3, "window_size_left": window[0], "window_size_right": window[1]}
    where = cu_q, cu_k, 15, 13
    used = {} if lens is None else {"seqused_k": torch.tensor(lens, dtype=torch.int32)}
    out, lse, rng, unused, debug = FLASH(q, k, v, *where, 0.0, causal, False, **options, **used)
    assert (rng.shape, unused.shape, debug.numel()) == ((2,), (), 0)
    sides = tuple(-1 if x is None else x for x in window)
    want, want_lse = attend_each(
        q, k, v, cu_q.tolist(), cu_k.tolist(), lens, causal=causal, window=sides, scale=0.3
    )
    close(out, want)
    no_keys = want_lse == -math.inf
    assert no_keys.any() == (causal or sides != (-1, -1))
    torch.testing.assert_close(lse, want_lse.masked_fill(no_keys, math.inf), rtol=1e-3, atol=1e-3)
    if lens is None:
        grad = torch.randn_like(out)
        found = torch.autograd.grad(out, (q, k, v), grad)
        for a, b in zip(found, torch.autograd.grad(want, (q, k, v), grad), strict=True):
            close(a, b)
        assert launches["varlen_attention_backward/cpu"] == 1
    assert not active


def test_dense_flash(active):
    """(B, S, H, D), as `_flash_attention_forward` takes tensors without cum_seq_q."""
    q, k, v = (x.transpose(1, 2).contiguous().requires_grad_() for x in qkv())
    out, lse, *_ = FLASH(q, k, v, None, None, 24, 24, 0.0, True, False, window_size_left=6)
    by_head = [x.transpose(1, 2) for x in (q, k, v)]
    want, want_lse = torch_fdattn.attention(*by_head, causal=True, window=(6, 0))
    close(out, want.transpose(1, 2))
    assert torch.equal(lse, want_lse)
    assert out.stride() == torch.empty_like(q).stride()
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), grad)
    for a, b in zip(found, torch.autograd.grad(want.transpose(1, 2), (q, k, v), grad), strict=True):
        close(a, b)
    assert not active
