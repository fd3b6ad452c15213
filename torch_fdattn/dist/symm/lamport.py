"""The Lamport exchange: a packet of 32 bits in a rank's memory has arrived when it is not zero.

Every rank writes what others need into their memory. No flag and no fence follow, which would cost a tile 2 µs: the
receiving memory holds zeros, and a packet that is zero travels as minus zero. Every packet therefore shows for itself
whether it has arrived. (The Lamport protocol of FlashInfer's and TensorRT-LLM's all-reduces, which mark what has not
arrived by minus zero.)

The reader zeroes the memory afterwards. Calls take three buffers in turn: a call writes into the first, zeroes what the
previous call used, and the third, which the next call uses, is already zero on every rank that has sent anything in this
call: that rank zeroed it in the previous call. The turn, and how many packets the previous call used, are on the device,
so captured graphs may be replayed in any order with eager calls. A buffer has slots for the packets of W - 1 ranks, the
next rank's first.

state, besides what `signals.py` keeps there: turn, packets of the previous call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torch_fdattn.dist.symm.channel import Channel, channel
from torch_fdattn.dist.symm.signals import LOOKS, TICKETS, keep_time, next_epoch, report
from torch_fdattn.ops.launch import cdiv

TURN = tl.constexpr(5)
PREVIOUS_PACKETS = tl.constexpr(6)
#: A packet of not-a-numbers of any dtype.
NANS = tl.constexpr(0x7FC07FC0)


@triton.jit
def buffer(addresses_ptr, rank, turn, buffer_bytes):
    address = tl.load(addresses_ptr + rank) + turn * buffer_bytes
    return tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def as_int32(pointer):
    """A pointer to numbers as one to packets."""
    return pointer.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def packets_per_slot(buffer_bytes, WORLD: tl.constexpr):
    """How many packets of each rank a buffer can hold."""
    return tl.multiple_of(buffer_bytes // (16 * (WORLD - 1)) * 4, 4)


@triton.jit
def slot_of(source, rank, WORLD: tl.constexpr):
    """Where a source's packets lie in a rank's buffers."""
    return (source + WORLD - rank - 1) % WORLD


@triton.jit
def nonzero_packets(packets, dtype: tl.constexpr):
    """The packets, with minus zero in place of zero."""
    ZERO: tl.constexpr = -0x7FFF8000 if dtype.primitive_bitwidth == 16 else -0x80000000
    return tl.where(packets == 0, ZERO, packets)


@triton.jit
def restore_zeros(packets, dtype: tl.constexpr):
    """Undoes `nonzero_packets`; a packet that was minus zero from the start becomes zero as well."""
    return tl.where(packets == nonzero_packets(packets - packets, dtype), 0, packets)


@triton.jit
def halves(packets, dtype: tl.constexpr):
    """The numbers of packets, fp32: (the lower, the upper); for fp32 packets the number twice."""
    if dtype.primitive_bitwidth == 16:
        low = (packets & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
        high = ((packets >> 16) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
        return low.to(tl.float32), high.to(tl.float32)
    else:
        both = packets.to(tl.float32, bitcast=True)
        return both, both


@triton.jit
def joined(low, high, dtype: tl.constexpr):
    """Undoes `halves`, rounding to dtype."""
    if dtype.primitive_bitwidth == 16:
        lower = low.to(dtype).to(tl.uint16, bitcast=True).to(tl.int32)
        return lower | (high.to(dtype).to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    else:
        return low.to(tl.int32, bitcast=True)


@triton.jit
def receive_lamport(pointers, expected, sources, epoch, state_ptr, fault_ptr, limit_ns):
    """Polls until all `expected` packets have arrived: (packets (S, B), whether they arrived in time). sources (S, B) or (S, 1):
    the ranks that send them."""
    packets = tl.load(pointers, mask=expected, other=1, volatile=True)
    missing = tl.sum(tl.sum((packets == 0).to(tl.int32), 1), 0)
    looks = 0
    start, stop = epoch - epoch, epoch != epoch
    while (missing > 0) & (stop == 0):
        packets = tl.load(pointers, mask=expected, other=1, volatile=True)
        missing = tl.sum(tl.sum((packets == 0).to(tl.int32), 1), 0)
        looks += 1
        if (looks % LOOKS == 0) & (missing > 0):
            start, stop, elsewhere = keep_time(start, state_ptr, limit_ns)
            if stop & (elsewhere == 0):
                late = tl.max(tl.max(tl.where(packets == 0, sources, -1), 1), 0)
                report(late, epoch, state_ptr, fault_ptr)
    return packets, missing == 0


@triton.jit
def receive_lamport_with_lses(
    values_ptr, lses_ptr, values_in, lses_in, sources, epoch, state_ptr, fault_ptr, limit_ns
):
    """`receive_lamport` of packets of values (S, M, D) and lses (S, M) from sources (S,): (values, lses, whether they
    came)."""
    values = tl.load(values_ptr, mask=values_in, other=1, volatile=True)
    lses = tl.load(lses_ptr, mask=lses_in, other=1, volatile=True)
    late = tl.sum(tl.sum((values == 0).to(tl.int32), 2) + (lses == 0).to(tl.int32), 1)
    missing = tl.sum(late, 0)
    looks = 0
    start, stop = epoch - epoch, epoch != epoch
    while (missing > 0) & (stop == 0):
        values = tl.load(values_ptr, mask=values_in, other=1, volatile=True)
        lses = tl.load(lses_ptr, mask=lses_in, other=1, volatile=True)
        late = tl.sum(tl.sum((values == 0).to(tl.int32), 2) + (lses == 0).to(tl.int32), 1)
        missing = tl.sum(late, 0)
        looks += 1
        if (looks % LOOKS == 0) & (missing > 0):
            start, stop, elsewhere = keep_time(start, state_ptr, limit_ns)
            if stop & (elsewhere == 0):
                peer = tl.max(tl.where(late > 0, sources, -1), 0)
                report(peer, epoch, state_ptr, fault_ptr)
    return values, lses, missing == 0


@triton.jit
def clear(
    addresses_ptr, rank, turn, before, each, buffer_bytes, WORLD: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Zeroes the `before` packets of every other rank that the last call brought."""
    last = buffer(addresses_ptr, rank, (turn + 2) % 3, buffer_bytes)
    slots = tl.arange(0, SLOTS)
    for first in range(tl.program_id(0) * BLOCK, before, tl.num_programs(0) * BLOCK):
        # Whole tiles, which wide stores write, inside a rank's packets.
        used = tl.multiple_of(tl.cast(first, tl.int64), 4) + tl.arange(0, BLOCK)
        old = last + slots[:, None] * each + used[None, :]
        zeros = tl.zeros([SLOTS, BLOCK], tl.int32)
        tl.store(old, zeros, mask=(slots < WORLD - 1)[:, None] & (used < each)[None, :])


