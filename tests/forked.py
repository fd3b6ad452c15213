"""Scripts in processes that a server forks, which has imported torch: they begin where a new interpreter would after seconds.

A script gets what `python FILE` or torchrun would give it: `__main__`, its arguments, its folder on the path, the
variables of a rank. What the server has imported is the exception: of imports and their order such a run says nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch.multiprocessing

from tests.ports import free_port

#: What takes long to import, and does nothing else when it is imported.
PRELOADED = ("torch_fdattn.dist", "torch._inductor.compile_fx", "transformers.models.auto")


def _imported() -> list[str]:
    """PRELOADED; a package that is not there is left to the script."""
    return [name for name in PRELOADED if importlib.util.find_spec(name.split(".")[0])]


def context() -> multiprocessing.context.ForkServerContext:
    """Where processes of this one are forked; for functions, too: `torch.multiprocessing.start_processes`."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(_imported())
    return found


def call_on_ranks(function: Callable, arguments: tuple, ranks: int) -> None:
    """function(rank, *arguments) in a process for each rank."""
    context()
    torch.multiprocessing.start_processes(
        function, arguments, nprocs=ranks, start_method="forkserver"
    )


def _begin(script: str, arguments: Sequence[str], environment: dict[str, str], out: str, err: str):
    for name, stream in ((out, sys.stdout), (err, sys.stderr)):
        with open(name, "w") as file:
            os.dup2(file.fileno(), stream.fileno())
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", torch.get_num_threads())))
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


class Forked(NamedTuple):
    """A process, and the files of what it writes."""

    process: multiprocessing.process.BaseProcess
    out: Path
    err: Path


@contextlib.contextmanager
def forked(
    script: Path, *arguments: str, environment: dict[str, str], ranks: int = 0
) -> Iterator[list[Forked]]:
    """A script in a process for each rank, or in one; those that have not ended are killed at the end."""
    server = context()
    port = str(free_port()) if ranks else ""
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks or 1):
            out, err = (Path(folder) / f"{stream}{rank}" for stream in ("out", "err"))
            variables = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }  # fmt: skip
            given = {**environment, **(variables if ranks else {})}
            process = server.Process(
                target=_begin, args=(str(script), arguments, given, str(out), str(err)), daemon=True
            )
            process.start()
            processes.append(Forked(process, out, err))
        try:
            yield processes
        finally:
            for process, _, _ in processes:
                process.kill()
                process.join()


def run_forked(
    script: Path, *arguments: str, environment: dict[str, str], ranks: int = 0, seconds: float
) -> list[subprocess.CompletedProcess[str]]:
    """The same to their end; their exit codes and what they wrote."""
    with forked(script, *arguments, environment=environment, ranks=ranks) as processes:
        done = []
        for process, out, err in processes:
            process.join(seconds)
            if process.exitcode is None:
                raise subprocess.TimeoutExpired([str(script), *arguments], seconds)
            texts = out.read_text(), err.read_text()
            done.append(subprocess.CompletedProcess([str(script)], process.exitcode, *texts))
        return done
