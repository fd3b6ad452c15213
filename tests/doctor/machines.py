"""Machines and environments that this machine is not, for the doctor to judge."""

from __future__ import annotations

from torch_fdattn.doctor import torchrun
from torch_fdattn.doctor.machine import Gpu, Machine

SMI = [("NVIDIA H100 80GB HBM3", "580.65.06"), ("NVIDIA H100 80GB HBM3", "580.65.06")]


TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


REACHABLE = torchrun.Network(
    resolve=lambda name, port: ["127.0.0.1"],
    connect=lambda name, port: None,
    listen=lambda port: None,
    is_local=lambda address: True,
)


def cpu_machine(**changes):
    facts = {
        "python": "3.11.7",
        "system": "Linux",
        "torch": "2.13.0+cpu",
        "triton": "3.7.1",
        "numpy": "2.3.0",
        "gloo": True,
        "shm": (8 << 30, 8 << 30),
    }
    return Machine(**{**facts, **changes})


def gpu_machine(count=2, **changes):
    facts = {
        "torch": "2.11.0+cu130",
        "cuda": "13.0",
        "arches": ["sm_80", "sm_90", "sm_100", "compute_120"],
        "nccl": "2.28.9",
        "gpus": [Gpu("NVIDIA H100 80GB HBM3", (9, 0), 79.2, f"GPU-{i}") for i in range(count)],
        "peers": [[True] * count] * count if count > 1 else [],
        "smi": SMI[:1] * count,
    }
    return cpu_machine(**{**facts, **changes})


def one(findings, level, part):
    """The one finding of that level whose text holds `part`."""
    found = [finding for finding in findings if part in finding.text]
    assert len(found) == 1, f"{part!r} found {len(found)} times in {findings}"
    assert found[0].level == level, found[0]
    return found[0]


def launch_of(changes, network=REACHABLE):
    env = {**TORCHRUN, **changes}
    return torchrun.check_launch({k: v for k, v in env.items() if v is not None}, network)


def raising(error):
    def probe(*_, **__):
        raise error

    return probe
