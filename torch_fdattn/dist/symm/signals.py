"""Device side of one-sided exchanges: epochs, packets, flags, bounded waits.

**Epochs.** The calls on a channel are numbered on the device, so that a replayed CUDA graph goes on counting:
1, 2, …, 2**32 - 1, 2, … (0 is what fresh memory holds; odd and even alternate). All programs of a launch read the
number, and the last one to have read it writes the next.

**Halves.** Calls of odd and even epochs use two halves of a channel's memory. A rank that is in call n + 2 has
seen data of call n + 1 from every rank, each of which had then finished call n: nobody reads what it overwrites.
This holds where every call makes every rank wait, directly or through an owner, for all ranks.

**Packets.** 64 bits: 32 of payload and the epoch (NCCL's LL protocol). 8 bytes arrive at once, so a reader that sees
this call's epoch has the payload: no fence and no flag.

**Flags.** 64 bits that follow from the epoch of the data that was written before them, and that no data has by
chance: where one call has a flag, a call of another shape had rows. `tl.debug_barrier` comes before a
release: an atomic orders the accesses of one thread, and the barrier those of the program's others (Triton adds
none before triton#10816). After a wait comes an acquire, and a barrier again.

**One warp.** Kernels that wait have one warp a program: tiles smaller than a program are loaded by each of its
warps for itself, and warps that see a word at different times would leave the loop at different times and hang at
the next barrier.

**Time.** Every wait ends when data came, when the channel broke, or after limit_ns. Threads read the clock at
different times, too, so the time passes through an atomic, which one thread makes for all; what it returns is the
latest time that this or another program has put there. A wait that timed out marks the channel as broken, puts the
clock past every limit, which ends the other programs' waits, and writes {epoch, peer + 1} where the host sees it.
Later calls on it, which may have been queued before the host knew, send nothing: they wait for nobody, and would
overwrite what others still read.

state (int64): [epoch, tickets, broken (0, or the epoch of the call that timed out), arrivals, clock].
"""

from __future__ import annotations

import time

import triton
import triton.language as tl

from torch_fdattn.ops.library import INTERPRET

try:
    from triton.language.extra.cuda import globaltimer
except ImportError:  # a build of Triton for AMD alone, where one-sided strategies are refused
    globaltimer = None

TICKETS = tl.constexpr(1)
BROKEN = tl.constexpr(2)
ARRIVALS = tl.constexpr(3)
CLOCK = tl.constexpr(4)
STATE_SIZE = 8
#: What the clock shows for good once a wait has timed out.
OVER = tl.constexpr(0x7FFFFFFFFFFFFFFF)
#: Looks at memory between two looks at the clock, which costs as much as several of them.
LOOKS = tl.constexpr(1 if INTERPRET else 32)

if INTERPRET:

    def clock_ns():
        time.sleep(2e-5)  # others may need this core to get here
        return time.monotonic_ns()

else:

    @triton.jit
    def clock_ns():
        return globaltimer()


@triton.jit
def read_epoch(state_ptr):
    return tl.load(state_ptr)


@triton.jit
def next_epoch(epoch):
    return tl.where(epoch == 0xFFFFFFFF, 2, epoch + 1)


@triton.jit
def take_epoch(state_ptr, programs):
    """This call's epoch; the last of the launch's programs to take it moves the channel on. Volatile: `launch/pdl.py`."""
    epoch = tl.load(state_ptr, volatile=True)
    tl.debug_barrier()
    ticket = tl.atomic_add(state_ptr + TICKETS, 1, sem="acq_rel", scope="gpu")
    if ticket == programs - 1:
        tl.store(state_ptr + TICKETS, 0)
        tl.store(state_ptr, next_epoch(epoch))
    return epoch


