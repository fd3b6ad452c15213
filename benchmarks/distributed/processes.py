"""The ranks of a run: join those that torchrun started, or start them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

TIMEOUT_S = 300
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Ranks(NamedTuple):
    """This process among the ranks of a run."""

    rank: int
    size: int
    device: torch.device
    group_name: str

    @property
    def group(self) -> dist.ProcessGroup:
        return dist.group.WORLD


def under_torchrun() -> bool:
    """Whether torchrun started this process.

    Raises:
        ValueError: only some of its variables are set.
    """
    missing = [name for name in _TORCHRUN if name not in os.environ]
    if missing and len(missing) < len(_TORCHRUN) and "RANK" in os.environ:
        raise ValueError(f"torchrun's variables must be set together, got none of {missing}")
    return not missing


def start_ranks(count: int, words: Sequence[str]) -> int:
    """Runs this command again on `count` ranks of this machine; its exit status."""
    environment = dict(os.environ)
    if torch.cuda.device_count() < count:
        print(
            f"{torch.cuda.device_count()} GPUs for {count} ranks: running on the CPU with gloo",
            file=sys.stderr,
        )
        threads = max(1, (os.cpu_count() or 1) // count)
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count),
        "-m", "benchmarks", *words,
    ]  # fmt: skip
    return subprocess.run(command, env=environment, check=False).returncode


def join(device_type: str) -> Ranks:
    """Initialises torch.distributed: NCCL where every local rank has a GPU, gloo otherwise."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device_type != "cpu" and torch.cuda.device_count() >= local_size:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    options: dict = dict(timeout=timedelta(seconds=TIMEOUT_S))
    if not under_torchrun():
        options |= dict(store=dist.HashStore(), rank=0, world_size=1)
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device, **options)
    else:
        dist.init_process_group("gloo", **options)
    group_name = dist.group.WORLD.group_name
    return Ranks(dist.get_rank(), dist.get_world_size(), device, group_name)
