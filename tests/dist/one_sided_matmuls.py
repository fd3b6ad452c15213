"""What the tests of one-sided matmuls share: strategies, draws, the error rule, calls of all kinds."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torch_fdattn.dist import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from torch_fdattn.dist.tensor_parallel import low_latency, tiled_all_reduce
from torch_fdattn.ops.library import INTERPRET
from torch_fdattn.testing import assert_launched

STRATEGIES = ("copy_engine", "fused", "low_latency")


#: With so many features a rank; rows of 37 are no multiple of 16 bytes, which tensor descriptors need.
WAYS = [
    ("copy_engine", 40, torch.float16),
    ("fused", 40, torch.float16),
    ("fused", 40, torch.float32),
    ("fused", 37, torch.float16),
    ("low_latency", 40, torch.float16),
    ("low_latency", 40, torch.float32),
]


METHODS = ("low_latency", "gemm_all_reduce")


@pytest.fixture(autouse=True)
def _kernels(rank_device: torch.device) -> None:
    if rank_device.type == "cpu" and not INTERPRET:
        pytest.skip("tests a kernel: needs a CUDA device or TRITON_INTERPRET=1")


def draw(*shape: int, device, dtype=torch.float32) -> Tensor:
    """Seeded alike on all ranks (conftest), so drawn alike."""
    return torch.randn(shape).to(device, dtype)


def check_sum(ours: Tensor, exact: Tensor, at_dtype: Tensor) -> None:
    """The error rule: at_dtype is torch's result in the inputs' dtype, exact the one of fp64."""
    rounding = ((exact.to(ours.dtype) + 0.3 - 0.3).double() - exact).abs().max().item()
    bound = 2 * (at_dtype.double() - exact).abs().max().item() + 2 * rounding
    error = (ours.double() - exact).abs().max().item() if exact.numel() else 0.0
    assert error <= bound, (error, bound)


def of_rank(count: int, rank: int | None = None) -> slice:
    rank = dist.get_rank() if rank is None else rank
    return slice(rank * count, (rank + 1) * count)


def expect_launch(*names: str):
    """That kernels ran; one rank alone has nobody to talk to."""
    return assert_launched(
        *(f"tensor_parallel/{name}" for name in names if dist.get_world_size() > 1)
    )


def by_tiles(x: Tensor, weight: Tensor, group_name: str, shots: int) -> Tensor:
    """`low_latency` of however few numbers in the way of very many."""
    of_group = dist.distributed_c10d._resolve_process_group(group_name)
    part = F.linear(x, weight)
    y = torch.empty_like(part)
    tiled_all_reduce.all_reduce(part, y, group_name, of_group.rank(), of_group.size(), shots=shots)
    return y


def by_packets(x: Tensor, weight: Tensor, group_name: str) -> Tensor:
    """`low_latency` of odd numbers."""
    part = F.linear(x, weight)
    y = torch.empty_like(part)
    of_group = dist.distributed_c10d._resolve_process_group(group_name)
    low_latency.ll_all_reduce(part, y, group_name, of_group.size())
    return y


CALLS = {
    **{f"{s} gather": lambda x, w, g, s=s: all_gather_matmul(x, [w], g, strategy=s)[0] for s in STRATEGIES},
    **{f"{s} scatter": lambda x, w, g, s=s: matmul_reduce_scatter(x, w, g, strategy=s) for s in STRATEGIES},
    **{m: lambda x, w, g, m=m: matmul_all_reduce(x, w, g, method=m) for m in METHODS},
    **{f"low_latency by tiles, {n}": lambda x, w, g, n=n: by_tiles(x, w, g, n) for n in (1, 2)},
    "low_latency by packets": by_packets,
}  # fmt: skip
