"""Three ranks (FDATTN_FAULT_RANKS), of which rank 1 is lost: python fault_worker.py FAULT STRATEGY[,STRATEGY…] FOLDER.

A strategy is decode's, or one of the tensor-parallel matmuls': gather/fused, scatter/copy_engine, all_reduce/low_latency.

    kill, stop     it ends, or halts, between two calls
    kill_in_calls  it ends while it makes one call after the other
    absent         it makes no call of these strategies any more
    late           it makes one call late, but in time

Each rank is a fork of this process, which imports torch once for all. FDATTN_FAULT_DEVICE=cuda gives each rank a
GPU of its own, and NCCL. The exit code is 0 where every survivor ended as it should within the time.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.tensor  # what assert_close imports: better once than in each fork
from torch.distributed import distributed_c10d

import torch_fdattn
from tests import fast_interpreter
from tests.lost_ranks import STARTED_S, ranks_without_error
from torch_fdattn.dist import (
    PeerTimeout,
    ShardMap,
    all_gather_matmul,
    check,
    decode,
    matmul_all_reduce,
    matmul_reduce_scatter,
    set_timeout,
)
from torch_fdattn.dist.decode import fused, one_sided  # noqa: F401  # imports triton before the forks
from torch_fdattn.dist.tensor_parallel import copy_engine  # noqa: F401

DEVICE = os.environ.get("FDATTN_FAULT_DEVICE", "cpu")
WORLD, LOST = int(os.environ.get("FDATTN_FAULT_RANKS", "3")), 1
LIMIT_S = 0.8
#: Beyond the limit, on a machine that does other things as well.
SLACK_S = 4.0
KEYS, BLOCK = 18, 3


def join(folder: str, name: str, rank: int, world: int) -> str:
    """The name of a new default group. Its store is a file: no rank's death takes it away."""
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{folder}/{name}", rank=rank, world_size=world,
        timeout=timedelta(seconds=STARTED_S),
    )  # fmt: skip
    return dist.group.WORLD.group_name


def leave() -> None:
    """What a survivor does with a group that lost a rank."""
    if DEVICE == "cuda":
        distributed_c10d._abort_process_group()  # NCCL's orderly end would wait for the dead rank
    else:
        dist.destroy_process_group()