@triton.jit
def clear_all(addresses_ptr, rank, turn, before, buffer_bytes, BLOCK: tl.constexpr):
    """`clear` of a buffer without slots of one size: zeroes its first packets, as many as the last call used."""
    last = buffer(addresses_ptr, rank, (turn + 2) % 3, buffer_bytes)
    used = before // 4 * 4  # which it is: for wide stores
    for first in range(tl.program_id(0) * BLOCK, used, tl.num_programs(0) * BLOCK):
        at = tl.multiple_of(tl.cast(first, tl.int64), 4) + tl.arange(0, BLOCK)
        tl.store(last + at, tl.zeros([BLOCK], tl.int32), mask=at < used)


@triton.jit
def leave_turn(state_ptr, epoch, turn, packets):
    """`signals.leave_epoch`, and the next call's turn."""
    ticket = tl.atomic_add(state_ptr + TICKETS, 1, sem="relaxed", scope="gpu")
    if ticket == tl.num_programs(0) - 1:
        tl.store(state_ptr + TICKETS, 0)
        tl.store(state_ptr + TURN, (turn + 1) % 3)
        tl.store(state_ptr + PREVIOUS_PACKETS, tl.cast(packets, tl.int64))
        tl.store(state_ptr, next_epoch(epoch))


@triton.jit
def push(
    packets, at, sends, addresses_ptr, rank, peer, turn, each, buffer_bytes, WORLD: tl.constexpr
):  # fmt: skip
    """Writes this rank's packets `at` into a peer's buffer, where it `sends`."""
    there = buffer(addresses_ptr, peer, turn, buffer_bytes)
    tl.store(there + slot_of(rank, peer, WORLD) * each + at, packets, mask=sends)


def channel_of_bytes(nbytes: int, group_name: str, purpose: str, device: torch.device) -> Channel:
    """The channel of calls whose buffers have so many bytes, a multiple of 16."""
    where = channel(group_name, purpose, cdiv(3 * nbytes, 2), device)
    where.enter()
    return where


def channel_of_packets(packets: int, group_name: str, purpose: str, device: torch.device, world: int) -> Channel:  # fmt: skip
    """The channel of calls of so many packets a rank."""
    return channel_of_bytes((world - 1) * cdiv(packets, 4) * 16, group_name, purpose, device)


def bytes_per_buffer(where: Channel) -> int:
    """Bytes of each of the channel's three buffers."""
    return 2 * where.half_bytes // 3 // 16 * 16
