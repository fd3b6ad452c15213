"""The fused inference forms of tensor-parallel layers against the layers that they are made of."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from tests.dist.dense_layers import HIDDEN, config, dense_attention, dense_mlp
from tests.dist.parts import assert_near, rank_part
from tests.dist.test_tp_layers import HEADS, LENGTH, angles, causal_mask, run, uneven_tokens
from tests.pairwise import pairwise
from torch_fdattn.dist import TPMLP, TPAttention
from torch_fdattn.dist.tensor_parallel.inference import (
    FusedTPAttention,
    FusedTPMLP,
    FusedTransformersTPAttention,
)
from torch_fdattn.dist.tensor_parallel.layers import STRATEGIES
from torch_fdattn.ops import swiglu
from torch_fdattn.ops.library import INTERPRET, launches

BATCH = 2


def draw(*shape: int, device, dtype=torch.float32) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def own_of(x: Tensor, strategy: str) -> Tensor:
    return rank_part(x.flatten(0, 1)) if strategy == "ag_rs" else x


def residual_of(own: Tensor, norm: nn.Module | None = None) -> dict:
    norm = nn.RMSNorm(HIDDEN, 1e-5) if norm is None else norm
    return dict(residual=torch.ones_like(own), norm=norm.to(own))


def check_add_norm(found: tuple[Tensor, Tensor], y: Tensor, residual: Tensor, norm) -> None:
    added, normed = found
    assert_near(added, residual + y)
    assert_near(normed, norm(added))


@torch.no_grad()
@pairwise(strategy=STRATEGIES, bias=[False, True], library=["ours", "transformers"])
def test_mlp(group, rank_device, strategy: str, bias: bool, library: str) -> None:
    ours = config(mlp_bias=bias, architecture="llama")
    plain = TPMLP.from_module(dense_mlp(ours, library).to(rank_device), group, strategy, tokens=uneven_tokens())  # fmt: skip
    fused = plain.for_inference()
    assert type(fused) is FusedTPMLP
    own = own_of(draw(BATCH, LENGTH, HIDDEN, device=rank_device), strategy)
    assert_near(fused(own), plain(own))
    how = residual_of(own)
    check_add_norm(fused.add_norm(own, **how), plain(own), **how)


@torch.no_grad()
@pairwise(
    strategy=STRATEGIES,
    heads=HEADS,
    architecture=["llama", "qwen3"],
    library=["ours", "transformers"],
)
def test_attention(group, rank_device, strategy, heads, architecture, library) -> None:
    ours = config(*heads, architecture=architecture, attention_bias=heads != (4, 4))
    dense = dense_attention(ours, library).to(rank_device)
    plain = TPAttention.from_module(dense, group, strategy, tokens=uneven_tokens())
    fused, turns = plain.for_inference(), angles(rank_device)
    kind = FusedTPAttention if library == "ours" else FusedTransformersTPAttention
    assert type(fused) is kind
    assert fused.for_inference() is fused
    own = own_of(draw(BATCH, LENGTH, HIDDEN, device=rank_device), strategy)
    expected = run(plain, library, own, turns)
    assert_near(run(fused, library, own, turns), expected)
    how = residual_of(own)
    check_add_norm(fused.add_norm(own, *turns, **how), expected, **how)
    if library == "transformers":
        mask = causal_mask(rank_device).repeat(BATCH, 1, 1, 1)
        masked = [run(x, library, own, turns, mask) for x in (fused, plain)]
        assert_near(*masked)


@torch.no_grad()
def test_over_the_memory_of_the_layer(group, rank_device) -> None:
    """Until one of them moves; copies have their own."""
    plain = TPMLP.from_module(dense_mlp(config(), "ours").to(rank_device), group, "all_reduce")
    fused, x = plain.for_inference(), draw(3, HIDDEN, device=rank_device)
    assert fused.gate_up_proj.weight.data_ptr() == plain.gate_proj.weight.data_ptr()
    plain.up_proj.weight += 1
    assert_near(fused(x), plain(x))
    copied = copy.deepcopy(fused)
    plain.double()
    assert fused(x).dtype == torch.float32
    for parameter in fused.parameters():
        parameter.zero_()
    assert copied(x).any()
    assert not fused(x).any()


@torch.no_grad()
@pytest.mark.parametrize("norm", [nn.Identity(), nn.LayerNorm(HIDDEN), nn.RMSNorm(HIDDEN)])
def test_any_norm(group, rank_device, norm: nn.Module) -> None:
    plain = TPMLP.from_module(
        dense_mlp(config(), "ours").to(rank_device), group, "all_reduce", "nccl"
    )
    x = draw(3, HIDDEN, device=rank_device)
    dist.broadcast(x, 0)
    how = residual_of(x, norm)
    check_add_norm(plain.for_inference().add_norm(x, **how), plain(x), **how)


def test_gradients_are_refused(group, rank_device) -> None:
    mlp = TPMLP.from_module(dense_mlp(config(), "ours").to(rank_device), group, "all_reduce")
    attention = TPAttention.from_module(
        dense_attention(config(), "ours").to(rank_device), group, "all_reduce"
    )
    x, turns = draw(1, LENGTH, HIDDEN, device=rank_device), angles(rank_device)
    how = residual_of(x)
    leaf, message = x.clone().requires_grad_(), "is for inference and has no gradients: call"
    for fused, inputs in ((mlp.for_inference(), ()), (attention.for_inference(), turns)):
        assert not fused(x, *inputs).requires_grad
        with pytest.raises(RuntimeError, match=message):
            fused(leaf, *inputs)
        with pytest.raises(RuntimeError, match=message):
            fused.add_norm(leaf, *inputs, **how)
        with torch.no_grad():
            fused(leaf, *inputs)
        fused.requires_grad_()
        with pytest.raises(RuntimeError, match=f"{type(fused).__name__} {message}"):
            fused(x, *inputs)


def test_layers_that_cannot_be_merged_stay(group, rank_device, mesh) -> None:
    """DTensors, as FSDP makes them of a layer's parameters."""
    layer = TPMLP.from_module(dense_mlp(config(), "ours").to(rank_device), group, "all_reduce")
    for linear in (layer.gate_proj, layer.up_proj):
        linear.weight = nn.Parameter(DTensor.from_local(linear.weight.detach(), mesh, [Shard(0)]))
    assert layer.for_inference() is layer
    assert type(layer.gate_proj.weight) is DTensor


