"""The inference form of models: merged products, SwiGLU in them, a residual's addition with the norm behind it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from tests.engine.tiny import random_model
from torch_fdattn.dist.tensor_parallel.fused_inference import add_norm, swiglu_linear
from torch_fdattn.models.inference import FusedAttention, FusedMLP
from torch_fdattn.models.transformer import MLP
from torch_fdattn.ops import inference_linear, rotary_kernel, swiglu, swiglu_kernel
from torch_fdattn.ops.library import INTERPRET, launches
from torch_fdattn.ops.merged_linear import can_merge, merge_linears

pytestmark = pytest.mark.interpreter
NORM, PRODUCT, FEW = "tensor_parallel/row_norm", "gemm/swiglu", "gemm/small_m_linear"


def draw(*shape: int, device, dtype=torch.float16) -> torch.Tensor:
    made = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=made).to(device, dtype)


def linear(columns: int, features: int, device, bias: bool = False, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    made = nn.Linear(features, columns, bias=bias).to(device, torch.float16)
    return made.requires_grad_(False)


def check(found: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor) -> None:
    """No farther from fp64 than twice what separate launches are."""
    bound = 2 * (expected.double() - exact).abs().max() + 2**-10 * exact.abs().max()
    assert found.shape == exact.shape
    assert (found.double() - exact).abs().max() <= bound


def products(monkeypatch) -> list[int]:
    """How many columns each `F.linear` from here on has."""
    columns, real = [], F.linear

    def counted(x, weight, bias=None):
        columns.append(len(weight))
        return real(x, weight, bias)

    monkeypatch.setattr(F, "linear", counted)
    return columns


class TestMergedLinears:
    @pytest.mark.parametrize("bias", [False, True])
    def test_one_product_of_all(self, device, monkeypatch, bias: bool) -> None:
        """Over the memory of the layers, which stay what they are."""
        linears = [linear(n, 32, device, bias, n).float() for n in (32, 16, 16)]
        x = draw(2, 3, 32, device=device, dtype=torch.float32)
        expected = [layer(x) for layer in linears]
        before = [(p, p.detach().clone()) for layer in linears for p in layer.parameters()]
        merged = merge_linears(*linears)
        after = [p for layer in linears for p in layer.parameters()]
        for parameter, (held, values) in zip(after, before, strict=True):
            assert parameter is held
            assert torch.equal(parameter, values)
        assert merged.weight.data_ptr() == linears[0].weight.data_ptr()
        columns = products(monkeypatch)
        found = merged(x)
        assert columns == [64]
        for y, other in zip(found, expected, strict=True):
            torch.testing.assert_close(y, other)
        linears[1].weight.zero_()
        assert not merged.weight[32:48].any()
        for layer, part in zip(linears, merged.linears(), strict=True):
            assert torch.equal(layer(x), part(x))
            assert part.weight.data_ptr() == layer.weight.data_ptr()
        assert merge_linears(*linears).weight.data_ptr() == merged.weight.data_ptr()  # not moved

    def test_what_is_not_merged(self, device) -> None:
        class Scaled(nn.Linear):
            pass

        plain = linear(4, 8, device)
        others = {
            "another type": Scaled(8, 4, device=device, dtype=torch.float16, bias=False),
            "no linear layer": nn.Identity(),
            "a bias": linear(4, 8, device, bias=True),
            "another input": linear(4, 7, device),
            "another dtype": linear(4, 8, device).float(),
            "another device": linear(4, 8, device).to("meta"),
            "a parametrization": nn.utils.parametrizations.weight_norm(linear(4, 8, device)),
        }
        for name, other in others.items():
            assert not can_merge((plain, other)), name
            with pytest.raises(ValueError, match=r"linears must be plain nn\.Linear of one input"):
                merge_linears(plain, other)
        shared = [linear(4, 8, "cpu").share_memory() for _ in range(2)]
        assert not can_merge(shared)  # processes would lose each other's writes
        assert can_merge((plain, linear(2, 8, device)))
        assert not can_merge((plain, linear(2, 8, device)), equal_sizes=True)

    def test_merged_in_inference_mode_and_trained(self, device) -> None:
        model = random_model(device)
        with torch.inference_mode():
            model.for_inference()
        model(torch.arange(4, device=device)[None]).sum().backward()
        assert all(p.grad is not None for p in model.layers[0].mlp.parameters())


@pytest.mark.parametrize(("bias", "better"), [(False, True), (False, False), (True, True)])
def test_swiglu_in_the_product(kernel_device, monkeypatch, bias: bool, better: bool) -> None:
    from torch_fdattn.ops.gemm import swiglu_gemm

    monkeypatch.setattr(swiglu, "is_better_in_product", lambda *_: better)
    gate, up = (linear(24, 32, kernel_device, bias, seed) for seed in range(2))
    merged = merge_linears(gate, up)
    x, before = draw(2, 3, 32, device=kernel_device), launches[PRODUCT]
    if not swiglu_gemm.fits(x.flatten(0, 1), merged.weight):
        pytest.skip("needs tensor descriptors")
    found = swiglu_linear(x, merged.weight, merged.bias)
    assert (launches[PRODUCT] > before) == (better and not bias)
    expected = F.silu(gate(x)) * up(x)
    wide = [F.linear(x.double(), m.weight.double(), m.bias.double() if bias else None) for m in (gate, up)]  # fmt: skip
    check(found, expected, F.silu(wide[0]) * wide[1])
    torch.testing.assert_close(swiglu_linear(x[0, 0], merged.weight, merged.bias), found[0, 0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 3, 48), (5, 130)])
def test_sum_and_norm_in_one_pass(kernel_device, dtype, shape) -> None:
    x, y = (draw(*shape, device=kernel_device, dtype=dtype) * scale for scale in (1, 2))
    norm = nn.RMSNorm(shape[-1], 1e-5).to(kernel_device, dtype).requires_grad_(False)
    norm.weight.copy_(draw(shape[-1], device=kernel_device))
    before = launches[NORM]
    added, normed = add_norm(y, x, norm)
    assert launches[NORM] == before + 1
    assert torch.equal(added, x + y)
    wide = F.rms_norm(added.double(), shape[-1:], norm.weight.double(), 1e-5)
    check(normed, norm(added), wide)


def test_where_it_takes_two(kernel_device) -> None:
    """Gradients, autocast, norms of another type or dtype or without an epsilon, sizes that the kernel does not take."""
    x, y = (draw(2, n, 48, device=kernel_device)[:, :2] for n in (2, 3))
    norm = nn.RMSNorm(48, 1e-5).to(kernel_device, torch.float16)
    before = launches[NORM]
    _, normed = add_norm(y, x, norm)
    normed.sum().backward()
    assert norm.weight.grad is not None
    with torch.no_grad():
        with torch.autocast(kernel_device, torch.bfloat16):
            add_norm(y, x, norm)
        add_norm(y, x, nn.RMSNorm(48, 1e-5, device=kernel_device))
        add_norm(y, x, nn.RMSNorm(48).to(kernel_device, torch.float16))
        add_norm(y[:1], x, norm)  # broadcasts
        add_norm(y[..., :47], x[..., :47], nn.RMSNorm(47, 1e-5).to(x))  # no whole words
        for other in (nn.Identity(), nn.LayerNorm(48).to(x)):
            added, normed = add_norm(y, x, other)
            assert torch.equal(normed, other(added))
        assert launches[NORM] == before
        add_norm(y, x, norm)
    assert launches[NORM] == before + 1


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_models_compute_the_same(kernel_device, monkeypatch, architecture: str) -> None:
    """In the launches that the form is for."""
    model = random_model(kernel_device, architecture).half().requires_grad_(False)
    tokens = torch.arange(12, device=kernel_device).view(2, 6)
    expected = model(tokens)
    fused = model.for_inference()
    calls = []
    for module in (rotary_kernel, swiglu_kernel):
        launch = module.launch
        monkeypatch.setattr(
            module, "launch", lambda *a, launch=launch, **k: calls.append(a[0]) or launch(*a, **k)
        )
    columns, before, blocks = products(monkeypatch), launches[NORM], len(model.layers)
    found = fused(tokens)
    assert columns[:-1] == [128, 32, 96, 32] * blocks  # q, k and v, o, gate and up, down
    assert launches[NORM] - before == 2 * blocks - 1  # the last block's is the model's
    assert len(calls) == 2 * blocks
    again = model(tokens)
    assert columns[4 * blocks + 1 : -1] == [64, 32, 32, 32, 48, 48, 32] * blocks
    assert torch.equal(again, expected)
    exact = copy.deepcopy(model).cpu().double()(tokens.cpu())  # float64 runs on CPUs only
    check(found.cpu(), expected.cpu(), exact)


def test_products_of_few_rows(kernel_device, monkeypatch) -> None:
    """q k v, o and down by the kernel, where that is better, in the inference form alone; logits never."""
    from torch_fdattn.ops.gemm import small_m_linear

    model = random_model(kernel_device, "qwen3").half().requires_grad_(False)
    tokens, weight = torch.arange(12, device=kernel_device).view(2, 6), model.layers[0].self_attn.q_proj.weight  # fmt: skip
    if not small_m_linear.fits(weight[:12], weight):
        pytest.skip("needs a CUDA device of sm_90")
    fused, expected = model.for_inference(), model(tokens)
    exact = copy.deepcopy(model).cpu().double()(tokens.cpu())
    before, blocks = launches[FEW], len(model.layers)
    fused(tokens)
    assert launches[FEW] == before  # of sizes that were not measured
    monkeypatch.setattr(inference_linear, "is_better_at_small_m", lambda *_: True)
    columns = products(monkeypatch)
    found = fused(tokens)
    assert launches[FEW] == before + 3 * blocks
    assert columns[:-1] == [96] * blocks  # gate and up
    check(found.cpu(), expected.cpu(), exact)
    assert torch.equal(model(tokens), expected)
    fused(tokens.repeat(2, 1))  # 24 rows
    assert launches[FEW] == before + 3 * blocks


def test_both_see_what_is_written(device) -> None:
    """In place. A move of either leaves the other what it was."""
    model, other = random_model(device), random_model(device)
    tokens = torch.arange(6, device=device)[None]
    fused, expected = model.for_inference(), None
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.25)
        model.load_state_dict(other.state_dict())
        expected = other(tokens)
        torch.testing.assert_close(fused(tokens), expected)
        model.layers[0].mlp.down_proj.weight.zero_()
        assert not torch.allclose(fused(tokens), expected)
        expected = model(tokens)
        model.double()
        torch.testing.assert_close(fused(tokens), expected)
        for parameter in model.parameters():
            parameter.zero_()
        torch.testing.assert_close(fused(tokens), expected)
        wide = copy.deepcopy(fused).cpu().double()
        torch.testing.assert_close(wide(tokens.cpu()).float(), expected.cpu())
        torch.testing.assert_close(fused(tokens), expected)
        assert torch.equal(wide.rotary.frequencies, fused.rotary.frequencies.cpu())


def test_forms_of_one_model_share_memory(device) -> None:
    model = random_model(device)
    first, second = model.for_inference(), model.for_inference()
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert one is not other
        assert one.data_ptr() == other.data_ptr()
    storages = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
        for form in (model, first)
        for p in form.parameters()
    }
    assert sum(storages.values()) == sum(p.nbytes for p in model.parameters())


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs):
        return self.inner(*inputs)


def test_other_modules_run_as_they_are(device) -> None:
    """In the place of a block, of attention, an MLP, a projection or a norm; with their hooks."""
    tokens = torch.arange(6, device=device)[None]
    places = [
        "layers.0", "layers.1", "layers.0.self_attn", "layers.0.mlp", "layers.1.mlp.up_proj",
        "layers.0.self_attn.k_proj", "layers.1.input_layernorm", "layers.0.self_attn.o_proj", "norm",
    ]  # fmt: skip
    for place in places if device == "cuda" or not INTERPRET else places[2:5]:
        model, seen = random_model(device), []
        parent, name = place.rpartition(".")[::2]
        parent = model.get_submodule(parent)
        outer = Outer(getattr(parent, name))
        setattr(parent, name, outer)
        outer.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out))
        with torch.no_grad():
            expected = model(tokens)
            torch.testing.assert_close(model.for_inference()(tokens), expected, msg=place)
        assert len(seen) == 2, place
        assert all(isinstance(x, torch.Tensor) for x in seen)


def test_hooks_of_fused_modules_do_not_run(device) -> None:
    """As `for_inference` says."""
    model, seen = random_model(device), []
    for module in model.modules():
        module.register_forward_hook(lambda *_: seen.append(1))
    fused = model.for_inference()
    fused(torch.arange(6, device=device)[None])
    assert not seen


def test_gradients_are_refused(device) -> None:
    model, tokens = random_model(device), torch.arange(6, device=device)[None]
    fused = model.for_inference()
    assert not fused(tokens).requires_grad
    assert not fused.training
    fused.layers[0].mlp.gate_up_proj.weight.requires_grad_()
    with pytest.raises(RuntimeError, match="InferenceTransformer is for inference and has no grad"):
        fused(tokens)
    with torch.no_grad():
        fused(tokens)


def test_the_form_compiles_whole(device) -> None:
    model, tokens = random_model(device), torch.arange(6, device=device)[None]
    fused = model.for_inference()
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens), model(tokens))


def test_transforms_see_every_weight(kernel_device) -> None:
    """torch.func's and forward-mode derivatives: then torch computes it."""
    mlp = MLP(random_model("cpu").config).to(kernel_device, torch.float32)
    fused = FusedMLP(mlp)
    weights = {name: p.detach() for name, p in fused.named_parameters()}
    x = draw(2, 32, device=kernel_device, dtype=torch.float32)
    tangents = {name: torch.ones_like(p) for name, p in weights.items()}

    def call(parameters):
        return torch.func.functional_call(fused, parameters, (x,))

    def plain(parameters):
        gate, up = F.linear(x, parameters["gate_up_proj.weight"]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, parameters["down_proj.weight"])

    found, expected = (torch.func.jvp(f, (weights,), (tangents,)) for f in (call, plain))
    torch.testing.assert_close(found, expected)
    with forward_ad.dual_level():
        dual = {name: forward_ad.make_dual(p, tangents[name]) for name, p in weights.items()}
        torch.testing.assert_close(forward_ad.unpack_dual(call(dual)).tangent, expected[1])
    stacked = {name: torch.stack([p, 2 * p]) for name, p in weights.items()}
    torch.testing.assert_close(torch.func.vmap(call)(stacked)[0], expected[0])


def test_parts_are_the_plain_layers(device) -> None:
    """What `parallelize` slices."""
    block = random_model(device).layers[0]
    for fused, plain, names in (
        (FusedAttention(block.self_attn), block.self_attn, ("q_proj", "k_proj", "v_proj")),
        (FusedMLP(block.mlp), block.mlp, ("gate_proj", "up_proj")),
    ):
        for name in names:
            one, other = getattr(fused, name), getattr(plain, name)
            assert one.weight.data_ptr() == other.weight.data_ptr()
            assert (one.in_features, one.out_features) == (other.in_features, other.out_features)
