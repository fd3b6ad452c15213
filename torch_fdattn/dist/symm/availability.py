"""Whether the ranks of a group can share symmetric memory, and why not: what every one-sided exchange needs."""

from __future__ import annotations

import os
import socket
import weakref

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_fdattn.dist.symm.faults import raise_faults
from torch_fdattn.ops import library

_available: weakref.WeakKeyDictionary[object, dict[str, str | None]] = weakref.WeakKeyDictionary()


def available(group_name: str, device: torch.device) -> bool:
    """Whether the group's ranks can share symmetric memory; see `unsupported_reason`."""
    return unsupported_reason(group_name, device) is None


def unsupported_reason(group_name: str, device: torch.device) -> str | None:
    """Why the one-sided strategies cannot run in this group; None: they can.

    A collective at the first call of a group, which all ranks make; later the same answer. While a CUDA graph is
    captured, a group that was never asked is taken for one that cannot.
    """
    group = distributed_c10d._resolve_process_group(group_name)
    known = _available.setdefault(group, {})
    if device.type not in known:
        raise_faults(group_name)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "the group has not been used before this CUDA graph's capture"
        known[device.type] = _find_unsupported_reason(group, device)
    return known[device.type]


def expect_mapped(what: str, group_name: str, device: torch.device) -> None:
    """Refuses `what` in a group whose ranks cannot share symmetric memory."""
    why_not = unsupported_reason(group_name, device)
    if why_not is not None:
        raise NotImplementedError(
            f"{what} needs ranks that share symmetric memory: {why_not}; 'all_gather' runs everywhere"
        )


def _find_unsupported_reason(group, device: torch.device) -> str | None:
    mine = _about_this_rank(device)
    everywhere: list[dict] = [{}] * group.size()
    dist.all_gather_object(everywhere, mine, group=group)
    for rank, theirs in enumerate(everywhere):
        if theirs["unsupported_reason"]:
            return f"rank {rank}: {theirs['unsupported_reason']}"
    if len({x["host"] for x in everywhere}) > 1:
        return "the group's ranks are on several hosts"
    if len({x["kind"] for x in everywhere}) > 1:  # tiles that travel follow from it
        return "the group's GPUs are of several compute capabilities"
    unreachable = [_cannot_reach(device, [x["device"] for x in everywhere])] * group.size()
    dist.all_gather_object(unreachable, unreachable[group.rank()], group=group)
    for rank, reason in enumerate(unreachable):
        if reason:
            return f"rank {rank}: {reason}"
    devices = [x["device"] for x in everywhere]
    shared = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "0") not in ("", "0")
    if device.type == "cuda" and len(set(devices)) < len(devices) and not shared:
        return "several ranks use the same GPU"
    return None


def _about_this_rank(device: torch.device) -> dict:
    reason = None
    if device.type == "cuda":
        if torch.version.hip is not None:
            reason = "the one-sided kernels are for NVIDIA GPUs"
    elif device.type != "cpu":
        reason = f"no memory of {device.type} devices is shared"
    elif not library.INTERPRET:
        reason = "CPU tensors go through the kernels with TRITON_INTERPRET=1 alone"
    name, kind = "", None
    if device.type == "cuda":
        name = str(torch.cuda.get_device_properties(device).uuid)
        kind = torch.cuda.get_device_capability(device)
    return {"host": _host(), "device": name, "kind": kind, "unsupported_reason": reason}


def _cannot_reach(device: torch.device, uuids: list[str]) -> str | None:
    """Which of the ranks' GPUs this rank's has no peer access to, as far as this process sees them."""
    if device.type != "cuda":
        return None
    for index in range(torch.cuda.device_count()):
        other = str(torch.cuda.get_device_properties(index).uuid)
        ours = index != device.index and other in uuids
        if ours and not torch.cuda.can_device_access_peer(device.index, index):
            return f"GPU {device.index} has no peer access to GPU {index}"
    return None


def _host() -> str:
    """The same on all processes that can share memory, and on no others."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot} {os.stat('/dev/shm').st_dev} {os.stat('/dev/shm').st_ino}"
    except OSError:
        return socket.gethostname()
