"""torch.export and AOTInductor: the ops stay whole, programs survive saving, compiled models run in this process."""

import pytest
import torch
from torch.export import Dim, export, load, save
from torch.fx.experimental.proxy_tensor import make_fx

import torch_fdattn
from torch_fdattn.testing import make_tensor


class Layer(torch.nn.Module):
    """Projections and attention, as a model has them."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)

    def forward(self, x, lens):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        out, lse = torch_fdattn.attention(q, k, v, lens, causal=True)
        decoded, _ = torch_fdattn.decode(q[:, :, -1:], k, v, lens)
        outs, lses = torch.stack([out, out]), torch.stack([lse, lse])
        return torch_fdattn.merge_states(outs, lses)[0] + decoded


class Packed(torch.nn.Module):
    def forward(self, q, k, v, lens):
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        ends = torch.cumsum(lens, 0, dtype=torch.int32)
        return torch_fdattn.varlen_attention(
            q, k, v, torch.nn.functional.pad(ends, (1, 0)), causal=True
        )


class Cached(torch.nn.Module):
    """A step over caches that the module holds: what it writes there is found there."""

    def __init__(self):
        super().__init__()
        for name in ("k", "v"):
            self.register_buffer(name, torch.zeros(2, 2, 12, 16))

    def forward(self, q, k, v, lens):
        q, k, v = (x[:, :, :1] for x in (q, k, v))
        torch_fdattn.append_kv(self.k, self.v, k, v, lens)
        return torch_fdattn.decode(q, self.k, self.v, lens + 1)


class Features(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.randn(4))

    def forward(self, q, k, v, lens):
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        seed = torch.tensor([1, 2], device=q.device)
        options = {"sinks": self.sinks, "attn_mask": visible, "softcap": 20.0}
        return torch_fdattn.attention(q, k, v, lens, dropout_p=0.5, dropout_seed=seed, **options)


class Paged(torch.nn.Module):
    def forward(self, q, k, v, lens):
        table = torch.arange(2, dtype=torch.int32, device=q.device)[:, None]
        return torch_fdattn.paged_decode(q[:, :, :1], k, v, table, lens)


def lens_of(*values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def layer_inputs(device, length=9):
    return torch.randn(2, length, 32, device=device), lens_of(length, 4, device=device)


def heads_inputs(device):
    shapes = (2, 4, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16)
    return *(make_tensor(shape, device=device) for shape in shapes), lens_of(3, 5, device=device)


#: The model, its inputs, its ops.
CASES = {
    "layer": (Layer, layer_inputs, {"attention", "decode", "merge_states"}),
    "packed": (Packed, heads_inputs, {"varlen_attention"}),
    "cached": (Cached, heads_inputs, {"append_kv", "decode"}),
    "features": (Features, heads_inputs, {"attention"}),
    "paged": (Paged, heads_inputs, {"paged_decode"}),
}


def names(graph):
    targets = (str(node.target) for node in graph.nodes if node.op == "call_function")
    return {name.split(".")[1] for name in targets if name.startswith("fdattn.")}


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_a_program_keeps_its_ops(name, strict, device, tmp_path):
    """Exported, decomposed to raw ops, and each of them saved and loaded: the same numbers."""
    make, inputs, ops = CASES[name]
    args = inputs(device)
    expected = make_like(make, device)(*args)
    program = export(make_like(make, device), args, strict=strict)
    assert names(program.graph) == ops
    lowered = program.run_decompositions()
    # (What writes then stands inside of another call.)
    assert names(lowered.graph) == {f"{op}_forward" for op in ops if op != "append_kv"}
    with torch.no_grad():  # decomposed to raw ops it is an inference graph
        for found in (program, lowered):
            save(found, tmp_path / "program.pt2")
            loaded = load(tmp_path / "program.pt2")
            for each in (found, loaded):
                torch.testing.assert_close(each.module()(*args), expected)


def make_like(make, device):
    torch.manual_seed(0)
    return make().to(device)


def test_a_program_of_any_length_trains(device):
    layer = Layer().to(device)
    shapes = {1: Dim("length", min=2, max=4096)}, None
    program = export(layer, layer_inputs(device), dynamic_shapes=shapes).module()
    inputs = layer_inputs(device, 40)
    grads = []
    for each in (program, layer):
        out = each(*inputs)
        grads.append(torch.autograd.grad(out.sin().sum(), list(each.parameters())))
    torch.testing.assert_close(program(*inputs), layer(*inputs))
    torch.testing.assert_close(*grads)


def test_what_raw_ops_cannot_says_so(device):
    """As the README has it."""
    args = layer_inputs(device)
    lowered = export(Layer().to(device), args).run_decompositions().module()
    with pytest.raises(NotImplementedError, match="raw op and not differentiable"):
        lowered(*args)


def test_make_fx_of_the_composite_alone(device):
    """With real autograd it traces down to the raw ops, with no leftover of the Function."""
    q = torch.randn(2, 4, 5, 16, device=device)
    graph = make_fx(lambda q: torch_fdattn.attention(q, q, q))(q).graph
    assert names(graph) == {"attention_forward"}


class All(torch.nn.Module):
    """All of the above in one: building takes most of the time."""

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleDict({name: make() for name, (make, *_) in CASES.items()})

    def forward(self, x, lens, *others):
        return [self.parts["layer"](x, lens)] + [
            self.parts[name](*others) for name in CASES if name != "layer"
        ]


@pytest.mark.slow
def test_aot_inductor(device, tmp_path):
    """Ahead of time, with any length, and loaded into this process; state is the compiled model's own."""
    if device != "cpu" and torch.__version__.startswith("2.11"):
        pytest.skip("torch 2.11 crashes while it loads an AOTInductor package on CUDA")
    shapes = {1: Dim("length", min=2, max=4096)}, None, (None,) * 4
    inputs = *layer_inputs(device), *heads_inputs(device)
    with torch.no_grad():
        program = export(make_like(All, device), inputs, dynamic_shapes=shapes)
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "m.pt2")
        )
        compiled, eager = torch._inductor.aoti_load_package(path), make_like(All, device)
        for length in (9, 40):
            inputs = *layer_inputs(device, length), *heads_inputs(device)
            torch.testing.assert_close(compiled(*inputs), eager(*inputs), rtol=1e-4, atol=1e-5)