@torch.no_grad()
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_compiled_once(group, rank_device, strategy: str) -> None:
    """How many rows are few is no guard of graphs."""
    method = "nccl" if strategy == "all_reduce" else "auto"
    plain = TPMLP.from_module(
        dense_mlp(config(inner=64), "ours").to(rank_device), group, strategy, method
    )
    fused, graphs = plain.for_inference(), []
    compiled = torch.compile(
        fused, backend=lambda graph, _: graphs.append(graph) or graph, dynamic=True, fullgraph=True
    )
    for rows in (3, 70, 120, 200):
        x = draw(rows, HIDDEN, device=rank_device)
        torch.testing.assert_close(compiled(x), fused(x))
    assert len(graphs) == 1


class TestLaunches:
    """What a captured step launches, on GPUs or in the interpreter."""

    @pytest.fixture(autouse=True)
    def _kernels(self, group, rank_device) -> None:
        if dist.get_world_size() == 1:
            pytest.skip("needs 2 ranks")
        if rank_device.type == "cpu" and not INTERPRET:
            pytest.skip("tests a kernel: needs a CUDA device or TRITON_INTERPRET=1")

    @torch.inference_mode()
    @pairwise(method=["low_latency", "gemm_all_reduce"], normed=[False, True], few=[False, True])
    def test_mlp(
        self, group, rank_device, monkeypatch, method: str, normed: bool, few: bool
    ) -> None:
        """SwiGLU is in the product of few rows; the norm in the sum, or in a launch behind that of a product."""
        monkeypatch.setattr(swiglu, "IN_PRODUCT", ((1, 8, 1, 1),) if few else ())
        dtype = torch.bfloat16 if rank_device.type == "cuda" else torch.float16
        dense = dense_mlp(config(inner=64), "ours").to(rank_device, dtype)
        plain = TPMLP.from_module(dense, group, "all_reduce", method)
        fused = plain.for_inference()
        wide = copy.deepcopy(plain).double()
        wide.allreduce_method = "nccl"
        for rows in (1, 3, 9):
            x = draw(rows, HIDDEN, device=rank_device, dtype=dtype)
            dist.broadcast(x, 0)
            how = residual_of(x)

            def call(x=x, how=how):
                return fused.add_norm(x, **how) if normed else (fused(x),)

            before = launches.copy()
            found = call()
            counts = launches - before
            in_product = few and rows <= 8
            assert counts["gemm/swiglu"] == int(in_product)
            assert counts["tensor_parallel/row_norm"] == int(normed)
            y, exact = plain(x), wide(x.double())
            if normed:
                y, exact = y + how["residual"], exact + how["residual"].double()
            bound = 4 * (y.double() - exact).abs().max() + 2**-7 * exact.abs().max()
            assert (found[0].double() - exact).abs().max() <= bound
            if normed:
                torch.testing.assert_close(found[1], how["norm"](found[0]), atol=2e-2, rtol=2e-2)
            if rank_device.type == "cuda":
                check_graph(call, found)

    @torch.inference_mode()
    def test_attention(self, group, rank_device) -> None:
        """One product, and the norm in the launch of the sum."""
        dtype = torch.bfloat16 if rank_device.type == "cuda" else torch.float16
        dense = dense_attention(config(), "ours").to(rank_device, dtype)
        plain = TPAttention.from_module(dense, group, "all_reduce", "low_latency")
        fused, turns = plain.for_inference(), angles(rank_device)
        x = draw(1, LENGTH, HIDDEN, device=rank_device, dtype=dtype)
        dist.broadcast(x, 0)
        how, before = residual_of(x), launches.copy()
        added, normed = fused.add_norm(x, *turns, **how)
        counts = launches - before
        assert counts["tensor_parallel/row_norm"] == 1
        torch.testing.assert_close(added, plain(x, *turns) + how["residual"], atol=5e-2, rtol=5e-2)
        torch.testing.assert_close(normed, how["norm"](added), atol=2e-2, rtol=2e-2)


def check_graph(call, found: tuple[Tensor, ...]) -> None:
    """A captured call gives the same bits."""
    graph = torch.cuda.CUDAGraph()
    call()
    with torch.cuda.graph(graph):
        captured = call()
    for _ in range(2):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, found, strict=True))
