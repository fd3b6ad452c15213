"""Chunks that copy engines move into other ranks' memory while processors multiply.

A call's copies go to addresses that the host knows, so that a captured graph copies to the same place at every
replay: there is one buffer, not one of odd and one of even epochs (`signals.py`), and it must be seen to be free.

    start     waits until every rank is done with what this one gave it in the call before ("free"), and writes this
              call's flag to a word of this rank's own memory, the stamp
    send      copies a chunk to a rank, and after it, in the same stream, the stamp: the chunk "arrived". No kernel, so
              it goes on while a kernel fills the device and waits for it
    tell      the stamp alone: the chunk lies ready in this rank's own memory, for the other one to `fetch`
    await_    waits for a rank's chunk, the first or the second one
    finish    waits for what nobody has waited for, tells every rank that its chunks were used, and moves the epoch on;
              also after an exception (`until_finished`), or the next call would take this one's chunks for its own

**Faults.** A wait that times out breaks the channel (`faults.py`). Copies cannot be called back: later calls of a
broken channel, and one that found a buffer not free, overwrite what others may still read. They take their flags back
first. A reader therefore looks at the flags again when it has read (`finish`), and what was read while a flag
changed is lost: NaN, and a fault.

Memory: words arrived[CHUNKS, W], free[W], stamp; the data from _DATA bytes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.channel import Channel, channel
from torch_fdattn.dist.faults import timeout_ns
from torch_fdattn.dist.signals import (
    BROKEN,
    as_words,
    await_flags,
    flag,
    may_send,
    next_epoch,
    raise_flags,
    read_epoch,
)
from torch_fdattn.ops.cuda_driver import copy_async, loaded
from torch_fdattn.ops.launch import on_device, power_of_two
from torch_fdattn.ops.repeated_launch import launch

_DATA = 4096
#: That a rank may give another in one call.
CHUNKS = tl.constexpr(2)
_MOST_RANKS = (_DATA // 8 - 1) // (CHUNKS.value + 1)
#: Elements that the one program of `finish` makes NaN at a time.
FILL = 1024


@triton.jit
def words_of(addresses_ptr, ranks, inside):
    """Pointers to the words of ranks."""
    return as_words(tl.load(addresses_ptr + ranks, mask=inside, other=0))


@triton.jit
def others_of(rank, WORLD: tl.constexpr, SOURCES: tl.constexpr):
    """(ranks (SOURCES,), which of them are other ranks)."""
    sources = tl.arange(0, SOURCES)
    return sources, (sources < WORLD) & (sources != rank)


@triton.jit(do_not_specialize=["limit_ns", "rank"])
def _start_kernel(addresses_ptr, state_ptr, fault_ptr, limit_ns, rank, WORLD: tl.constexpr, SOURCES: tl.constexpr):  # fmt: skip
    epoch = read_epoch(state_ptr)
    sources, others = others_of(rank, WORLD, SOURCES)
    here = as_words(tl.load(addresses_ptr + rank))
    used = others & (epoch != 1)  # nobody has used what is fresh
    free = await_flags(
        here + CHUNKS * WORLD + sources, used, sources, epoch, state_ptr, fault_ptr, limit_ns
    )
    sends = may_send(state_ptr, epoch)
    theirs = words_of(addresses_ptr, sources, others)
    none = tl.zeros_like(sources).to(tl.int64)
    lost = others & ((free == 0) | (sends == 0))
    for chunk in tl.static_range(CHUNKS):
        tl.atomic_xchg(theirs + chunk * WORLD + rank, none, mask=lost, sem="release", scope="sys")
    tl.store(here + (CHUNKS + 1) * WORLD, tl.where(sends, flag(epoch), 0))


@triton.jit(do_not_specialize=["limit_ns", "rank", "peer", "first"])
def _await_kernel(addresses_ptr, state_ptr, fault_ptr, limit_ns, rank, peer, first, SOURCES: tl.constexpr):  # fmt: skip
    """first: the chunk's first word."""
    epoch = read_epoch(state_ptr)
    sources = tl.arange(0, SOURCES)
    here = as_words(tl.load(addresses_ptr + rank)) + first
    await_flags(here + sources, sources == peer, sources, epoch, state_ptr, fault_ptr, limit_ns)


