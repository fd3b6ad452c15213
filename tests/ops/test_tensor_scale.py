"""A scale that is a 0-dim tensor is the number it holds when the call is made."""

import pytest
import torch

import torch_fdattn
from tests.ops.decode.inputs import in_pages, int32
from torch_fdattn.testing import make_tensor


def calls(device):
    q = make_tensor((2, 4, 3, 32), device=device)
    k, v = (make_tensor((2, 2, 48, 32), device=device) for _ in range(2))
    (k_pages, table), (v_pages, _) = in_pages(k, 16), in_pages(v, 16)
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    begins = int32(0, 3, 6, device=device), int32(0, 48, 96, device=device)
    yield "attention", lambda **options: torch_fdattn.attention(q, k, v, **options)
    yield (
        "varlen_attention",
        lambda **options: torch_fdattn.varlen_attention(*packed, *begins, **options),
    )
    yield "decode", lambda **options: torch_fdattn.decode(q, k, v, **options)
    yield (
        "paged_decode",
        lambda **options: torch_fdattn.paged_decode(q, k_pages, v_pages, table, **options),
    )


NAMES = [name for name, _ in calls("cpu")]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str
)
@pytest.mark.parametrize("name", NAMES)
def test_it_is_read_at_each_call(name, dtype, device):
    call = dict(calls(device))[name]
    scale = torch.tensor(0.5 if dtype.is_floating_point else 1, dtype=dtype, device=device)
    for _ in range(3):  # the later ones could be known calls
        found, wanted = call(scale=scale), call(scale=float(scale))
        assert all(map(torch.equal, found, wanted))
        scale *= 2


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_would_be_lost(name, device):
    call = dict(calls(device))[name]
    scale = torch.tensor(0.5, requires_grad=True, device=device)
    with pytest.raises(TypeError, match="scale has no gradient and must not require one"):
        call(scale=scale)
    with torch.no_grad():
        call(scale=scale)


INSIDE_OF_A_GRAPH = "scale must be a number inside of a graph, got a 0-dim tensor: give float\\(scale\\), taken outside of it"


@pytest.mark.parametrize("backend", ["eager", "fdattn"])
@pytest.mark.parametrize("name", NAMES)
def test_one_graph_cannot_read_it(name, backend):
    """An error that names it and the remedy; one that the graph makes of a number is that number."""
    call = dict(calls("cpu"))[name]
    options = {"lower": "eager"} if backend == "fdattn" else None
    compiled = torch.compile(call, backend=backend, fullgraph=True, options=options)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=INSIDE_OF_A_GRAPH):
        compiled(scale=torch.tensor(0.5))
    assert torch.equal(compiled(scale=float(torch.tensor(0.5)))[0], call(scale=0.5)[0])
    made = torch.compile(
        lambda: call(scale=torch.tensor(0.5)), backend=backend, fullgraph=True, options=options
    )
    assert torch.equal(made()[0], call(scale=0.5)[0])


@pytest.mark.parametrize("name", NAMES)
def test_it_is_read_between_two_graphs(name):
    call = dict(calls("cpu"))[name]
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager")
    for scale in (0.5, 0.25):
        found, right = compiled(scale=torch.tensor(scale)), call(scale=scale)
        assert all(map(torch.equal, found, right))


class Attention(torch.nn.Module):
    def forward(self, q, scale):
        return torch_fdattn.attention(q, q, q, scale=scale)[0]


def test_an_exported_program_cannot_read_it():
    q, scale = torch.randn(1, 1, 16, 16), torch.tensor(0.5)
    with pytest.raises(TypeError, match=INSIDE_OF_A_GRAPH):
        torch.export.export(Attention(), (q, scale), strict=False)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=INSIDE_OF_A_GRAPH):
        torch.export.export(Attention(), (q, scale), strict=True)
