"""Ranks of which rank 1 is lost to ring attention over gloo: python ring_fault_worker.py FAULT STRATEGY RANKS FOLDER.

    kill, stop     it ends, or halts, between two calls
    backward       it ends between a call and its backward

Each rank is a fork of this process, which imports torch once for all. The exit code is 0 where every other rank got an
exception within the group's time-out.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from torch_fdattn.dist import SequenceShards, ring_attention

LOST = 1
LIMIT_S = 3.0
#: Beyond the limit, on a machine that does other things as well: a call has several collectives.
SLACK_S = 10.0
STARTED_S = 120.0


def run(rank: int, fault: str, strategy: str, ranks: int, folder: str) -> None:
    dist.init_process_group(  # the store is a file: no rank's death takes it away
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=STARTED_S),
    )  # fmt: skip
    shards = SequenceShards.zigzag(4 * ranks, ranks)
    q, k, v = (torch.randn(1, ranks, shards.lengths[rank], 16).requires_grad_() for _ in range(3))

    def attend():
        out, _ = ring_attention(q, k, v, None, shards=shards, causal=True, strategy=strategy)
        return out.sum()

    attend().backward()
    loss = attend()
    dist.barrier()
    if rank == LOST:
        os.kill(os.getpid(), signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
    _set_pg_timeout(timedelta(seconds=LIMIT_S), dist.group.WORLD)
    start = time.monotonic()
    try:
        loss.backward() if fault == "backward" else attend()
    except RuntimeError as error:
        took = time.monotonic() - start
        assert took < LIMIT_S + SLACK_S, f"{took} s"
        print(f"rank {rank}: {str(error).splitlines()[0]} after {took:.1f} s", flush=True)
        return
    raise AssertionError("no exception")


def fork(rank: int, *arguments) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        run(rank, *arguments)
        code = 0
    except BaseException:
        print(f"rank {rank}: {traceback.format_exc()}", flush=True)
    os._exit(code)  # past the teardown of gloo, which would wait for the lost rank


def main(fault: str, strategy: str, ranks: int, folder: str) -> int:
    pids = [fork(rank, fault, strategy, ranks, folder) for rank in range(ranks)]
    waiting = {rank for rank in range(ranks) if rank != LOST}
    codes = {}
    end = time.monotonic() + STARTED_S
    while waiting and time.monotonic() < end:
        for rank in sorted(waiting):
            pid, status = os.waitpid(pids[rank], os.WNOHANG)
            if pid:
                codes[rank] = os.waitstatus_to_exitcode(status)
                waiting.remove(rank)
        time.sleep(0.02)
    for rank in {LOST, *waiting}:
        os.kill(pids[rank], signal.SIGKILL)  # ends a halted process, too
        os.waitpid(pids[rank], 0)
    print(f"exit codes {codes}, ranks without an end: {sorted(waiting)}", flush=True)
    return int(bool(waiting) or any(codes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]))
