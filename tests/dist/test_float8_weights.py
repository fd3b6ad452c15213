"""The tensor-parallel matmuls with weights in float8: against fp64 of what they stand for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.dist.one_sided_matmuls import METHODS, STRATEGIES, check_sum, draw, of_rank
from tests.dist.test_tp_linear import leaf
from tests.pairwise import pairwise
from torch_fdattn.dist import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from torch_fdattn.ops.gemm import float8
from torch_fdattn.ops.library import INTERPRET, launches

FEATURES = 48


def quantised(weight: Tensor, format: torch.dtype, whole: bool) -> tuple[Tensor, Tensor]:
    """(weight (N, K) in float8, scales), a row of zeros among them."""
    weight = weight.clone()
    weight[-1] = 0.0
    most = weight.abs().amax() if whole else weight.abs().amax(1)
    scale = most.clamp(min=1e-12) / torch.finfo(format).max
    columns = scale.expand(len(weight))[:, None]
    return (weight / columns).to(format), scale


def meant(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (weight.double() * scale.double().expand(len(weight))[:, None]).to(dtype)


def needs_kernels(way: str, device: torch.device) -> None:
    if way in (*STRATEGIES, *METHODS):
        if device.type == "cpu" and not INTERPRET:
            pytest.skip("tests a kernel: needs a CUDA device or TRITON_INTERPRET=1")
        if dist.get_world_size() == 1:
            pytest.skip("needs 2 ranks")


@pairwise(way=["collective", *STRATEGIES], whole=[False, True], format=float8.FORMATS)
def test_gather_and_scatter(group, rank_device, way: str, whole: bool, format) -> None:
    needs_kernels(way, rank_device)
    world, own = dist.get_world_size(), of_rank(3)
    x = draw(3 * world, FEATURES, device=rank_device)
    weight, scale = quantised(draw(10, FEATURES, device=rank_device), format, whole)
    plain = draw(4, FEATURES, device=rank_device)
    right = meant(weight, scale, torch.float32)
    given = leaf(x[own])
    y, other = all_gather_matmul(given, [weight, plain], group, strategy=way, weight_scales=[scale, None])  # fmt: skip
    check_sum(y, x.double() @ meant(weight, scale, torch.float64).t(), x @ right.t())
    check_sum(other, x.double() @ plain.double().t(), x @ plain.t())
    y.sum().backward()
    torch.testing.assert_close(given.grad, world * right.sum(0).expand(3, -1))
    with torch.no_grad():  # by the kernel that makes them x's dtype
        again, _ = all_gather_matmul(x[own], [weight, plain], group, strategy=way, weight_scales=[scale, None])  # fmt: skip
        torch.testing.assert_close(again, y)
        parts = matmul_reduce_scatter(x, weight, group, strategy=way, weight_scale=scale)
    torch.testing.assert_close(parts, world * (x @ right.t())[own])


@pairwise(
    method=["nccl", *METHODS], whole=[False, True], format=float8.FORMATS,
    dtype=[torch.float32, torch.float16],
)  # fmt: skip
def test_all_reduce(group, rank_device, method: str, whole: bool, format, dtype) -> None:
    needs_kernels(method, rank_device)
    world = dist.get_world_size()
    x = draw(5, 300 * world, device=rank_device, dtype=dtype)
    weights, scales = zip(
        *(quantised(draw(34, 300, device=rank_device), format, whole) for _ in range(world)), strict=True
    )  # fmt: skip
    bias, rank = draw(34, device=rank_device, dtype=dtype), dist.get_rank()
    before = launches["tensor_parallel/gemm_all_reduce"]
    with torch.no_grad():
        y = matmul_all_reduce(
            x[:, of_rank(300)], weights[rank], group, bias, method=method, weight_scale=scales[rank]
        )
    assert (launches["tensor_parallel/gemm_all_reduce"] > before) == (method == "gemm_all_reduce")
    pairs = list(enumerate(zip(weights, scales, strict=True)))
    exact, at_dtype = (
        sum(x[:, of_rank(300, r)].to(t) @ meant(w, s, t).t() for r, (w, s) in pairs) + bias.to(t)
        for t in (torch.float64, dtype)
    )
    check_sum(y, exact, at_dtype)


@pytest.mark.parametrize("shape", [(), (5,)])
def test_of_one_rank_s_weight(rank_device, shape: tuple[int, ...]) -> None:
    """By torch, and by the kernel where there is one: the same bits."""
    weight = draw(5, 33, device=rank_device).to(torch.float8_e4m3fn)
    scale = draw(*shape, device=rank_device).abs()
    for dtype in (torch.float32, torch.float16):
        right = (weight.float() * scale.expand(5)[:, None]).to(dtype)
        assert torch.equal(float8.dequantised(weight, scale, dtype), right)
    assert float8.dequantised(weight[:0], scale.expand(5)[:0], torch.float32).shape == (0, 33)


def test_compiled(group, rank_device) -> None:
    torch._dynamo.reset()
    x = draw(4, FEATURES, device=rank_device)
    weight, scale = quantised(draw(6, FEATURES, device=rank_device), torch.float8_e4m3fn, False)
    step = lambda x: matmul_all_reduce(x, weight, group, weight_scale=scale)  # noqa: E731
    found = torch.compile(step, backend="aot_eager", fullgraph=True)(x)
    right = dist.get_world_size() * F.linear(x, meant(weight, scale, torch.float32))
    torch.testing.assert_close(found, right)


W = torch.ones(4, 6)
W8 = W.to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("weight", "scale", "error", "message"),
    [
        (W8, None, TypeError, "weight in torch.float8_e4m3fn needs weight_scale, got None"),
        (W, torch.ones(4), TypeError, "weight_scale is for weights in float8_e4m3fn"),
        (W8, torch.ones(3), ValueError, r"weight_scale must have shape \(\) or \(4,\)"),
        (W8, torch.ones(4).half(), TypeError, "weight_scale must have dtype torch.float32"),
        (W8, torch.ones(4, requires_grad=True), ValueError, "have no gradients"),
    ],
)
def test_bad_input(group, weight: Tensor, scale, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        matmul_all_reduce(torch.ones(2, 6), weight, group, weight_scale=scale)


def test_bad_lists(group) -> None:
    x = torch.ones(2, 6)
    with pytest.raises(ValueError, match="weight_scales must have 1 entries like weights, got 2"):
        all_gather_matmul(x, [W8], group, weight_scales=[torch.ones(4)] * 2)
    with pytest.raises(TypeError, match="weight_scales must be a list of tensors or None, got Tensor"):  # fmt: skip
        all_gather_matmul(x, [W8], group, weight_scales=torch.ones(1, 4))
