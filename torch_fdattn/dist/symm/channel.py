"""Channels: what a one-sided exchange keeps between calls, by (group, purpose).

A channel is symmetric memory (two halves, `signals.py`), its epoch and clocks on the device, and
the word that a time-out leaves for the host. It is made at the first call, which all ranks make with the same
sizes, and grows by powers of two (`size_of_half`); what was grown out of stays until the group goes (captured graphs hold its
address). Purposes and groups share nothing, so overlapping groups do not interfere.

Calls on one channel come in one order, the same on all ranks. Where they come on several streams, a call
waits on the device for the one before. (Replays of a captured graph are not seen here: a program that
replays on one stream and calls on another orders the two itself. So does one whose groups have calls of
thousands of rows on several streams at once: waiting programs of one group can fill a device, and those of
another group a peer, until both time out.)
"""

from __future__ import annotations

import weakref

import torch
from torch.distributed import distributed_c10d

from torch_fdattn.dist.symm.faults import FaultWord, raise_faults
from torch_fdattn.dist.symm.signals import STATE_SIZE
from torch_fdattn.dist.symm.symmetric_memory import PeerMemory, allocate
from torch_fdattn.ops.launch import power_of_two

_MIN_BYTES = 1 << 16
#: Room for flags beside data, whose size is a power of two as often as not.
_FLAG_BYTES = 4096

# Weak: a group's channels go with it, and its name may come again.
_channels: weakref.WeakKeyDictionary[object, dict[tuple[str, torch.device], list[Channel]]] = (
    weakref.WeakKeyDictionary()
)


class Channel:
    """One purpose's memory in one group.

    Attributes:
        rank, world: of the group.
        memory: two halves of half_bytes each, on every rank.
        state: int64, `signals.py`.
        fault: the word that a time-out leaves.
        outgrown: a larger one has its place.
    """

    def __init__(
        self, group_name: str, purpose: str, half_bytes: int, device: torch.device
    ) -> None:
        group = distributed_c10d._resolve_process_group(group_name)
        self.rank, self.world = group.rank(), group.size()
        self.half_bytes = half_bytes
        self.memory: PeerMemory = allocate(group_name, 2 * half_bytes, device)
        with torch.inference_mode(False):  # or else it could be written in inference mode alone
            self.state = torch.zeros(STATE_SIZE, dtype=torch.int64, device=device)
            self.state[0] = 1
        if device.type == "cuda":
            # Kernels may read it before the one that comes before them has ended.
            torch.cuda.synchronize(device)
        self.fault = FaultWord(group_name, self.rank, purpose.partition("/")[0], device)
        self.outgrown = False
        self._stream: torch.cuda.Stream | None = None
        self._raw_stream = 0

    def enter(self) -> None:
        """Before a launch: an earlier time-out is raised, and calls on another stream waited for."""
        self.fault.raise_if_set()
        if not self.state.is_cuda:
            return
        raw = torch._C._cuda_getCurrentRawStream(self.state.device.index)
        if raw == self._raw_stream and self._stream is not None:
            return
        if torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(self.state.device)
        if self._stream is not None:
            stream.wait_stream(self._stream)
        self._stream, self._raw_stream = stream, raw

    def leave(self) -> None:
        """After a call that failed when it had sent, but not moved the epoch on: what it sent is not the next one's."""
        epoch = self.state[:1]
        epoch.copy_(torch.where(epoch == 0xFFFFFFFF, 2, epoch + 1))


def channel(group_name: str, purpose: str, half_bytes: int, device: torch.device) -> Channel:
    """The group's channel for a purpose, of at least this many bytes a half."""
    group = distributed_c10d._resolve_process_group(group_name)
    channels = _channels.setdefault(group, {}).setdefault((purpose, device), [])
    if not channels or channels[-1].half_bytes < half_bytes:
        raise_faults(group_name)  # a dead rank would not come to the exchange of addresses
        larger = Channel(group_name, purpose, size_of_half(half_bytes), device)
        for smaller in channels:
            smaller.outgrown = True
        channels.append(larger)
    return channels[-1]


def size_of_half(nbytes: int) -> int:
    """What a half of so many bytes takes: a power of two, with _FLAG_BYTES beside it where that is less."""
    whole = power_of_two(max(nbytes, _MIN_BYTES))
    return min(whole, power_of_two(max(nbytes - _FLAG_BYTES, _MIN_BYTES)) + _FLAG_BYTES)
