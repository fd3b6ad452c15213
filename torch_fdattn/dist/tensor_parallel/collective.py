"""Strategy `collective`: a matmul by the device's BLAS and a functional collective, one after the other.

Runs wherever functional collectives do (NCCL, gloo) and torch.compile traces it. Nothing overlaps. The
gradient is that of the parts (`dist/collectives.py`): autograd keeps the gathered x for the weights'
gradients, sum(rows) · K elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from torch_fdattn.dist.collectives import collective
from torch_fdattn.dist.symm import symmetric_memory
from torch_fdattn.ops import library


def all_gather_matmul(
    x_shard: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None],
    group_name: str, rows: Sequence[int], rank: int, world_size: int,
) -> list[Tensor]:  # fmt: skip
    x = collective("gather_rows", x_shard, group_name, rows, rank, world_size)
    return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def matmul_reduce_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None,
    group_name: str, rows: Sequence[int], rank: int, world_size: int,
) -> Tensor:  # fmt: skip
    partial = F.linear(x, weight)
    y = collective("reduce_scatter_rows_", partial, group_name, rows, rank, world_size)
    return y if bias is None else y + bias.to(y.dtype)  # under autocast the bias is in fp32


def matmul_all_reduce(
    x: Tensor, weight: Tensor, bias: Tensor | None,
    group_name: str, method: str, rank: int, world_size: int,
) -> Tensor:  # fmt: skip
    if method in symmetric_memory.METHODS and library.can_bypass_dispatcher(x, weight):
        y = symmetric_memory.matmul_all_reduce(x, weight, group_name, method)
        return y if bias is None else y + bias
    name = "all_reduce_" if method == "nccl" else f"{method}_all_reduce"
    y = collective(name, F.linear(x, weight), group_name, (), rank, world_size)
    return y if bias is None else y + bias.to(y.dtype)
