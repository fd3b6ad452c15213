"""Decode as an op: modes, subclasses, opcheck, autocast, and gradients that there are not."""

import pytest
import torch
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import torch_fdattn
from tests.ops.decode.inputs import OPS, caches, in_pages, int32
from torch_fdattn.ops import library
from torch_fdattn.testing import make_tensor


def test_sinks_that_only_the_dispatcher_understands(device):
    """A subclass has no memory of its own that a kernel could read."""

    class Seen(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            called.append(str(func))
            return NotImplemented

    called = []
    q, k, v, lens = caches(device)
    sinks = torch.Tensor._make_wrapper_subclass(Seen, (6,), device=device)
    with pytest.raises(TypeError):
        torch_fdattn.decode(q, k, v, lens, sinks=sinks)
    assert called == ["fdattn.decode_forward.default"]


def test_batch_invariance_with_gradients(device):
    q, k, v, lens = caches(device, lens=(1500, 40), capacity=1536)
    expected = torch_fdattn.decode(q, k, v, lens, batch_invariant=True)[0]
    found = torch_fdattn.decode(q.requires_grad_(), k, v, lens, batch_invariant=True)[0]
    assert torch.equal(found, expected)
    found.sum().backward()
    assert q.grad is not None


def test_tensors_that_only_the_dispatcher_understands(device):
    q, k, v, lens = caches(device)
    negative = torch.complex(q, -q).conj().imag
    assert negative.is_neg()
    for x, y in zip(
        torch_fdattn.decode(negative, k, v, lens), torch_fdattn.decode(q, k, v, lens), strict=True
    ):
        torch.testing.assert_close(x, y)
    out, lse = torch_fdattn.decode(*(x.to("meta") for x in (q, k, v, lens)))
    assert (out.shape, lse.shape, out.device.type) == (q.shape, q.shape[:3], "meta")


def test_modes_and_subclasses_see_the_op(device):
    q, k, v, lens = caches(device)
    assert library.can_call_kernel(q, k, v)
    with FlopCounterMode(display=False) as counter:
        assert not library.can_call_kernel(q, k, v)
        torch_fdattn.decode(q, k, v, lens)
    assert counter.get_total_flops() == 4 * 4 * 6 * 160 * 32
    assert not library.can_call_kernel(torch.nn.Parameter(q), k, v)
    seen = []
    torch.func.vmap(lambda x: (seen.append(library.can_call_kernel(x)), x)[1])(q)
    assert seen == [False]
    with torch.inference_mode():
        assert library.can_call_kernel(q, k, v)


@pytest.mark.parametrize(
    ("op", "layout", "given"),
    [
        ("decode_forward", "bhsd", True),
        ("decode_forward", "transposed", False),
        pytest.param("decode_forward", "slice", True, marks=pytest.mark.slow),
        ("paged_decode_forward", "bshd", False),
        ("paged_decode_forward", "slice", True),
        pytest.param("decode_out", "bhsd", False, marks=pytest.mark.slow),
        ("decode_out", "bshd", True),
        pytest.param("paged_decode_out", "bhsd", True, marks=pytest.mark.slow),
        ("paged_decode_out", "transposed", False),
    ],
)
def test_opcheck(op, layout, given, device):
    q = make_tensor((2, 4, 3, 16), layout, device=device)
    k, v = (make_tensor((2, 2, 16, dim), layout, device=device) for dim in (16, 24))
    inputs = (q, k, v)
    scale = None
    if given:
        inputs = (q, *((x * 40).to(torch.int8) for x in (k, v)))  # opcheck compares, float8 cannot
        scale = torch.rand(2, 1, device=device)
    lens = int32(13, 3, device=device)
    if op.startswith("paged"):
        inputs += (int32(1, 0, device=device)[:, None],)
    arguments = [*inputs, lens if given else None, None, None, 4 if given else -1, 0, 0, 0, 0.25]
    extras = [
        scale,
        scale,
        2.0,
        torch.rand(4, device=device),
        torch.rand(2 * 2, device=device),
        True,
    ]
    options = {}
    if op.endswith("out"):
        options = dict(
            out=torch.empty(2, 4, 3, 24, device=device), lse=torch.empty(2, 4, 3, device=device)
        )
    else:
        arguments.append(torch.float32 if given else None)
    opcheck(getattr(OPS, op), tuple(arguments + extras * given), options)


def test_autocast_leaves_quantised_caches_alone(device):
    q, k, v, lens = caches(device)
    k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    with torch.autocast(device, dtype=torch.float16):
        out, _ = torch_fdattn.decode(q, k, v, lens)
    assert out.dtype == torch.float16
    expected, _ = torch_fdattn.decode(q.half(), k, v, lens)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_backward_is_refused_where_there_is_none(name, device):
    """And no forward: a model's inputs require gradients outside of no_grad."""
    q, k, v, lens = caches(device)
    options = {name: torch.tensor(1.0, device=device)}
    k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    expected = torch_fdattn.decode(q, k, v, lens, **options)
    out, lse = torch_fdattn.decode(q.requires_grad_(), k, v, lens, **options)
    assert torch.equal(out, expected[0])
    for result in (out, lse):
        with pytest.raises(
            NotImplementedError, match=f"decode has no gradient with {name}, a quantised"
        ):
            result.sum().backward(retain_graph=True)


def test_pages_have_no_gradient(device):
    q, k, v, lens = caches(device)
    (k, table), (v, _) = in_pages(k, 16), in_pages(v, 16)
    expected, _ = torch_fdattn.paged_decode(q, k, v, table, lens)
    out, _ = torch_fdattn.paged_decode(q.requires_grad_(), k, v, table, lens)
    assert torch.equal(out, expected)
    with pytest.raises(NotImplementedError, match="paged_decode has no gradient over pages"):
        out.sum().backward()
