"""Chunks that copy engines move into other ranks' memory while SMs multiply.

A call's copies go to addresses that the host knows, so that a captured graph copies to the same place at every
replay: there is one buffer, not one of odd and one of even epochs (`signals.py`), and it must be seen to be free.

    start     waits until every rank is done with what this one sent it in the call before ("free"), and writes this
              call's flag to a word of this rank's own memory, the stamp
    send      copies a chunk to a rank, and after it, in the same stream, the stamp: the chunk "arrived". No kernel, so
              it goes on while a kernel fills the device and waits for it. A part of it may go ahead, with a flag of its own
    await_    waits for a rank's chunk, or for the part ahead
    finish    waits for what nobody has waited for, tells every rank that its chunks were used, and moves the epoch on;
              also after an exception (`until_finished`), or the next call would take this one's chunks for its own

**Faults.** A wait that times out breaks the channel (`faults.py`). Copies cannot be called back: later calls of a
broken channel, and one that found a buffer not free, overwrite what others may still read. They take their flags back
first. A reader therefore looks at the flags again when it has read (`finish`), and what was read while a flag
changed is lost: NaN, and a fault.

Memory: words arrived[W], free[W], stamp, ahead[W]; the data from _DATA bytes on. `finish` looks at `arrived` alone: whoever
overwrites a part ahead takes that flag back first, too.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.symm.channel import Channel, channel
from torch_fdattn.dist.symm.faults import timeout_ns
from torch_fdattn.dist.symm.signals import (
    BROKEN,
    as_int64,
    await_flags,
    flag,
    may_send,
    next_epoch,
    read_epoch,
    was_intact,
)
from torch_fdattn.launch.driver import copy_async, loaded
from torch_fdattn.launch.launches import launch
from torch_fdattn.ops.launch import power_of_two

_DATA = 4096
_MAX_RANKS = (_DATA // 8 - 1) // 3
#: Of `_Lanes`.
_COPIES, _PRODUCTS = 0, 1
#: Elements that the one program of `finish` makes NaN at a time.
FILL = 1024


@triton.jit
def flags_of(addresses_ptr, ranks, inside):
    """Pointers to the words of ranks."""
    return as_int64(tl.load(addresses_ptr + ranks, mask=inside, other=0))


@triton.jit
def others_of(rank, WORLD: tl.constexpr, SOURCES: tl.constexpr):
    """(ranks (SOURCES,), which of them are other ranks)."""
    sources = tl.arange(0, SOURCES)
    return sources, (sources < WORLD) & (sources != rank)


@triton.jit(do_not_specialize=["limit_ns", "rank"])
def _start_kernel(addresses_ptr, state_ptr, fault_ptr, limit_ns, rank, WORLD: tl.constexpr, SOURCES: tl.constexpr):  # fmt: skip
    epoch = read_epoch(state_ptr)
    sources, others = others_of(rank, WORLD, SOURCES)
    here = as_int64(tl.load(addresses_ptr + rank))
    used = others & (epoch != 1)  # nobody has used what is fresh
    free = await_flags(
        here + WORLD + sources, used, sources, epoch, state_ptr, fault_ptr, limit_ns, False
    )
    sends = may_send(state_ptr, epoch)
    theirs = flags_of(addresses_ptr, sources, others)
    none = tl.zeros_like(sources).to(tl.int64)
    lost = others & ((free == 0) | (sends == 0))
    tl.atomic_xchg(theirs + rank, none, mask=lost, sem="release", scope="sys")
    tl.store(here + 2 * WORLD, tl.where(sends, flag(epoch), 0))


@triton.jit(do_not_specialize=["limit_ns", "rank", "peer", "first_word"])
def _await_kernel(addresses_ptr, state_ptr, fault_ptr, limit_ns, rank, peer, first_word, SOURCES: tl.constexpr):  # fmt: skip
    epoch = read_epoch(state_ptr)
    sources = tl.arange(0, SOURCES)
    here = as_int64(tl.load(addresses_ptr + rank))
    await_flags(
        here + first_word + sources, sources == peer, sources, epoch, state_ptr, fault_ptr, limit_ns
    )


@triton.jit
def finish(
    outputs, counts, kept, epoch, addresses_ptr, state_ptr, rank, WORLD: tl.constexpr, SOURCES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`finish`, above, by one program, once all others of the call have read everything.

    outputs: pointers to results of so many elements, NaN if a chunk was not kept.
    """
    broken = tl.load(state_ptr + BROKEN)
    sources, others = others_of(rank, WORLD, SOURCES)
    theirs = flags_of(addresses_ptr, sources, others)
    if (kept == 0) | (broken != 0):
        for i in tl.static_range(len(outputs)):
            for first in range(0, counts[i], BLOCK):
                at = first + tl.arange(0, BLOCK)
                lost = tl.full([BLOCK], float("nan"), tl.float32).to(outputs[i].dtype.element_ty)
                tl.store(outputs[i] + at, lost, mask=at < counts[i])
    # Relaxed: they tell of nothing that was written, and what they say was read has been read. A release takes 2 µs.
    free = tl.zeros_like(sources).to(tl.int64) + flag(next_epoch(epoch))
    tl.atomic_xchg(
        theirs + WORLD + rank, free, mask=others & was_intact(broken, epoch), sem="relaxed", scope="sys"
    )  # fmt: skip
    tl.store(state_ptr, next_epoch(epoch))


