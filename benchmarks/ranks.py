"""The ranks of a run: those that torchrun started, or that it starts; and what they do together."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from .results import describe

Result = TypeVar("Result")
TIMEOUT_S = 300
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: The least value of each of its numbers.
_LEAST = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 1}


class Ranks(NamedTuple):
    """This process among the ranks of a run."""

    rank: int
    size: int
    device: torch.device
    group_name: str

    @property
    def group(self) -> dist.ProcessGroup:
        return distributed_c10d._resolve_process_group(self.group_name)


def mesh(ranks: Ranks, kv_ranks: int) -> tuple[Ranks, str]:
    """(this rank among those that split a model, the name of its group that shares a cache) where `kv_ranks` share one.

    Raises:
        ValueError: kv_ranks does not divide the ranks.
    """
    if ranks.size % kv_ranks:
        raise ValueError(f"--kv-ranks must divide the {ranks.size} ranks, got {kv_ranks}")
    shape, names = (kv_ranks, ranks.size // kv_ranks), ("kv", "tp")
    made = init_device_mesh(ranks.device.type, shape, mesh_dim_names=names)
    kv, tp = (made[name].get_group() for name in names)
    return Ranks(dist.get_rank(tp), shape[1], ranks.device, tp.group_name), kv.group_name


def alone(device: torch.device) -> Ranks:
    """One process without a group."""
    return Ranks(0, 1, device, "")


def under_torchrun() -> bool:
    """Whether torchrun started this process.

    Raises:
        ValueError: naming what is missing or wrong among its variables; one that is empty is not set.
    """
    # MASTER_ADDR and MASTER_PORT alone say nothing: some clusters set them everywhere.
    given = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if os.environ.get(name)]
    if not given:
        return False
    if missing := [name for name in _TORCHRUN if not os.environ.get(name)]:
        raise ValueError(
            f"torchrun's variables must be set together, got {', '.join(given)} without "
            f"{', '.join(missing)}"
        )
    numbers = {name: _number(name) for name in _LEAST if os.environ.get(name)}
    for name, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if name in numbers and size in numbers and numbers[name] >= numbers[size]:
            raise ValueError(
                f"the environment variable {name} must be below {size} {numbers[size]}, got "
                f"{numbers[name]}"
            )
    return True


def _number(name: str) -> int:
    try:
        value = int(os.environ[name])
    except ValueError:
        value = _LEAST[name] - 1
    if value < _LEAST[name]:
        raise ValueError(
            f"the environment variable {name} must be an integer of at least {_LEAST[name]}, got "
            f"{os.environ[name]!r}"
        )
    return value


def torchrun(count: int, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """(command, environment) that run `python -m benchmarks` with these arguments on `count` ranks of this machine."""
    environment = dict(os.environ)
    if torch.cuda.device_count() < count:
        threads = max(1, (os.cpu_count() or 1) // count)
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*program, "--nproc-per-node", str(count), "-m", "benchmarks", *argv], environment


def start_ranks(count: int, argv: Sequence[str]) -> int:
    """Runs this command again on `count` ranks of this machine; its exit status."""
    if torch.cuda.device_count() < count:
        print(
            f"{torch.cuda.device_count()} GPUs for {count} ranks: running on the CPU with gloo",
            file=sys.stderr,
        )
    command, environment = torchrun(count, argv)
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


#: torch 2.13 gave it a new name, and warns about the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather(received: Tensor, own: Tensor, ranks: Ranks) -> None:
    """Every rank's `own` into `received` (W, *own.shape), both contiguous."""
    _all_gather(received.flatten(0, 1) if own.dim() else received, own, group=ranks.group)


def largest(errors: Tensor) -> float:
    """The largest of all ranks' values, of which a rank may have none; infinite where one is NaN."""
    worst = errors.max().reshape(1) if errors.numel() else errors.new_zeros(1)
    worst = worst.nan_to_num(nan=math.inf, posinf=math.inf)  # a maximum over ranks may lose NaN
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def barrier(ranks: Ranks) -> None:
    """Returns when every rank is here and its device has nothing left to do."""
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier(ranks.group)
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()


def slowest(ranks: Ranks, times: Sequence[float]) -> list[float]:
    """Each time's largest over the ranks."""
    found = torch.tensor(times, dtype=torch.float64, device=ranks.device)
    dist.all_reduce(found, dist.ReduceOp.MAX, ranks.group)
    return found.tolist()


class StepFailed(RuntimeError):
    """Some rank's failure, raised on all.

    refused: it said that it has no such form. wrong: it computed something else than it should.
    """

    def __init__(self, reason: str, failure: str) -> None:
        super().__init__(reason)
        self.refused = failure == NotImplementedError.__name__
        self.wrong = failure == AssertionError.__name__


def together(ranks: Ranks, step: str, function: Callable[[], Result]) -> Result:
    """The function's result, if it raised nothing on any rank: else the step fails on all of them, with the reason.

    Without this a rank that raised would go on to the next implementation, and the others would wait for it in this
    one. What the function does must not make ranks wait
    for one that raised before: a collective stands alone, or behind what all ranks raise or none.

    Raises:
        StepFailed: with the first rank's exception.
    """
    result, failure = None, None
    try:
        result = function()
    except Exception as raised:
        failure = type(raised).__name__, describe(raised)
    failures: list = [None] * ranks.size
    dist.all_gather_object(failures, failure, ranks.group)
    found = [(rank, *said) for rank, said in enumerate(failures) if said is not None]
    if found:
        rank, kind, text = found[0]
        where = "" if len(found) == ranks.size else f"rank {rank}: "
        raise StepFailed(f"{step}: {where}{text}", kind)
    return result