@triton.jit
def finish(
    outputs, counts, kept, epoch, addresses_ptr, state_ptr, rank, WORLD: tl.constexpr, SOURCES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`finish`, above, by one program, once all others of the call have read everything.

    outputs: pointers to results of so many elements, NaN if a chunk was not kept.
    """
    if (kept == 0) | (tl.load(state_ptr + BROKEN) != 0):
        for i in tl.static_range(len(outputs)):
            for first in range(0, counts[i], BLOCK):
                at = first + tl.arange(0, BLOCK)
                lost = tl.full([BLOCK], float("nan"), tl.float32).to(outputs[i].dtype.element_ty)
                tl.store(outputs[i] + at, lost, mask=at < counts[i])
    sources, others = others_of(rank, WORLD, SOURCES)
    theirs = words_of(addresses_ptr, sources, others)
    raise_flags(
        theirs + CHUNKS * WORLD + rank, others & may_send(state_ptr, epoch), next_epoch(epoch)
    )
    tl.store(state_ptr, next_epoch(epoch))


@triton.jit(do_not_specialize=["limit_ns", "rank"])
def _finish_kernel(
    outputs, counts, addresses_ptr, state_ptr, fault_ptr, limit_ns, rank, WORLD: tl.constexpr, SOURCES: tl.constexpr,
    GIVEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """GIVEN: chunks that every rank gave every other one."""
    epoch = read_epoch(state_ptr)
    sources, others = others_of(rank, WORLD, SOURCES)
    here = as_words(tl.load(addresses_ptr + rank))
    kept = 1
    for chunk in tl.static_range(GIVEN):
        arrived = here + chunk * WORLD + sources
        came = await_flags(arrived, others, sources, epoch, state_ptr, fault_ptr, limit_ns)
        kept &= came.to(tl.int32)
    finish(outputs, counts, kept, epoch, addresses_ptr, state_ptr, rank, WORLD, SOURCES, BLOCK)


class _Lanes:
    """Two streams beside the caller's, and events between the three, which are used again: to make one takes longer."""

    def __init__(self, device: torch.device) -> None:
        self.streams = tuple(torch.cuda.Stream(device, priority=-1) for _ in range(2))
        self.ends = tuple(torch.cuda.Event() for _ in self.streams)
        self.begin, self.started, self.between = (torch.cuda.Event() for _ in range(3))


# Of a channel, not of a device: a group's waits must not stand before another group's copies.
_lanes: weakref.WeakKeyDictionary[Channel, _Lanes] = weakref.WeakKeyDictionary()


class Copies:
    """One call's copies between the ranks of a group.

    Attributes:
        rank, world: of the group. sources: the next power of two.
        finished: whether a kernel of the caller's has done what `finish` does.
        given: chunks that every rank gives every other one.
        streams: the one that copies and one that multiplies beside the caller's own; None on CPUs.
    """

    def __init__(
        self, group_name: str, purpose: str, nbytes: int, device: torch.device, given: int = 1
    ) -> None:
        # Two halves as one.
        self._channel = channel(group_name, purpose, -(-(_DATA + nbytes) // 2), device)
        self.rank, self.world = self._channel.rank, self._channel.world
        if self.world > _MOST_RANKS:
            raise NotImplementedError(f"at most {_MOST_RANKS} ranks, got {self.world}")
        self.sources, self.finished, self.given = power_of_two(self.world), False, given
        self._device = device
        self._channel.enter()
        self._forked = False
        self.streams: Sequence[torch.cuda.Stream | None] = (None, None)
        if device.type == "cuda":
            if self._channel not in _lanes:
                _lanes[self._channel] = _Lanes(device)
            self._lane = _lanes[self._channel]
            self.streams = self._lane.streams
            self._here = torch.cuda.current_stream(device)

    @property
    def device_side(self) -> tuple[Tensor, ...]:
        """What kernels take that wait for chunks: addresses, state, fault word."""
        where = self._channel
        return where.memory.addresses, where.state, where.fault.tensor

    def data(self, rank: int, dtype: torch.dtype, *shape: int, at: int = 0) -> Tensor:
        """A rank's data from element `at` on."""
        count = torch.Size(shape).numel()
        data = self._channel.memory.peers[rank][_DATA:].view(dtype)
        return data[at : at + count].view(shape)

    def fork(self) -> None:
        """Lets the streams see what the caller's own has done so far."""
        if self._device.type == "cuda":
            self._forked = True
            self._lane.begin.record(self._here)
            for stream in self.streams:
                stream.wait_event(self._lane.begin)

    def join(self) -> None:
        """Lets the caller's stream wait for the others, unless it does already."""
        if self._device.type == "cuda" and self._forked:
            self._forked = False
            for stream, end in zip(self.streams, self._lane.ends, strict=True):
                end.record(stream)
                self._here.wait_event(end)

    def after_start(self) -> None:
        """Lets the caller's stream wait for `start`, for which the other product's first programs make no room.

        Of two products that are ready at once, a graph may begin with either.
        """
        if self._device.type == "cuda":
            self._lane.started.record(self.streams[0])
            self._here.wait_event(self._lane.started)

    def follow(self, stream: torch.cuda.Stream | None, lane: int = 0) -> None:
        """Lets the copying stream, or the other one, wait for what another, or the caller's, has done so far."""
        if self._device.type == "cuda":
            self._lane.between.record(stream or self._here)
            self.streams[lane].wait_event(self._lane.between)

    def lead(self) -> None:
        """Lets the caller's stream wait for what the copying one has done so far."""
        if self._device.type == "cuda":
            self._lane.between.record(self.streams[0])
            self._here.wait_event(self._lane.between)

    def start(self) -> None:
        with on_device(self._channel.state):
            launch(
                _start_kernel, 1,
                *self.device_side, timeout_ns(), self.rank, self.world, self.sources, num_warps=1,
            )  # fmt: skip

    def send(self, chunk: Tensor, peer: int, at: int) -> None:
        """Copies to the peer's data, from element `at` on; in the copying stream."""
        target = self._base(peer) + _DATA + at * chunk.element_size()
        self._copy(target, chunk.data_ptr(), chunk.nbytes, self.streams[0])
        self.tell(peer, 0, self.streams[0])

    def tell(self, peer: int, chunk: int, stream: torch.cuda.Stream | None) -> None:
        """Says, in this stream, that a chunk is where the peer looks for it."""
        stamp = self._base(self.rank) + 8 * (CHUNKS.value + 1) * self.world
        self._copy(self._base(peer) + 8 * (chunk * self.world + self.rank), stamp, 8, stream)

    def fetch(self, target: Tensor, peer: int, at: int) -> None:
        """Copies from the peer's data, from element `at` on; in the copying stream."""
        source = self._base(peer) + _DATA + at * target.element_size()
        self._copy(target.data_ptr(), source, target.nbytes, self.streams[0])

    def _base(self, rank: int) -> int:
        return self._channel.memory.peers[rank].data_ptr()

    def _copy(
        self, target: int, source: int, nbytes: int, stream: torch.cuda.Stream | None
    ) -> None:
        """By addresses and the driver: views, streams made current and PyTorch's copies take the host 30 µs a chunk."""
        if not nbytes:
            return
        if self._device.type == "cpu":
            ctypes.memmove(target, source, nbytes)
        else:
            copy_async(loaded(), target, source, nbytes, stream.cuda_stream, self._device.index)

    def await_(self, peer: int, chunk: int = 0) -> None:
        with on_device(self._channel.state):
            launch(
                _await_kernel, 1,
                *self.device_side, timeout_ns(), self.rank, peer, chunk * self.world, self.sources, num_warps=1,
            )  # fmt: skip

    @contextlib.contextmanager
    def until_finished(self, outputs: Sequence[Tensor]) -> Iterator[None]:
        """What comes after `start`, and reads everything; outputs, contiguous, become NaN if a chunk was lost."""
        try:
            yield
        finally:
            self.join()
            if not self.finished:
                self.finish(outputs)

    def finish(self, outputs: Sequence[Tensor]) -> None:
        with on_device(self._channel.state):
            launch(
                _finish_kernel, 1,
                tuple(outputs), tuple(x.numel() for x in outputs), *self.device_side, timeout_ns(), self.rank,
                self.world, self.sources, self.given, FILL, num_warps=1,
            )  # fmt: skip


class using:
    """Work goes into this stream of the current device; None: into the one that it goes into anyway.

    `torch.cuda.stream` in a quarter of its time.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._before = torch._C._cuda_getCurrentStream(self._stream.device_index)
            self._set(self._stream.stream_id, self._stream.device_index, self._stream.device_type)

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._set(*self._before)

    @staticmethod
    def _set(stream: int, device: int, kind: int) -> None:
        torch._C._cuda_setStream(stream_id=stream, device_index=device, device_type=kind)
