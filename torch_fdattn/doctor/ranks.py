"""The processes of one launch: they find each other in torch's store, compare what they are, add up a tensor
together, and speak in turn. A process that does not come is named within the time limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from . import trial
from .findings import Finding
from .machine import Machine
from .remedies import remedy_for
from .torchrun import TorchrunLaunch, connect

Card = dict[str, Any]  # what a process says of itself
_LATE = "look at that process's own output; on several machines check firewall and MASTER_ADDR"
_TOGETHER = {
    "gloo": "if no rank died: set GLOO_SOCKET_IFNAME to the network that joins the machines",
    "nccl": "run again with NCCL_DEBUG=INFO; on several networks set NCCL_SOCKET_IFNAME",
}
_START_SECONDS = 30.0  # for a child to import torch on a busy machine
_LEAVE_SECONDS = 5.0


class Rendezvous:
    """A store under a prefix of its own for this run, with everyone's card once all have come."""

    def __init__(self, launch: TorchrunLaunch, seconds: float) -> None:
        import torch.distributed as dist

        self.launch = launch
        self.cards: dict[int, Card] = {}
        hosting = launch.rank == 0 and not launch.agent_store
        self.host = "localhost" if hosting else launch.host
        if not hosting:
            # TCPStore itself tries for more than twice its time limit, and prints a C++ trace.
            connect(launch.host, launch.port, seconds)
        store = dist.TCPStore(
            self.host,
            launch.port,
            None,
            is_master=hosting,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
        # torchrun's store outlives restarts, and a process may call the doctor twice.
        base = f"fdattn_doctor/{launch.restart}"
        turn = store.add(f"{base}/turns/{launch.rank}", 1)
        self.prefix = f"{base}/{turn}"
        self._store = dist.PrefixStore(self.prefix, store)

    def check_in(self, card: Card, seconds: float) -> list[int]:
        """Leaves the card and takes the others'; gives the ranks that did not come."""
        self._store.set(f"card/{self.launch.rank}", json.dumps(card))
        ranks = list(range(self.launch.world))
        self._await([f"card/{rank}" for rank in ranks], seconds)
        for rank in ranks:
            if self._store.check([f"card/{rank}"]):
                self.cards[rank] = json.loads(self._store.get(f"card/{rank}"))
        return [rank for rank in ranks if rank not in self.cards]

    def await_first(self, seconds: float) -> None:
        """Waits until rank 0 has shown its screen, so that lines do not mingle."""
        if self.launch.rank != 0:
            with contextlib.suppress(RuntimeError):  # the store went with the process that held it
                self._await(["shown"], seconds)

    def leave(self) -> None:
        """Waits for the others to have spoken: torchrun ends all processes when one has failed, and
        the store ends with the process that holds it."""
        with contextlib.suppress(RuntimeError):
            if self.launch.rank == 0:
                self._store.set("shown", "1")
            self._store.set(f"left/{self.launch.rank}", "1")
            self._await([f"left/{rank}" for rank in self.cards], _LEAVE_SECONDS)

    def _await(self, keys: list[str], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


def own_card(machine: Machine, launch: TorchrunLaunch) -> Card:
    device, gpu = "cpu", ""
    if machine.gpus:
        # A launcher may show each process one GPU alone, which is then its number 0.
        index = launch.local_rank % len(machine.gpus)
        device = f"cuda:{index}"
        gpu = machine.gpus[index].uuid or f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')}/{index}"
    return {
        "host": socket.gethostname(),
        "device": device,
        "gpu": gpu,
        "nccl": machine.nccl,
        "versions": {"torch": machine.torch, "triton": machine.triton, "NCCL": machine.nccl},
    }


def join(
    launch: TorchrunLaunch, card: Card, seconds: float
) -> tuple[Rendezvous | None, list[Finding]]:
    """The rendezvous once the store could be reached, and what its check-in found."""
    where = f"{launch.host}:{launch.port}"
    start = time.monotonic()
    try:
        rendezvous = Rendezvous(launch, seconds)
    except Exception as error:
        text = f"the store at {where} could not be reached within {seconds:.0f} s: {error}"
        return None, [Finding("fail", "ranks", text, remedy_for(str(error), _LATE))]
    try:
        missing = rendezvous.check_in(card, max(1.0, seconds - (time.monotonic() - start)))
    except Exception as error:
        return None, [Finding("fail", "ranks", f"the store at {where} failed: {error}", _LATE)]
    if missing:
        shown = ", ".join(map(str, missing[:16])) + (" ..." if len(missing) > 16 else "")
        text = (
            f"{len(missing)} of {launch.world} ranks did not come within {seconds:.0f} s: {shown}"
        )
        return rendezvous, [Finding("fail", "ranks", text, _LATE)]
    return rendezvous, compare(rendezvous.cards)


def compare(cards: Mapping[int, Card]) -> list[Finding]:
    """Whether processes that must work together can: versions, and one GPU each."""
    hosts = len({card["host"] for card in cards.values()})
    found = [Finding("ok", "ranks", f"all {len(cards)} ranks met, on {hosts} machine(s)")]
    for name in ("torch", "triton", "NCCL"):
        versions: dict[str, list[int]] = {}
        for rank, card in cards.items():
            versions.setdefault(str(card["versions"][name]), []).append(rank)
        if len(versions) > 1:
            shown = "; ".join(
                f"{version} on rank {ranks[0]}" for version, ranks in versions.items()
            )
            text = f"{name} differs between ranks: {shown}"
            found.append(Finding("warn", "ranks", text, "install the same versions everywhere"))
    without = [rank for rank, card in cards.items() if not card["gpu"]]
    if without and len(without) < len(cards):
        text = f"rank {without[0]} sees no GPU, but others do ({len(without)} of {len(cards)})"
        remedy = "make GPUs visible to all ranks, or to none"
        found.append(Finding("fail", "ranks", text, remedy))
    for first, second in _shared_gpus(cards):
        text = f"ranks {first} and {second} use one and the same GPU: NCCL refuses that"
        remedy = "start at most one process per GPU: torchrun --nproc-per-node <GPUs>"
        found.append(Finding("fail", "ranks", text, remedy))
    return found


def add_up(rendezvous: Rendezvous, seconds: float) -> Finding:
    """A bounded all-reduce: NCCL where every rank has a GPU of its own, else gloo on the CPU."""
    cards, launch = rendezvous.cards, rendezvous.launch
    own = all(card["gpu"] and card["nccl"] for card in cards.values()) and not _shared_gpus(cards)
    backend, device = ("nccl", cards[launch.rank]["device"]) if own else ("gloo", "cpu")
    argument = {
        "host": rendezvous.host,
        "port": launch.port,
        "prefix": f"{rendezvous.prefix}/all_reduce",
        "rank": launch.rank,
        "world": launch.world,
        "backend": backend,
        "device": device,
        "seconds": seconds,
    }
    # With this NCCL raises at the time-out; otherwise its watchdog ends the process.
    result = trial.run(
        "all_reduce", argument, seconds + _START_SECONDS, TORCH_NCCL_BLOCKING_WAIT="1"
    )
    what = f"{backend} on {device}"
    if "error" in result:
        late = f"not done within {seconds:.0f} s: " if "timeout" in result["error"] else ""
        text = f"{what}: {late}{result['error']}"
        return Finding("fail", "all-reduce", text, remedy_for(text, _TOGETHER[backend]))
    text = (
        f"{what}: right, {trial.ELEMENTS * 4 / 2**20:.0f} MiB in {result['seconds'] * 1e3:.2f} ms"
    )
    return Finding("ok", "all-reduce", text)


def _shared_gpus(cards: Mapping[int, Card]) -> list[tuple[int, int]]:
    """Pairs of ranks on one GPU, each later rank named once with the first that has it."""
    first: dict[tuple[str, str], int] = {}
    shared = []
    for rank, card in sorted(cards.items()):
        if card["gpu"] and first.setdefault((card["host"], card["gpu"]), rank) != rank:
            shared.append((first[card["host"], card["gpu"]], rank))
    return shared
