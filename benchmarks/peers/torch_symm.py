"""torch's fused symmetric-memory ops ("async TP") and its all-reduces over symmetric memory, as their users call them.

CUDA alone. The all-reduces are given their product in symmetric memory already: no copy is counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

METHODS = ("one_shot", "two_shot")
NAME = "torch_symm"


def gather(x: Tensor, weights: Sequence[Tensor], group_name: str) -> list[Tensor]:
    """x (m, K), as many rows on every rank, weights (N_i, K) -> [(W m, N_i)]."""
    _symmetric()
    transposed = [weight.t() for weight in weights]
    return torch.ops.symm_mem.fused_all_gather_matmul(x, transposed, 0, group_name)[1]


def scatter(x: Tensor, weight: Tensor, group_name: str) -> Tensor:
    """x (W m, K), weight (N, K) -> (m, N)."""
    _symmetric()
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.t(), "sum", 0, group_name)


class AllReduce:
    """x (M, K), weight (N, K) -> (M, N), by one of METHODS; the buffer is this object's."""

    def __init__(
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device, group_name: str
    ) -> None:
        symmetric = _symmetric()
        self._group_name = group_name
        with torch.inference_mode(False):
            self._buffer = symmetric.empty(rows, columns, dtype=dtype, device=device)
        symmetric.rendezvous(self._buffer, group_name)

    def __call__(self, x: Tensor, weight: Tensor, method: str) -> Tensor:
        torch.mm(x, weight.t(), out=self._buffer)
        if method == "one_shot":
            return torch.ops.symm_mem.one_shot_all_reduce(self._buffer, "sum", self._group_name)
        return torch.ops.symm_mem.two_shot_all_reduce_(self._buffer, "sum", self._group_name)


def _symmetric():
    import torch.distributed._symmetric_memory as symmetric  # defines the ops

    return symmetric