@triton.jit
def leave_epoch(state_ptr, epoch, programs):
    """`take_epoch`, at a program's end, with the epoch that it read: nothing waits for the ticket.

    Relaxed: what the program did followed from the epoch that it had read.
    """
    ticket = tl.atomic_add(state_ptr + TICKETS, 1, sem="relaxed", scope="gpu")
    if ticket == programs - 1:
        tl.store(state_ptr + TICKETS, 0)
        tl.store(state_ptr, next_epoch(epoch))


@triton.jit
def may_send(state_ptr, epoch):
    """Whether the channel was intact before this call: its own programs may send what peers wait for."""
    return was_intact(tl.load(state_ptr + BROKEN, volatile=True), epoch)


@triton.jit
def was_intact(broken, epoch):
    """`may_send`, of a channel's word."""
    return (broken == 0) | (broken == epoch)


@triton.jit
def flag(epoch):
    """Odd factors map 64 bits one to one; this one spreads small numbers over all of them."""
    return epoch * -7046029254386353131


@triton.jit
def at_rank(addresses_ptr, rank, epoch, half_bytes):
    """Address of the half that this epoch uses in a rank's memory."""
    return tl.load(addresses_ptr + rank) + (epoch & 1) * half_bytes


@triton.jit
def as_int64(address):
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def ll_packet(payload, epoch):
    """A packet of 64 bits: a payload of 32 and the epoch."""
    bits = payload.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return (epoch << 32) | bits


@triton.jit
def payload(packet, dtype: tl.constexpr):
    return (packet & 0xFFFFFFFF).to(tl.int32).to(dtype, bitcast=True)


