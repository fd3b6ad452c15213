"""The devices and the group of test ranks: NCCL where each rank has a GPU of its own, else gloo on CPUs.

With TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 ranks share the GPUs there are, by gloo: one GPU runs what two would. Its
processes take turns, so times mean nothing, and gloo's collectives cannot be captured in CUDA graphs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

_SHARED = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def rank_device() -> torch.device:
    """This rank's device, by torchrun's variables."""
    local_rank, gpus = int(os.environ["LOCAL_RANK"]), _num_gpus()
    if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]):
        return torch.device("cuda", local_rank)
    if shares_gpus():
        return torch.device("cuda", local_rank % gpus)
    return torch.device("cpu")


def shares_gpus() -> bool:
    """Whether ranks are to share GPUs that are too few for them."""
    few = 0 < _num_gpus() < int(os.environ["LOCAL_WORLD_SIZE"])
    return few and os.environ.get(_SHARED, "0") not in ("", "0")


def _num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def expect_own_gpus() -> None:
    """Skips a test whose collectives are captured, where ranks share GPUs."""
    if shares_gpus():
        ranks = os.environ["LOCAL_WORLD_SIZE"]
        pytest.skip(f"needs {ranks} CUDA devices, found {_num_gpus()}")


def start_group(timeout: timedelta) -> torch.device:
    """This rank's device, with which the default group was started."""
    device = rank_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    shared = shares_gpus()
    dist.init_process_group("gloo" if shared or device.type == "cpu" else "nccl", timeout=timeout)
    if shared:
        dist.batch_isend_irecv = _exchange_by_cpu
    return device


class _Received:
    """A batch of sends and receives of copies on CPUs; waited for, what came is on the GPU."""

    def __init__(self, works: list[dist.Work], copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._works, self._copies = works, copies

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        for tensor, copy in self._copies:
            tensor.copy_(copy)


_exchange = dist.batch_isend_irecv


def _exchange_by_cpu(operations: list[dist.P2POp]) -> list[_Received]:
    """torch.distributed.batch_isend_irecv for gloo, which sends no tensors of GPUs."""
    copies = [(op.tensor, op.tensor.cpu()) for op in operations]
    works = _exchange(
        [
            dist.P2POp(op.op, copy, op.peer, op.group)
            for op, (_, copy) in zip(operations, copies, strict=True)
        ]
    )
    came = [x for op, x in zip(operations, copies, strict=True) if op.op is dist.irecv]
    return [_Received(works, came)]
