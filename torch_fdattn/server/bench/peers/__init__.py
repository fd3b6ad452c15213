"""Other engines at the same requests. Each is imported in a process of its own, which the measurement alone runs in."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from torch_fdattn.server.bench.workload import Workload

#: By the name that --peer takes: the module here, and the package that must be installed.
PEERS = {
    "nano-vllm": ("nano_vllm", "nanovllm"),
    "transformers": ("transformers_batching", "transformers"),
}


class PeerRun(NamedTuple):
    """A workload once."""

    seconds: float
    new_tokens: int


def missing_package(name: str) -> str | None:
    """The package that a peer needs and this environment has not."""
    package = PEERS[name][1]
    return package if importlib.util.find_spec(package) is None else None


def run_peer(name: str, folder: Path, workload: Workload, repeats: int = 2) -> list[PeerRun]:
    """Runs of the workload, by the model in a Hugging Face folder."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_run, name, folder, workload, repeats).result()


def _run(name: str, folder: Path, workload: Workload, repeats: int) -> list[PeerRun]:
    module = importlib.import_module(f"{__name__}.{PEERS[name][0]}")
    return module.run(folder, workload, repeats)
