"""Ranks as forks of one process, which has imported torch for all, some of which are lost: fault_worker.py, ring_fault_worker.py."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Set

#: That all others are waited for.
STARTED_S = 240.0


def ranks_without_error(run: Callable[..., None], arguments: tuple, ranks: int, lost: Set[int]) -> bool:  # fmt: skip
    """Whether run(rank, *arguments) ends without an exception on all ranks but the lost ones, which are killed at last."""
    pids = [_fork(run, rank, arguments) for rank in range(ranks)]
    waiting, codes = set(range(ranks)) - lost, {}
    end = time.monotonic() + STARTED_S
    while waiting and time.monotonic() < end:
        for rank in sorted(waiting):
            pid, status = os.waitpid(pids[rank], os.WNOHANG)
            if pid:
                codes[rank] = os.waitstatus_to_exitcode(status)
                waiting.remove(rank)
        time.sleep(0.02)
    for rank in waiting | lost:
        os.kill(pids[rank], signal.SIGKILL)  # ends a halted process, too
        os.waitpid(pids[rank], 0)
    print(f"exit codes {codes}, ranks without an end: {sorted(waiting)}", flush=True)
    return not waiting and not any(codes.values())


def _fork(run: Callable[..., None], rank: int, arguments: tuple) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        run(rank, *arguments)
        print(f"rank {rank}: as it should", flush=True)
        code = 0
    except BaseException:
        print(f"rank {rank}: {traceback.format_exc()}", flush=True)
    os._exit(code)  # past the teardown of backends, of which a dead peer is no friend
