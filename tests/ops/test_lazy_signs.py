"""Tensors with a lazy minus sign, whose memory holds the opposite: every argument of every op, written ones too."""

import pytest
import torch

import torch_fdattn
from tests.ops.append_kv.calls import append, arguments
from torch_fdattn.testing import make_tensor

pytestmark = pytest.mark.interpreter


def negative(x):
    """x by value, -x in memory."""
    view = torch._neg_view(-x)
    assert view.is_neg()
    return view


def int32(*values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def same(found, expected):
    return all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def decode_call(paged, device):
    q = make_tensor((2, 4, 1, 32), device=device)
    k, v = ((make_tensor((10, 2, 8, 32), device=device) * 30).to(torch.int8) for _ in "kv")
    given = dict(q=q, k_cache=k, v_cache=v)
    if paged:
        given["page_table"] = torch.randperm(10, device=device).int().view(2, 5)
    else:
        given |= {
            x: given[x].view(2, 5, 2, 8, 32).transpose(1, 2).flatten(2, 3)
            for x in ("k_cache", "v_cache")
        }
    return given | dict(
        kv_lens=int32(30, 7, device=device), q_start=int32(12, 5, device=device),
        kv_start=int32(1, 2, device=device), k_scale=torch.rand(2, 1, device=device),
        v_scale=torch.rand(2, 1, device=device), alibi_slopes=torch.rand(4, device=device),
        sinks=torch.rand(4, device=device),
    )  # fmt: skip


@pytest.mark.parametrize(
    "entry", ["python", *(pytest.param(x, marks=pytest.mark.slow) for x in ("op", "out"))]
)
@pytest.mark.parametrize("paged", [False, True])
def test_decode(paged, entry, device):
    """Warm, so that a plan of equal metadata is there."""
    given = decode_call(paged, device)
    op_name = "paged_decode" if paged else "decode"
    call = getattr(torch_fdattn if entry != "op" else torch.ops.fdattn, op_name)
    options = {}
    if entry == "out":
        options["out"] = torch.empty_like(given["q"]), torch.empty(2, 4, 1, device=device)
    expected = [x.clone() for x in call(**given, **options)]
    for name, x in given.items():
        assert same(call(**given | {name: negative(x)}, **options), expected), name


@pytest.mark.parametrize("name", ["out", "lse", "workspace"])
def test_what_decode_writes_to(name, device):
    given = decode_call(False, device)
    expected = torch_fdattn.decode(**given)
    out = dict(out=torch.empty_like(expected[0]), lse=torch.empty_like(expected[1]))
    workspace = torch_fdattn.decode_workspace(*(given[x] for x in ("q", "k_cache", "v_cache")))
    out["workspace"] = workspace
    out[name] = negative(out[name])
    torch_fdattn.decode(**given, out=(out["out"], out["lse"]), workspace=out["workspace"])
    assert same((out["out"], out["lse"]), expected)


def test_attention(device):
    q, k, v = (make_tensor((2, 1, n, 32), device=device) for n in (5, 24, 24))
    given = dict(
        q=q, k=k, v=v, kv_lens=int32(18, 24, device=device), q_start=int32(12, 20, device=device),
        kv_start=int32(1, 2, device=device), dout=torch.randn_like(q), dlse=torch.randn_like(q[..., 0]),
    )  # fmt: skip

    def results(given):
        given = dict(given)
        gradients = [given.pop(x) for x in ("dout", "dlse")]
        inputs = [given[x].detach().requires_grad_() for x in "qkv"]
        state = torch_fdattn.attention(**given | dict(zip("qkv", inputs, strict=True)), causal=True)
        return *state, *torch.autograd.grad(state, inputs, gradients)

    expected = results(given)
    for name, x in given.items():
        assert same(results(given | {name: negative(x)}), expected), name


def test_merge_states(device):
    given = dict(
        outs=torch.randn(3, 2, 4, 5, 16, device=device), lses=torch.randn(3, 2, 4, 5, device=device)
    )
    expected = torch_fdattn.merge_states(**given)
    for name, x in given.items():
        assert same(torch_fdattn.merge_states(**given | {name: negative(x)}), expected), name


@pytest.mark.parametrize("options", [None, ()], ids=["all options", "none"])
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_append(paged, options, device):
    chosen = {} if options is None else {"options": options}
    before = arguments(device, paged=paged, **chosen)
    expected = {name: x.clone() for name, x in before.items()}
    append(expected)
    for name in before:
        found = {x: y.clone() for x, y in before.items()}
        found[name] = negative(found[name])
        append(found)
        for written in {"k_cache", "v_cache", "q"} & set(before):
            assert torch.equal(found[written], expected[written]), (name, written)
