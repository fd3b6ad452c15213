"""The op `fdattn::dist_merge`: partial results of all ranks, merged through memory that the ranks map.

One file a strategy does the work; here are the op, and what all of them need: ranks of one host that can map
each other's memory.
"""

from __future__ import annotations

import os
import socket
import weakref
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from torch_fdattn import checks
from torch_fdattn.dist.groups import rank_and_size
from torch_fdattn.dist.symm.faults import raise_faults
from torch_fdattn.ops import library

if TYPE_CHECKING:
    from torch_fdattn.ops.decode.launch import Unmerged

ONE_SIDED = ("symm_all_gather", "push", "push_tiled", "two_shot", "fused")
#: Whether `fused` merges the parts of a split local decode itself (`fused_parts.py`). Ranks need not agree on it.
MERGES_PARTS = True

_available: weakref.WeakKeyDictionary[object, dict[str, str | None]] = weakref.WeakKeyDictionary()


def available(group_name: str, device: torch.device) -> bool:
    """Whether the group's ranks can map each other's memory; see `obstacle`."""
    return obstacle(group_name, device) is None


def obstacle(group_name: str, device: torch.device) -> str | None:
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
        known[device.type] = _find_obstacle(group, device)
    return known[device.type]


def expect_mapped(what: str, group_name: str, device: torch.device) -> None:
    """Refuses `what` in a group whose ranks cannot map each other's memory."""
    why_not = obstacle(group_name, device)
    if why_not is not None:
        raise NotImplementedError(
            f"{what} needs ranks that map each other's memory: {why_not}; 'all_gather' runs everywhere"
        )


def _find_obstacle(group, device: torch.device) -> str | None:
    mine = _about_this_rank(device)
    everywhere: list[dict] = [{}] * group.size()
    dist.all_gather_object(everywhere, mine, group=group)
    for rank, theirs in enumerate(everywhere):
        if theirs["obstacle"]:
            return f"rank {rank}: {theirs['obstacle']}"
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
    return {"host": _host(), "device": name, "kind": kind, "obstacle": reason}


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


def merge(
    out: Tensor, lse: Tensor, dtype: torch.dtype, group_name: str, strategy: str, head_sharded: bool
) -> tuple[Tensor, Tensor]:
    """The merged (out in dtype, lse fp32) of every rank's partial out (B, H, T, DV) and lse (B, H, T), fp32.

    head_sharded: of this rank's H / W heads alone.

    Raises:
        NotImplementedError: the ranks cannot map each other's memory.
        PeerTimeout: in an earlier call of this strategy a rank's part did not come.
    """
    return torch.ops.fdattn.dist_merge(
        out, lse, group_name, strategy, dtype, head_sharded, rank_and_size(group_name)[1]
    )


def merge_parts(
    out: Tensor, lse: Tensor, unmerged: Unmerged, dtype: torch.dtype, group_name: str, head_sharded: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`merge` by `fused` of what a local decode has left in parts; without the op, so for eager calls alone."""
    expect_mapped("strategy 'fused'", group_name, out.device)
    from torch_fdattn.dist.decode import fused_parts

    return fused_parts.merge(out, lse, unmerged, dtype, group_name, head_sharded)


def _merge(part, part_lse, group_name, strategy, dtype, head_sharded, world_size):
    _check(part, part_lse, strategy, head_sharded, world_size)
    expect_mapped(f"strategy {strategy!r}", group_name, part.device)
    if part.numel() == 0:
        return _merge_fake(part, part_lse, group_name, strategy, dtype, head_sharded, world_size)
    module = __import__(f"torch_fdattn.dist.decode.{strategy}", fromlist=["merge"])
    return module.merge(part, part_lse, dtype, group_name, head_sharded)


def _check(part, part_lse, strategy, head_sharded, world_size) -> None:
    if strategy not in ONE_SIDED:
        raise ValueError(f"strategy must be one of {ONE_SIDED}, got {strategy!r}")
    checks.expect_4d("out", part)
    checks.expect_shape("lse", part_lse, tuple(part.shape[:3]), "out")
    checks.expect_dtype("lse", part_lse, torch.float32, "every exchange")
    checks.expect_dtype("out", part, torch.float32, "every exchange")
    if not part_lse.is_contiguous():
        raise ValueError(f"lse must be contiguous, got strides {part_lse.stride()}")
    if head_sharded and part.shape[1] % world_size:
        raise ValueError(
            f"out must have heads that {world_size} ranks divide evenly, got {part.shape[1]}"
        )


def _merge_fake(part, part_lse, group_name, strategy, dtype, head_sharded, world_size):
    batch, heads, q_len, v_dim = part.shape
    if head_sharded:
        heads = heads // world_size
    out = part.new_empty(batch, heads, q_len, v_dim, dtype=dtype)
    return out, part.new_empty(batch, heads, q_len)


library.define_raw(
    "dist_merge(Tensor out, Tensor lse, str group_name, str strategy, ScalarType dtype, bool head_sharded, "
    "int world_size) -> (Tensor, Tensor)",
    _merge,
    _merge_fake,
)