@triton.jit(do_not_specialize=["limit_ns", "rank"])
def _finish_kernel(
    outputs, counts, addresses_ptr, state_ptr, fault_ptr, limit_ns, rank, WORLD: tl.constexpr, SOURCES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    epoch = read_epoch(state_ptr)
    sources, others = others_of(rank, WORLD, SOURCES)
    here = as_int64(tl.load(addresses_ptr + rank))
    kept = await_flags(
        here + sources, others, sources, epoch, state_ptr, fault_ptr, limit_ns, False
    )
    finish(outputs, counts, kept, epoch, addresses_ptr, state_ptr, rank, WORLD, SOURCES, BLOCK)


class _Lanes:
    """Two streams besides the caller's, and events between the three, which are used again: to make one takes longer."""

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
        streams: the one that copies and one that multiplies beside the caller's own; None on CPUs.
    """

    def __init__(self, group_name: str, purpose: str, nbytes: int, device: torch.device) -> None:
        # Two halves as one.
        self._channel = channel(group_name, purpose, -(-(_DATA + nbytes) // 2), device)
        self.rank, self.world = self._channel.rank, self._channel.world
        if self.world > _MAX_RANKS:
            raise NotImplementedError(f"at most {_MAX_RANKS} ranks, got {self.world}")
        self.sources, self.finished = power_of_two(self.world), False
        self._device = device
        self._channel.enter()
        self._apart: list[int] = []  # lanes that the caller's stream does not wait for yet
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

    def _flag(self, rank: int, index: int) -> Tensor:
        return self._channel.memory.peers[rank][8 * index : 8 * index + 8].view(torch.int64)

    def mark(self) -> None:
        """What the caller's stream has done so far is all that the others wait for in `fork`."""
        if self._device.type == "cuda":
            self._lane.begin.record(self._here)

    def fork(self) -> None:
        """Lets the streams see what was done until `mark`."""
        if self._device.type == "cuda":
            self._apart = [_COPIES, _PRODUCTS]
            for stream in self.streams:
                stream.wait_event(self._lane.begin)

    def join(self, *lanes: int) -> None:
        """Lets the caller's stream wait for these of the others, or all, unless it does already."""
        for lane in lanes or (_COPIES, _PRODUCTS):
            if lane in self._apart:
                self._apart.remove(lane)
                self._lane.ends[lane].record(self.streams[lane])
                self._here.wait_event(self._lane.ends[lane])

    def join_products(self) -> None:
        """`join` before what reads products. It does not wait for copies: in a graph a kernel behind those and a product
        began 5 µs after the product, behind the product alone 1 to 2."""
        self.join(_PRODUCTS)

    def after_start(self) -> None:
        """Lets the caller's stream wait for `start`, which the other product's first programs would keep from starting.

        Of two products that are ready at once, a graph may begin with either.
        """
        if self._device.type == "cuda":
            self._lane.started.record(self.streams[0])
            self._here.wait_event(self._lane.started)

    def follow(self, stream: torch.cuda.Stream | None) -> None:
        """Lets the copying stream wait for what another one, or the caller's, has done so far."""
        if self._device.type == "cuda":
            self._lane.between.record(stream or self._here)
            self.streams[0].wait_event(self._lane.between)

    def begin(self) -> None:
        """`start` in the copying stream, after what the caller's stream has done so far, which goes on behind it."""
        self.mark()
        self.fork()
        with using(self.streams[0]):
            self.start()
        self.after_start()

    def start(self) -> None:
        launch(
            _start_kernel, 1,
            *self.device_side, timeout_ns(), self.rank, self.world, self.sources, num_warps=1,
        )  # fmt: skip

    def send(self, chunk: Tensor, peer: int, at: int) -> None:
        """Copies to the peer's data, from element `at` on; in the copying stream."""
        self.send_all([(chunk, at)], peer)

    def _first_word(self, ahead: bool) -> int:
        return 2 * self.world + 1 if ahead else 0

    def send_all(
        self, chunks: Sequence[tuple[Tensor, int]], peer: int, ahead: bool = False
    ) -> None:
        """`send` of several chunks, all contiguous, which arrive together; `ahead`: as the part before what arrives."""
        driver = loaded() if self._device.type == "cuda" else None
        if driver is not None:
            self._send_by(driver, self.streams[0].cuda_stream, chunks, peer, ahead)
            return
        with using(self.streams[0]):
            for chunk, at in chunks:
                if chunk.numel():
                    there = self.data(peer, chunk.dtype, *chunk.shape, at=at)
                    there.copy_(chunk, non_blocking=True)
            word = self._first_word(ahead) + self.rank
            self._flag(peer, word).copy_(self._flag(self.rank, 2 * self.world), non_blocking=True)

    def _send_by(self, driver, stream: int, chunks, peer: int, ahead: bool = False) -> None:
        """By the driver's own copies: views, streams made current and PyTorch's copies take the host 30 µs a chunk."""
        here, there = (self._channel.memory.peers[r].data_ptr() for r in (self.rank, peer))
        where = stream, self._device.index
        for chunk, at in chunks:
            if chunk.numel():
                size = chunk.element_size()
                target = there + _DATA + at * size
                copy_async(driver, target, chunk.data_ptr(), chunk.numel() * size, *where)
        word = self._first_word(ahead) + self.rank
        copy_async(driver, there + 8 * word, here + 16 * self.world, 8, *where)

    def await_(self, peer: int, ahead: bool = False) -> None:
        launch(
            _await_kernel, 1,
            *self.device_side, timeout_ns(), self.rank, peer, self._first_word(ahead), self.sources, num_warps=1,
        )  # fmt: skip

    @contextlib.contextmanager
    def until_finished(self, outputs: Sequence[Tensor]) -> Iterator[None]:
        """What comes after `start`, and reads everything; outputs, dense in memory, become NaN if a chunk was lost."""
        try:
            yield
        finally:
            self.join_products()
            try:
                if not self.finished:
                    self.finish(outputs)
            finally:
                self.join()

    def raise_if_lost(self) -> None:
        """On CPUs, whose kernels have run by now: PeerTimeout where a wait of this call timed out, in place of a result that
        is NaN. On GPUs the next call raises it, or `check`."""
        if self._device.type == "cpu":
            self._channel.fault.raise_if_set()

    def finish(self, outputs: Sequence[Tensor]) -> None:
        # None are there where what makes them raised; a kernel's tuple must not be empty.
        outputs = tuple(outputs) or (torch.empty(0, device=self._device),)
        launch(
            _finish_kernel, 1,
            outputs, tuple(x.numel() for x in outputs), *self.device_side, timeout_ns(), self.rank,
            self.world, self.sources, FILL, num_warps=1,
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
