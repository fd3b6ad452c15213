"""What kernels of several warp groups share: slots that one fills and others empty, and the barriers between them.

A slot of a ring has two barriers. `full` is passed when the bytes that it waits for have landed, `empty` when every
consumer has said that it is done. A barrier has a phase, 0 or 1, that changes each time it is passed: whoever waits
names the phase that is to end. A consumer waits for phase 0 of a slot's first filling; a producer waits for the phase
before on `empty`, and before the first filling that counts as passed.
"""
# Without `from __future__ import annotations`: aggregates ask for the types of their fields.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.core import _aggregate as aggregate

#: Between the threads of a warp group; its name in triton 3.6 and later.
wait_for_group = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@aggregate
class Place:
    """A place in a ring: the slot, and the phase in which it is full."""

    slot: gl.tensor
    phase: gl.tensor

    @gluon.constexpr_function
    def __init__(self, slot, phase):
        self.slot = slot
        self.phase = phase


@gluon.jit
def place_of(count, SLOTS: gl.constexpr):
    """The place of the count-th filling, from 0 on, of a ring of 1, 2 or 4 slots."""
    return Place(count & (SLOTS - 1), (count // SLOTS) & 1)


@aggregate
class Ring:
    """The barriers of slots in shared memory."""

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, full, empty):
        self.full = full
        self.empty = empty

    @gluon.jit
    def wait_empty(self, place):
        mbarrier.wait(self.empty.index(place.slot), place.phase ^ 1)

    @gluon.jit
    def wait_full(self, place, needed=True):
        mbarrier.wait(self.full.index(place.slot), place.phase, pred=needed)

    @gluon.jit
    def fill(self, descriptor, corner, buffer, place):
        """Starts to copy the block at this corner into a buffer of the slot, which must be empty."""
        full = self.full.index(place.slot)
        tma.async_copy_global_to_shared(descriptor, corner, full, buffer)

    @gluon.jit
    def expect(self, place, BYTES: gl.constexpr, needed=True):
        """Says of how many bytes the slot is full: of all copies of a filling."""
        mbarrier.expect(self.full.index(place.slot), BYTES, pred=needed)

    @gluon.jit
    def hand_over(self, place):
        """Tells the consumers that the slot is full, where no copy does."""
        mbarrier.arrive(self.full.index(place.slot), count=1)

    @gluon.jit
    def release(self, place):
        """Tells the producer that this consumer is done with the slot."""
        mbarrier.arrive(self.empty.index(place.slot), count=1)


@gluon.jit
def ring(SLOTS: gl.constexpr, CONSUMERS: gl.constexpr, PRODUCERS: gl.constexpr = 1):
    """Slots that are each filled by as many producers and emptied by as many consumers.

    A ring that no warp uses must not be made: the compiler gives its memory to something else, which is undefined while it
    holds a barrier (PTX ISA, `mbarrier.inval`). A GPU that changes between processes has been seen to write the barrier
    back there.
    """
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=PRODUCERS)
        mbarrier.init(empty.index(slot), count=CONSUMERS)
    return Ring(full, empty)


@gluon.jit
def blocks_of(descriptor, SLOTS: gl.constexpr):
    """Room for as many of a descriptor's blocks."""
    shape: gl.constexpr = [SLOTS] + descriptor.block_type.shape  # noqa: RUF005 -- Triton knows no unpacking
    return gl.allocate_shared_memory(descriptor.dtype, shape, descriptor.layout)


@gluon.jit
def keep_first(buffer, count):
    """Zeros for all but the first rows of a block of values: what lies beyond a length may be NaN, and 0 · NaN is.

    Another warp group may write the same at the same time, or read what is the same already.
    """
    KEYS: gl.constexpr = buffer.shape[0]
    D: gl.constexpr = buffer.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    rows = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    found = buffer.load(LAYOUT)
    buffer.store(gl.where(gl.expand_dims(rows, 1) < count, found, gl.zeros_like(found)))
    fence_async_shared()
    wait_for_group()
