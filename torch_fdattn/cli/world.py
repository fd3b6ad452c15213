"""Where this process stands: its device, and torchrun's group where there is one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from torch_fdattn.cli.errors import UsageError
from torch_fdattn.environment import parse_integer

TIMEOUT = timedelta(seconds=120)  # of every wait for another rank


@dataclass(frozen=True)
class World:
    """Alone (no group), or one of torchrun's ranks."""

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None
    local_size: int = 1  # ranks of this node


@contextmanager
def join(device_name: str | None) -> Iterator[World]:
    """Join torchrun's group where there is one, and leave it at the end."""
    size = _from_environment("WORLD_SIZE", 1, minimum=1)
    rank = _from_environment("RANK", None if size > 1 else 0, minimum=0)
    if rank >= size:
        raise UsageError(
            f"the environment variable RANK must be below WORLD_SIZE {size}, got {rank}"
        )
    local = _from_environment("LOCAL_RANK", 0, minimum=0)
    local_size = _from_environment("LOCAL_WORLD_SIZE", size, minimum=1)
    device = _device(device_name, local if size > 1 else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size == 1:
        yield World(0, 1, device, None)
        return
    if device.type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
    try:
        if device.type == "cuda":
            dist.init_process_group("nccl", device_id=device, timeout=TIMEOUT)
        else:
            dist.init_process_group("gloo", timeout=TIMEOUT)
    except (ValueError, dist.DistError) as error:  # ValueError: a variable of torchrun is missing
        raise UsageError(f"no process group ({error}); `fdattn doctor` says more") from None
    try:
        yield World(rank, size, device, dist.group.WORLD, local_size)
    finally:
        dist.destroy_process_group()


def _from_environment(name: str, default: int | None, minimum: int) -> int:
    """One of torchrun's variables; one that is empty is not set."""
    text = os.environ.get(name)
    value = parse_integer(text) if text else default
    if value is None or value < minimum:
        raise UsageError(
            f"the environment variable {name} must be an integer of at least {minimum}, got "
            f"{os.environ.get(name)!r}; `fdattn doctor` says more"
        )
    return value


def _device(name: str | None, local_rank: int | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise UsageError(f"--device must be cpu, cuda or cuda:N, got {name}") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device must be cpu, cuda or cuda:N, got {name}")
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is None:
        device = torch.device("cuda", local_rank or 0)
    elif local_rank is not None:
        raise UsageError(f"--device must be cpu or cuda under torchrun, got {name}")
    if device.index >= torch.cuda.device_count():
        raise UsageError(
            f"--device {device}: this process sees {torch.cuda.device_count()} GPUs; start one rank "
            "for each GPU, or use --device cpu"
        )
    return device
