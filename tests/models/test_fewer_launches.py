"""Projections of one input as one product, SwiGLU in it, a residual's addition with the norm behind it."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from tests.engine.tiny import random_model
from torch_fdattn.models.fewer_launches import added_and_normed, gated, projected
from torch_fdattn.models.transformer import MLP
from torch_fdattn.ops import swiglu
from torch_fdattn.ops.library import launches
from torch_fdattn.ops.side_by_side import AsOne, lay_side_by_side

pytestmark = pytest.mark.interpreter
NORM, PRODUCT = "tp_linear/row_norm", "tp_linear/gated_product"


def draw(*shape: int, device, dtype=torch.float16) -> torch.Tensor:
    made = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=made).to(device, dtype)


def linear(columns: int, features: int, device, bias: bool = False, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    made = nn.Linear(features, columns, bias=bias).to(device, torch.float16)
    return made.requires_grad_(False)


def pair(device, bias: bool = False) -> tuple[nn.Linear, nn.Linear]:
    gate, up = (linear(24, 32, device, bias, seed) for seed in range(2))
    lay_side_by_side(gate, up)
    return gate, up


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


@pytest.mark.parametrize("bias", [False, True])
def test_one_product_of_all(kernel_device, monkeypatch, bias: bool) -> None:
    linears = [linear(n, 32, kernel_device, bias, n) for n in (32, 16, 16)]
    x, as_one = draw(2, 3, 32, device=kernel_device), AsOne()
    expected = projected(x, linears, as_one)
    lay_side_by_side(*linears)
    columns = products(monkeypatch)
    found = projected(x, linears, as_one)
    assert columns == [64]
    for y, other, layer in zip(found, expected, linears, strict=True):
        wide = None if layer.bias is None else layer.bias.double()
        check(y, other, F.linear(x.double(), layer.weight.double(), wide))


def test_hooks_and_other_layers_see_their_calls(kernel_device, monkeypatch) -> None:
    class Scaled(nn.Linear):
        def forward(self, x):
            return 3 * super().forward(x)

    x, (gate, up), seen = draw(2, 3, 32, device=kernel_device), pair(kernel_device), []
    columns = products(monkeypatch)
    with torch.no_grad():
        hook = up.register_forward_hook(lambda module, args, out: seen.append(out))
        gated(x, gate, up, AsOne())
        hook.remove()
        assert len(seen) == 1
        assert columns == [24, 24]
        gate.__class__ = Scaled
        scaled, _ = projected(x, (gate, up), AsOne())
        torch.testing.assert_close(scaled, 3 * x @ gate.weight.t(), rtol=1e-2, atol=1e-2)
    gate.__class__ = nn.Linear
    gate.weight.requires_grad_()
    projected(x, (gate, up), AsOne())[0].sum().backward()
    assert gate.weight.grad is not None
    assert 48 not in columns


@pytest.mark.parametrize(("bias", "better"), [(False, True), (False, False), (True, True)])
def test_swiglu_in_the_product(kernel_device, monkeypatch, bias: bool, better: bool) -> None:
    from torch_fdattn.dist.tp_linear import gated_product

    for module in (swiglu, gated_product):
        monkeypatch.setattr(module, "is_better_in_product", lambda *_: better)
    gate, up = pair(kernel_device, bias)
    x, before = draw(2, 3, 32, device=kernel_device), launches[PRODUCT]
    if not gated_product.fits(x.flatten(0, 1), draw(48, 32, device=kernel_device)):
        pytest.skip("needs tensor descriptors")
    found = gated(x, gate, up, AsOne())
    assert (launches[PRODUCT] > before) == (better and not bias)
    expected = F.silu(gate(x)) * up(x)
    wide = [F.linear(x.double(), m.weight.double(), m.bias.double() if bias else None) for m in (gate, up)]  # fmt: skip
    check(found, expected, F.silu(wide[0]) * wide[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 3, 48), (5, 130)])
def test_sum_and_norm_in_one_pass(kernel_device, dtype, shape) -> None:
    x, y = (draw(*shape, device=kernel_device, dtype=dtype) * scale for scale in (1, 2))
    norm = nn.RMSNorm(shape[-1], 1e-5).to(kernel_device, dtype).requires_grad_(False)
    norm.weight.copy_(draw(shape[-1], device=kernel_device))
    before = launches[NORM]
    added, normed = added_and_normed(x, y, norm)
    assert launches[NORM] == before + 1
    assert torch.equal(added, x + y)
    wide = F.rms_norm(added.double(), shape[-1:], norm.weight.double(), 1e-5)
    check(normed, norm(added), wide)


def test_where_it_takes_two(kernel_device) -> None:
    """Whom a pass in one would leave out: gradients, hooks, autocast, norms of another dtype or without an epsilon."""
    x, y = (draw(2, n, 48, device=kernel_device)[:, :2] for n in (2, 3))
    norm = nn.RMSNorm(48, 1e-5).to(kernel_device, torch.float16)
    before, seen = launches[NORM], []
    _, normed = added_and_normed(x, y, norm)
    normed.sum().backward()
    assert norm.weight.grad is not None
    with torch.no_grad():
        hook = norm.register_forward_hook(lambda module, args, out: seen.append(out))
        added_and_normed(x, y, norm)
        hook.remove()
        assert len(seen) == 1
        with torch.autocast(kernel_device, torch.bfloat16):
            added_and_normed(x, y, norm)
        added_and_normed(x, y, nn.RMSNorm(48, 1e-5, device=kernel_device))
        added_and_normed(x, y, nn.RMSNorm(48).to(kernel_device, torch.float16))
        added_and_normed(x, y[:1], norm)  # broadcasts
        added_and_normed(x[..., :47], y[..., :47], nn.RMSNorm(47, 1e-5).to(x))  # no whole words
        assert launches[NORM] == before
        added_and_normed(x, y, norm)
    assert launches[NORM] == before + 1


def test_models_lie_side_by_side(device) -> None:
    """The same parameters with the same values, until they move."""
    model = random_model(device)
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    model.lay_side_by_side()
    for name, parameter in model.named_parameters():
        held, values = before[name]
        assert parameter is held
        assert torch.equal(parameter, values)
    layers = [layer for block in model.layers for layer in (block.self_attn, block.mlp)]
    with torch.no_grad():
        for layer in layers:
            whole, _ = AsOne()(layer.of_one_input())
            parts = [linear.weight for linear in layer.of_one_input()]
            assert torch.equal(whole, torch.cat(parts))
            assert whole.data_ptr() == parts[0].data_ptr()
        model.to(torch.float64)
        assert all(AsOne()(layer.of_one_input()) is None for layer in layers)


def laid(device, dtype=torch.float16) -> MLP:
    mlp = MLP(random_model("cpu").config).to(device, dtype).requires_grad_(False)
    lay_side_by_side(*mlp.of_one_input())
    return mlp


def test_models_compute_the_same(kernel_device, monkeypatch) -> None:
    model = random_model(kernel_device).half().requires_grad_(False)
    tokens = torch.arange(12, device=kernel_device).view(2, 6)
    expected = model(tokens)
    model.lay_side_by_side()
    columns = products(monkeypatch)
    found = model(tokens)
    assert columns[:-1] == [128, 32, 96, 32] * len(model.layers)  # q, k and v, o, gate and up, down
    exact = copy.deepcopy(model).cpu().double()(tokens.cpu())  # float64 runs on CPUs only
    check(found.cpu(), expected.cpu(), exact)


def test_copies_have_their_own_weights(kernel_device) -> None:
    mlp, x = laid(kernel_device), draw(1, 2, 32, device=kernel_device)
    expected, copied = mlp(x), copy.deepcopy(mlp)
    for parameter in mlp.parameters():
        parameter.zero_()
    torch.testing.assert_close(copied(x), expected)


def test_memory_that_weights_left_is_free(kernel_device) -> None:
    """At once after a move, and with the next call after other layers took their places."""
    mlp, x = laid(kernel_device), draw(1, 2, 32, device=kernel_device)
    mlp(x)
    assert mlp._as_one._kept is not None
    mlp.float()
    assert mlp._as_one._kept is None
    mlp.half()
    lay_side_by_side(*mlp.of_one_input())
    mlp(x)
    assert mlp._as_one._kept is not None
    mlp.gate_proj = nn.Sequential(mlp.gate_proj)
    mlp(x)
    assert mlp._as_one._kept is None


def test_one_row_alone(kernel_device, monkeypatch) -> None:
    monkeypatch.setattr(swiglu, "is_better_in_product", lambda *_: True)
    mlp, x = laid(kernel_device), draw(32, device=kernel_device)
    torch.testing.assert_close(mlp(x), mlp(x[None])[0])


def test_halves_that_differ(kernel_device) -> None:
    """One is broadcast, as without."""
    linears = [linear(n, 32, kernel_device, seed=n) for n in (1, 3)]
    x = draw(2, 32, device=kernel_device)
    expected = F.silu(linears[0](x)) * linears[1](x)
    lay_side_by_side(*linears)
    torch.testing.assert_close(gated(x, *linears, AsOne()), expected)


def test_transforms_see_every_weight(kernel_device) -> None:
    """torch.func's, forward-mode derivatives and traces, which one tensor over several parameters would be hidden from."""
    mlp = laid(kernel_device, torch.float32)
    weights = {name: p.detach() for name, p in mlp.named_parameters()}
    apart = {name: p.clone() for name, p in weights.items()}
    x = draw(2, 32, device=kernel_device, dtype=torch.float32)
    tangents = {name: torch.ones_like(p) for name, p in apart.items()}

    def call(parameters):
        return torch.func.functional_call(mlp, parameters, (x,))

    mlp(x)
    found, expected = (torch.func.jvp(call, (given,), (tangents,)) for given in (weights, apart))
    torch.testing.assert_close(found, expected)
    with forward_ad.dual_level():
        dual = {name: forward_ad.make_dual(p, tangents[name]) for name, p in weights.items()}
        torch.testing.assert_close(forward_ad.unpack_dual(call(dual)).tangent, expected[1])
    stacked = {name: torch.stack([p, 2 * p]) for name, p in apart.items()}
    torch.testing.assert_close(torch.func.vmap(call)(stacked)[0], expected[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        traced = torch.jit.trace(mlp, (x,))
    assert {"gate_proj", "up_proj", "down_proj"} <= {name for name, _ in traced.named_children()}
    torch.testing.assert_close(traced.double()(x.double()), mlp.double()(x.double()))
    torch.fx.symbolic_trace(mlp)


def test_frozen_weights_are_guarded(kernel_device) -> None:
    """What was saved for a backward and changed since is an error, of every weight."""
    mlp = laid(kernel_device)
    y = mlp(draw(1, 2, 32, device=kernel_device).requires_grad_())
    mlp.up_proj.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_laid_in_inference_mode_and_trained(device) -> None:
    model = random_model(device)
    with torch.inference_mode():
        model.lay_side_by_side()
    model(torch.arange(4, device=device)[None]).sum().backward()
    assert all(p.grad is not None for p in model.layers[0].mlp.parameters())
