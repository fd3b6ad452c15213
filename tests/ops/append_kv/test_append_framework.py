"""What autograd, opcheck and inference mode must know of an op that writes."""

from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad
from torch.library import opcheck

from tests.ops.append_kv.calls import append, arguments, positional, raw
from torch_fdattn import checks
from torch_fdattn.dist import ShardedKVCache
from torch_fdattn.dist.kv_cache import sharded_cache
from torch_fdattn.ops.library import INTERPRET
from torch_fdattn.testing import make_tensor

PAGED = pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
WRITTEN = ("k_cache", "v_cache", "q")


#: (Layout of the new tokens, the cache's dtype).
KINDS = (
    ("bhsd", torch.float32),
    ("transposed", torch.bfloat16),
    ("slice", torch.float32),
    ("bhsd", torch.float8_e4m3fn),
    ("packed", torch.int8),
)
MORE_KINDS = (
    ("bshd", torch.float32),
    ("packed", torch.float16),
    ("every_other", torch.float32),
    ("bshd", torch.float8_e5m2),
)


@pytest.mark.parametrize(
    ("paged", "options", "layout", "cache_dtype"),
    [
        # Pages by turns: all of it in the slow ones.
        pytest.param(
            paged, options, *kind,
            marks=() if kind in KINDS and paged == ((i + (options is None)) % 2 == 1) else pytest.mark.slow,
        )
        for i, kind in enumerate((*KINDS, *MORE_KINDS))
        for options in ((), None)
        for paged in (False, True)
    ],
    ids=str,
)  # fmt: skip
def test_opcheck(paged, options, layout, cache_dtype, device):
    given = arguments(
        device, paged=paged, layout=layout, cache_dtype=cache_dtype, v_dim=24,
        **({} if options is None else {"options": options}),
    )  # fmt: skip
    checks = [
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    ]
    if cache_dtype.is_floating_point and cache_dtype.itemsize == 1:
        checks.remove("test_schema")  # torch's comparison multiplies, and has no product of float8
    opcheck(raw(paged), positional(given), test_utils=checks)


@PAGED
@pytest.mark.interpreter
def test_autograd_sees_the_write(paged, device):
    given = arguments(device, paged=paged)
    versions = {name: given[name]._version for name in given}
    append(given)
    for name, version in versions.items():
        assert (given[name]._version > version) == (name in WRITTEN), name


@PAGED
def test_a_cache_saved_for_backward_and_then_written_to_is_an_error(paged, device):
    given = arguments(device, paged=paged)
    weight = torch.randn(16, device=device, requires_grad=True)
    loss = (given["k_cache"] * weight).sum()
    append(given)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_view_shares_its_bases_version(device):
    """A layer of a model's whole cache: the write is one to the whole."""
    given = arguments(device)
    whole = torch.zeros(3, *given["k_cache"].shape, device=device)
    version = whole._version
    append(given | {"k_cache": whole[1]})
    assert whole._version > version


@PAGED
def test_inference_mode(paged, device):
    """Tensors of both kinds: those made outside still count their versions."""
    outside = arguments(device, paged=paged)
    versions = {name: outside[name]._version for name in WRITTEN}
    with torch.inference_mode():
        inside = {name: x.clone() for name, x in outside.items()}
        append(inside | {"v_cache": outside["v_cache"].clone()})
        append(outside)
    for name in WRITTEN:
        assert outside[name]._version > versions[name]
    for name in ("k_cache", "q"):
        assert torch.equal(inside[name], outside[name])


@PAGED
@pytest.mark.parametrize("name", ["k_cache", "v_cache", "k", "v", "q", "cos", "sin"])
def test_refuses_gradients(paged, name, device):
    given = arguments(device, paged=paged)
    given[name].requires_grad_()
    op = "paged_append_kv" if paged else "append_kv"
    with pytest.raises(
        NotImplementedError,
        match=f"fdattn.{op} writes into its arguments and is not differentiable",
    ):
        append(given)
    with torch.no_grad():
        append(given)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_refuses_gradients_of_scales(name, device):
    given = arguments(device, cache_dtype=torch.int8)
    given[name].requires_grad_()
    with pytest.raises(NotImplementedError, match="writes into its arguments"):
        append(given)


@PAGED
def test_refuses_forward_mode(paged, device):
    given = arguments(device, paged=paged)
    with forward_ad.dual_level():
        append(given)
        given["k"] = forward_ad.make_dual(given["k"], torch.ones_like(given["k"]))
        with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
            append(given)


@pytest.mark.interpreter
@pytest.mark.parametrize("sizes", [(0, 2, 3), (2, 2, 0)], ids=["no sequence", "no token"])
def test_nothing_to_write(sizes, device):
    batch, heads, tokens = sizes
    cache = torch.ones(batch, heads, 8, 16, device=device)
    new = make_tensor((batch, heads, tokens, 16), device=device)
    lens = torch.zeros(batch, dtype=torch.int32, device=device)
    append(dict(k_cache=cache, v_cache=cache.clone(), k=new, v=new, kv_lens=lens))
    assert (cache == 1).all()


@pytest.mark.interpreter
def test_a_cache_without_room_still_turns_q(device):
    given = arguments(device, options=("q", "cos", "sin"))
    expected = arguments(device, options=("q", "cos", "sin"))["q"].copy_(given["q"])
    empty = given["k_cache"][:, :, :0]
    append(given | {"q": expected, "k_cache": given["k_cache"].clone()})
    append(given | {"k_cache": empty, "v_cache": empty.clone()})
    assert torch.equal(given["q"], expected)


@PAGED
@pytest.mark.interpreter
def test_a_cache_made_in_inference_mode_is_written_to_outside(paged, device):
    with torch.inference_mode():
        given = arguments(device, paged=paged)
    expected = {name: x.clone() for name, x in given.items()}
    append(expected)
    append(given)
    for name in WRITTEN:
        assert torch.equal(given[name], expected[name])


@pytest.mark.skipif(INTERPRET, reason="the interpreter runs the kernels")
def test_a_caches_own_writes_are_append_kvs(monkeypatch):
    """On a CPU they go past it in inference mode, but where its values are to be checked."""
    sizes = dict(batch=2, num_layers=1, kv_heads=2, capacity=32, head_dim=16)
    k, v = torch.randn(2, 2, 2, 3, 16)
    asked = mock.Mock(wraps=sharded_cache.append_kv)
    monkeypatch.setattr(sharded_cache, "append_kv", asked)
    found = []
    for made_in, written_in, checked, calls in (
        (torch.no_grad, torch.no_grad, False, 1), (torch.inference_mode, torch.no_grad, False, 1),
        (torch.inference_mode, torch.inference_mode, True, 1),
        (torch.inference_mode, torch.inference_mode, False, 0),
    ):  # fmt: skip
        monkeypatch.setattr(checks, "CHECK_VALUES", checked)
        asked.reset_mock()
        with made_in():
            cache = ShardedKVCache(**sizes, dtype=torch.float32, device="cpu")
        with written_in():
            cache.append(0, k, v)
        assert asked.call_count == calls
        found.append([x.clone() for x in cache.layer(0)])
    for each in found[1:]:
        assert all(map(torch.equal, each, found[0]))
    assert torch.equal(found[0][0][:, :, :3], k)