@triton.jit
def packed(values, dtype: tl.constexpr):
    """Payloads of rows (M, D): fp32 numbers, or pairs of 16-bit ones, (M, D / 2)."""
    if dtype.primitive_bitwidth == 16:
        pairs = tl.reshape(values.to(dtype), [values.shape[0], values.shape[1] // 2, 2])
        low, high = tl.split(pairs)
        low = low.to(tl.uint16, bitcast=True).to(tl.int32)
        return low | (high.to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    else:
        return values.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def unpacked(bits, dtype: tl.constexpr):
    """Undoes `packed`: the rows (M, D), fp32."""
    if dtype.primitive_bitwidth == 16:
        low = (bits & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
        high = ((bits >> 16) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
        pairs = tl.join(low, high).to(tl.float32)
        return tl.reshape(pairs, [bits.shape[0], bits.shape[1] * 2])
    else:
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def _is_stale(packets, inside, epoch):
    """1 where a packet is still of another epoch."""
    return (inside & (((packets >> 32) & 0xFFFFFFFF) != epoch)).to(tl.int32)


@triton.jit
def _peer_of(missing, sources):
    return tl.max(tl.where(missing > 0, sources, -1), 0)


@triton.jit
def _last_time(state_ptr):
    return tl.atomic_max(state_ptr + CLOCK, clock_ns(), sem="relaxed", scope="gpu")


@triton.jit
def keep_time(start, state_ptr, limit_ns):
    """After LOOKS looks in vain, and every LOOKS more: (when the wait began, whether it must end, whether another one
    timed out), the same for all threads. start: 0 the first time.

    A wait's time begins here and not at its first look: what comes soon does not wait for the clock's round trips.
    """
    time = _last_time(state_ptr)
    if start == 0:
        time = _last_time(state_ptr)  # what the other returned may be of any earlier call
        start = time
    over = time == OVER
    return start, over | (time - start > limit_ns), over


@triton.jit
def report(peer, epoch, state_ptr, fault_ptr):
    """Breaks the channel: this wait timed out on `peer`."""
    tl.store(fault_ptr, (epoch << 32) | (tl.cast(peer, tl.int64) + 1))
    tl.store(state_ptr + BROKEN, epoch)
    tl.atomic_max(state_ptr + CLOCK, OVER, sem="release", scope="gpu")


@triton.jit
def receive_packets(
    values_ptr, lses_ptr, values_in, lses_in, sources, epoch, state_ptr, fault_ptr, limit_ns
):
    """Packets of values (S, M, D) and lses (S, M) from sources (S,), once all that are `in` have arrived.

    Returns (values, lses, whether they arrived in time).
    """
    values = tl.load(values_ptr, mask=values_in, other=0, volatile=True)
    lses = tl.load(lses_ptr, mask=lses_in, other=0, volatile=True)
    old = tl.sum(
        tl.sum(_is_stale(values, values_in, epoch), 2) + _is_stale(lses, lses_in, epoch), 1
    )
    missing = tl.sum(old, 0)
    looks = 0
    start, stop = epoch - epoch, epoch != epoch
    while (missing > 0) & (stop == 0):
        values = tl.load(values_ptr, mask=values_in, other=0, volatile=True)
        lses = tl.load(lses_ptr, mask=lses_in, other=0, volatile=True)
        old = tl.sum(
            tl.sum(_is_stale(values, values_in, epoch), 2) + _is_stale(lses, lses_in, epoch), 1
        )
        missing = tl.sum(old, 0)
        looks += 1
        if (looks % LOOKS == 0) & (missing > 0):
            start, stop, elsewhere = keep_time(start, state_ptr, limit_ns)
            if stop & (elsewhere == 0):
                report(_peer_of(old, sources), epoch, state_ptr, fault_ptr)
    return values, lses, missing == 0


@triton.jit
def await_flags(
    flags_ptr, inside, sources, epoch, state_ptr, fault_ptr, limit_ns, READS: tl.constexpr = True
):
    """Whether the flags (S,) of all sources that are `inside` came to be this epoch's; then their data may be read, with
    READS by this kernel too."""
    raised = flag(epoch)
    flags = tl.load(flags_ptr, mask=inside, other=0, volatile=True)
    missing = (inside & (flags != raised)).to(tl.int32)
    looks = 0
    start, stop = epoch - epoch, epoch != epoch
    while (tl.sum(missing, 0) > 0) & (stop == 0):
        flags = tl.load(flags_ptr, mask=inside, other=0, volatile=True)
        missing = (inside & (flags != raised)).to(tl.int32)
        looks += 1
        if (looks % LOOKS == 0) & (tl.sum(missing, 0) > 0):
            start, stop, elsewhere = keep_time(start, state_ptr, limit_ns)
            if stop & (elsewhere == 0):
                report(_peer_of(missing, sources), epoch, state_ptr, fault_ptr)
    if READS:
        tl.atomic_add(flags_ptr, 0, mask=inside, sem="acquire", scope="sys")
        tl.debug_barrier()
    return tl.sum(missing, 0) == 0


@triton.jit
def await_flag(flag_ptr, source, epoch, state_ptr, fault_ptr, limit_ns):
    """`await_flags` of one flag, for programs of any number of warps: every look is an atomic, which one thread
    makes for all, and so is the clock."""
    raised = flag(epoch)
    found = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    looks = 0
    start, stop = epoch - epoch, epoch != epoch
    while (found != raised) & (stop == 0):
        found = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        looks += 1
        if (looks % LOOKS == 0) & (found != raised):
            start, stop, elsewhere = keep_time(start, state_ptr, limit_ns)
            if stop & (elsewhere == 0):
                report(source, epoch, state_ptr, fault_ptr)
    tl.debug_barrier()
    return found == raised


@triton.jit
def raise_flag(flag_ptr, epoch):
    """Sets one flag in another rank's memory, after everything that this program wrote."""
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr, flag(epoch), sem="release", scope="sys")


@triton.jit
def raise_flags(flags_ptr, inside, epoch):
    """Sets flags in other ranks' memory, after everything that this program wrote."""
    tl.debug_barrier()
    tl.atomic_xchg(
        flags_ptr,
        tl.zeros_like(inside).to(tl.int64) + flag(epoch),
        mask=inside,
        sem="release",
        scope="sys",
    )
