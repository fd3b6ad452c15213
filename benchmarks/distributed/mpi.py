"""Ranks that mpirun started, and MPI as a baseline: partial results staged through host memory.

`adopt` turns MPI's variables into torchrun's, so that everything else joins a run as it does there. Where
the ranks meet is sent round by MPI itself. Needs mpi4py and an MPI library (the extra `bench`).
"""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

#: (rank, size, local rank, local size) as MPICH's launcher and Open MPI's name them.
_NAMES = (
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
)
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
NOT_STARTED = "needs ranks that mpirun started: mpirun -np N python -m benchmarks dist_decode …"


def under_mpirun() -> bool:
    return any(os.environ.get(names[0]) and os.environ.get(names[1]) for names in _NAMES)


def adopt() -> None:
    """Sets torchrun's variables where mpirun started this process and nobody else set them.

    Raises:
        ValueError: mpi4py is missing, or belongs to another MPI than mpirun.
    """
    if os.environ.get("RANK") or not under_mpirun():
        return
    names = next(names for names in _NAMES if os.environ.get(names[0]))
    rank, size = (int(os.environ[name]) for name in names[:2])
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as failure:
        raise ValueError(f"mpirun needs mpi4py (the extra bench): {failure}") from failure
    if (found := MPI.COMM_WORLD.Get_size()) != size:
        raise ValueError(
            f"{names[1]} says {size} ranks, but mpi4py's MPI has {found}: mpirun must be that of the "
            f"same library ({MPI.Get_library_version().splitlines()[0]})"
        )
    local = [os.environ.get(names[2]) or rank, os.environ.get(names[3]) or size]
    os.environ.update(zip(_TORCHRUN, map(str, (rank, size, *local)), strict=True))
    # As torchrun does: ranks of one machine would otherwise each take all of its cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    one_machine = int(local[1]) == size
    meeting = _free_address(one_machine) if rank == 0 else None
    address, port = MPI.COMM_WORLD.bcast(meeting)
    os.environ.setdefault("MASTER_ADDR", address)
    os.environ.setdefault("MASTER_PORT", str(port))


def _free_address(one_machine: bool) -> tuple[str, int]:
    with socket.socket() as free:
        free.bind(("", 0))
        return "127.0.0.1" if one_machine else socket.gethostname(), free.getsockname()[1]


def finish() -> None:
    """To be called by a rank that leaves without Python's own exit: mpirun would call that a crash."""
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.Finalize()


class HostStaged:
    """All ranks' `send` into `received` (W, *send.shape) by way of (pinned) host memory and MPI_Allgather."""

    def __init__(self, send: Tensor, received: Tensor) -> None:
        if not under_mpirun():
            raise NotImplementedError(NOT_STARTED)
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD
        self._send, self._received = send, received
        self._host_send, self._host_received = (_host_like(x) for x in (send, received))

    def __call__(self) -> None:
        self._host_send.copy_(self._send)  # waits for the device
        self._comm.Allgather(self._host_send.numpy(), self._host_received.numpy())
        self._received.copy_(self._host_received, non_blocking=True)


def _host_like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape, device="cpu", pin_memory=x.is_cuda)
