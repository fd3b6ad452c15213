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
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from tests.lost_ranks import STARTED_S, ranks_without_error
from torch_fdattn.dist import SequenceShards, ring_attention

LOST = 1
LIMIT_S = 3.0
#: Beyond the limit, on a machine that does other things as well: a call has several collectives.
SLACK_S = 10.0


def run(rank: int, fault: str, strategy: str, ranks: int, folder: str) -> None:
    dist.init_process_group(  # the store is a file: no rank's death takes it away
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=STARTED_S),
    )  # fmt: skip
    shards = SequenceShards.zigzag(4 * ranks, ranks)
    lengths = [shards.lengths[rank]] * 3
    if strategy == "query_split":
        lengths[1:] = [4 * ranks] * 2
    q, k, v = (torch.randn(1, ranks, length, 16).requires_grad_() for length in lengths)
    groups, options = [dist.group.WORLD], dict(causal=True, strategy=strategy)
    if strategy == "ulysses_ring":  # one node of all ranks
        mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("nodes", "places"))
        groups += (hierarchy := [mesh[name].get_group() for name in ("places", "nodes")])
        options["hierarchy"] = tuple(group.group_name for group in hierarchy)

    def attend():
        out, _ = ring_attention(q, k, v, None, shards=shards, **options)
        return out.sum()

    attend().backward()
    loss = attend()
    dist.barrier()
    if rank == LOST:
        os.kill(os.getpid(), signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
    for group in groups:
        _set_pg_timeout(timedelta(seconds=LIMIT_S), group)
    start = time.monotonic()
    try:
        loss.backward() if fault == "backward" else attend()
    except RuntimeError as error:
        took = time.monotonic() - start
        assert took < LIMIT_S + SLACK_S, f"{took} s"
        print(f"rank {rank}: {str(error).splitlines()[0]} after {took:.1f} s", flush=True)
        return
    raise AssertionError("no exception")


def main(fault: str, strategy: str, ranks: int, folder: str) -> int:
    return int(not ranks_without_error(run, (fault, strategy, ranks, folder), ranks, {LOST}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]))
