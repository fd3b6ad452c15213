"""What becomes of a wait for a peer that never comes.

Kernels of the one-sided strategies wait for other ranks' data, and every wait is bounded (`set_timeout`).
One that times out leaves a word that the host can read, gives NaN, and ends; so do the later kernels of the
same channel, at once. The exception comes at the next call that uses the channel or at `check`. Nothing is
left in doubt on the device: survivors may go on in a new process group.
"""

from __future__ import annotations

import ctypes
import math
import weakref

import torch
from torch.distributed import distributed_c10d

from torch_fdattn.dist.groups import Group, name_of

_MAX_SECONDS = 1e6
_timeout_s = 10.0


class PeerTimeout(RuntimeError):
    """A rank's data did not come in time.

    Attributes:
        rank: this process's rank in the group.    peer: the rank that was waited for; -1: any other one.
        strategy: who waited, e.g. "fused".        epoch: which of its calls on the group; 0: none of them.

    Examples:
        >>> try:
        ...     torch_fdattn.dist.check()
        ... except torch_fdattn.dist.PeerTimeout as lost:
        ...     print(f"rank {lost.peer} did not come")
    """

    def __init__(
        self, group_name: str, rank: int, peer: int, strategy: str, epoch: int, said: str = "",
    ) -> None:  # fmt: skip
        """said: what happened, if not that a rank waited in vain."""
        self.rank, self.peer, self.strategy, self.epoch = rank, peer, strategy, epoch
        super().__init__(
            said
            or f"rank {rank} waited for rank {peer} of group {group_name!r} in vain (strategy {strategy!r}, "
            f"epoch {epoch}): it died, hangs, or did not make the same call. The results since are NaN; "
            "make a new process group of the surviving ranks to go on"
        )


def set_timeout(seconds: float) -> None:
    """Sets how long one-sided strategies wait for a peer, in seconds; 10 unless set.

    For calls from now on: a captured CUDA graph keeps the limit of its capture.

    Examples:
        >>> torch_fdattn.dist.set_timeout(2.5)
        >>> torch_fdattn.dist.set_timeout(-1)
        Traceback (most recent call last):
            ...
        ValueError: seconds must be above 0 and at most 1e+06, got -1
        >>> torch_fdattn.dist.set_timeout(10)
    """
    global _timeout_s
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool):
        raise TypeError(f"seconds must be a number, got {type(seconds).__name__}")
    if not 0 < seconds <= _MAX_SECONDS or math.isnan(seconds):
        raise ValueError(f"seconds must be above 0 and at most {_MAX_SECONDS:g}, got {seconds}")
    _timeout_s = float(seconds)


def timeout_ns() -> int:
    """The limit of a wait, in nanoseconds."""
    return int(_timeout_s * 1e9)


class FaultWord:
    """An int64 that kernels write and the host reads without waiting: 0, or epoch · 2**32 + peer + 1."""

    def __init__(self, group_name: str, rank: int, strategy: str, device: torch.device) -> None:
        self.device = device
        self.tensor = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._word = ctypes.c_int64.from_address(self.tensor.data_ptr())
        self.group_name, self._where = group_name, (rank, strategy)
        self._group = weakref.ref(distributed_c10d._resolve_process_group(group_name))
        _registry.add(self)
        _kept.append(self.tensor)

    def is_left(self) -> bool:
        """Whether its group was destroyed; tracebacks may keep this alive for longer than that."""
        return self._group() not in distributed_c10d._world.pg_map

    def raise_if_set(self) -> None:
        word = self._word.value
        if word:
            rank, strategy = self._where
            peer, epoch = (word & 0xFFFFFFFF) - 1, (word >> 32) & 0xFFFFFFFF
            raise PeerTimeout(self.group_name, rank, peer, strategy, epoch)


_registry: weakref.WeakSet[FaultWord] = weakref.WeakSet()
#: A kernel or a captured graph may write there after the group and its channels have gone: 8 bytes a channel.
_kept: list[torch.Tensor] = []


def raise_faults(*group_names: str) -> None:
    """Raises what the kernels left behind in these groups, or in any where none is named, without waiting."""
    live = sorted((word for word in _registry if not word.is_left()), key=id)
    for word in live:
        if not group_names or word.group_name in group_names:
            word.raise_if_set()


def check(*groups: Group, synchronize: bool = True) -> None:
    """Raises what the kernels so far left behind.

    Args:
        groups: of these alone, each a group, a mesh or a name. Default: of all that this process is in.
        synchronize: first wait for the devices. False where the caller has waited itself, as an engine
            that has read its tokens.

    Raises:
        PeerTimeout: a peer's data did not come in time. It is raised again at every later check, and at every
            call on that group that would use what is lost or communicate anew, until the group is destroyed.

    Examples:
        >>> torch_fdattn.dist.check()  # all came
        >>> torch_fdattn.dist.check(torch.distributed.group.WORLD, synchronize=False)
    """
    if synchronize:
        for device in {word.device for word in _registry if word.device.type == "cuda"}:
            torch.cuda.synchronize(device)
    raise_faults(*(name_of(group, "groups") for group in groups))
