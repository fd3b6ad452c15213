"""Shared memory and containers."""

from __future__ import annotations

from .findings import Finding
from .machine import Machine

_ENOUGH = 2**30


def check_shared_memory(machine: Machine, processes: int) -> list[Finding]:
    """/dev/shm carries NCCL's and gloo's exchange inside one host, and DataLoader's batches."""
    if machine.shm is None:
        if machine.system == "Linux" and "/dev/shm" not in machine.unread:
            return [Finding("note", "shm", "there is no /dev/shm", "mount a tmpfs there")]
        return []
    size, free = machine.shm
    text = f"/dev/shm has {_size(size)}, {_size(free)} free"
    if size >= _ENOUGH:
        return [Finding("ok", "shm", text)]
    several = processes > 1 or len(machine.gpus) > 1
    text += ": too little for several processes (NCCL asks for up to 1 GiB)"
    remedy = "docker run --ipc=host, or --shm-size=8g; elsewhere mount -o remount,size=8g /dev/shm"
    return [Finding("warn" if several else "note", "shm", text, remedy)]


def check_container(machine: Machine) -> list[Finding]:
    if "container" in machine.unread:
        return []
    if not machine.container:
        return [Finding("ok", "container", "no sign of one")]
    return [Finding("ok", "container", f"yes ({machine.container})")]


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