class Calls:
    """Calls of one group, by strategy, and what they should give: decode's, and OP/STRATEGY of the matmuls."""

    def __init__(self, group: str) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        q, k, v, lens, *decoded = (x.to(DEVICE) for x in WHOLE)
        mine, _ = ShardMap(rank, world, BLOCK).locate(torch.arange(KEYS, device=DEVICE))
        shard = q, k[:, :, mine], v[:, :, mine], lens, group
        x, weight = (x.to(DEVICE) for x in LINEAR)
        part, product = x * (rank + 1), x @ weight.t()
        total = product * (world * (world + 1) // 2)
        own = slice(rank * len(x) // world, (rank + 1) * len(x) // world)
        #: By op: (how a strategy's call is made, what it should give).
        self._ops = {
            "": (lambda s: decode(*shard, kv_block=BLOCK, strategy=s), decoded),
            "gather": (lambda s: all_gather_matmul(x[own], [weight], group, strategy=s), [product]),
            "scatter": (
                lambda s: [matmul_reduce_scatter(part, weight, group, strategy=s)],
                [total[own]],
            ),
            "all_reduce": (lambda s: [matmul_all_reduce(part, weight, group, method=s)], [total]),
        }

    def __call__(self, strategy: str) -> Sequence[torch.Tensor]:
        op, _, name = strategy.rpartition("/")
        found = self._ops[op][0](name)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return found

    def exact(self, strategy: str) -> Sequence[torch.Tensor]:
        return self._ops[strategy.rpartition("/")[0]][1]

    def expect(self, strategy: str, found: Sequence[torch.Tensor]) -> None:
        for ours, exact in zip(found, self.exact(strategy), strict=True):
            torch.testing.assert_close(ours, exact)

    def right(self, strategy: str) -> None:
        self.expect(strategy, self(strategy))


#: Kept, as a program might: their tracebacks hold what belonged to the old group.
errors: list[PeerTimeout] = []


def timeout_of(call: Callable[[], object]) -> PeerTimeout:
    """The PeerTimeout that the call raises."""
    try:
        call()
    except PeerTimeout as error:
        errors.append(error)
        return error
    raise AssertionError("no PeerTimeout")


def survive(calls: Calls, strategy: str, whole: bool) -> None:
    """Calls until one gives NaN, in time; the exception comes at the next one and at `check`."""
    count = 2  # calls before this
    while True:
        count += 1
        start = time.monotonic()
        found = calls(strategy)
        if any(x.isnan().any() for x in found):
            break
        calls.expect(strategy, found)
        assert count < 100_000, "rank 1 is never lost"
    took = time.monotonic() - start
    assert took < LIMIT_S + SLACK_S, f"{took} s"
    for ours, exact in zip(found, calls.exact(strategy), strict=True):
        lost = ours.isnan()
        assert lost.all() or not whole
        torch.testing.assert_close(ours[~lost], exact[~lost])
    start = time.monotonic()
    for _ in range(2):
        error = timeout_of(lambda: calls(strategy))
        said = error.rank, error.strategy, error.epoch
        assert said == (dist.get_rank(), strategy.rpartition("/")[2], count)
        assert error.peer == LOST or not whole, error
        assert error.peer != error.rank
        assert f"waited for rank {error.peer} of group" in str(error)
    assert timeout_of(check).rank == dist.get_rank()
    assert time.monotonic() - start < SLACK_S
    if DEVICE == "cuda":  # its context goes on
        assert torch.ones(8, device=DEVICE).sum().item() == 8


def lose(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        signal.pause()


def run(rank: int, fault: str, strategies: list[str], folder: str) -> None:
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    group = join(folder, "before", rank, WORLD)
    set_timeout(STARTED_S)  # the first calls compile
    calls = Calls(group)
    for strategy in strategies:
        calls.right(strategy)
        calls.right(strategy)
    dist.barrier()
    set_timeout(LIMIT_S)
    if fault == "late":
        set_timeout(LIMIT_S + SLACK_S)
        for strategy in strategies:
            if rank == LOST:
                time.sleep(LIMIT_S / 4)
            calls.right(strategy)
            calls.right(strategy)
        check()
        dist.barrier()
        dist.destroy_process_group()
        return
    if rank == LOST:
        if fault == "kill_in_calls":
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
            while True:
                calls(strategies[0])
        lose(fault)
    for strategy in strategies:
        survive(calls, strategy, whole=fault != "kill_in_calls")
    start = time.monotonic()
    leave()
    assert time.monotonic() - start < SLACK_S
    group = join(folder, "after", rank - (rank > LOST), WORLD - 1)
    set_timeout(STARTED_S)
    check()  # nothing is left of the old group
    calls = Calls(group)
    for strategy in strategies:
        calls.right(strategy)
    dist.barrier()
    dist.destroy_process_group()


def whole_call() -> tuple[torch.Tensor, ...]:
    """(q, k, v, lens, out, lse) of one process; one KV head: fewer programs to interpret."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, n, 16) for h, n in ((2 * WORLD, 1), (1, KEYS), (1, KEYS)))
    lens = torch.tensor([KEYS], dtype=torch.int32)
    return q, k, v, lens, *torch_fdattn.decode(q, k, v, lens)


fast_interpreter.install()
WHOLE = whole_call()
#: x (M, K) and a weight (N, K); M divides by the ranks, all and those that survive.
LINEAR = torch.randn(WORLD * (WORLD - 1), 16), torch.randn(6, 16)


def main(fault: str, strategies: str, folder: str) -> int:
    lost = set() if fault == "late" else {LOST}
    return int(not ranks_without_error(run, (fault, strategies.split(","), folder), WORLD, lost))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
