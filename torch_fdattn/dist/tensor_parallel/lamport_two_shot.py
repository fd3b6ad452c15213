"""All-reduces in two trips by the Lamport exchange of `dist/symm/lamport.py`: every packet is summed by one rank, its owner.

    first trip    every rank sends each packet to the packet's owner, who sums all ranks' in fp32, in the order of ranks
    second trip   the owner rounds the sum and sends it to all others: the same bits everywhere

A rank sends 2 (W - 1) / W times the bytes, in one shot W - 1 times, for a second trip over the wire: for three ranks
and more, from `TWO_SHOT_BYTES` on. A program's packets have all ranks for owners, so that all of them are busy. It waits for
the program of the same number on other ranks, in the first trip for all of them: what `dist/symm/lamport.py` says of its three
buffers holds. A buffer has one more slot than there, for the sums, which have an owner each.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.symm.faults import timeout_ns
from torch_fdattn.dist.symm.lamport import (
    NANS,
    PREVIOUS_PACKETS,
    TURN,
    as_int32,
    buffer,
    bytes_per_buffer,
    channel_of_packets,
    clear,
    halves,
    joined,
    leave_turn,
    nonzero_packets,
    packets_per_slot,
    push,
    receive_lamport,
    restore_zeros,
    slot_of,
)
from torch_fdattn.dist.symm.signals import may_send, read_epoch
from torch_fdattn.dist.tensor_parallel.lamport_exchange import exchange, packet_aligned, summed
from torch_fdattn.launch.launches import launch
from torch_fdattn.launch.pdl import await_previous
from torch_fdattn.ops.gemm.tile_product import triton_dtype
from torch_fdattn.ops.launch import cdiv, power_of_two
from torch_fdattn.ops.library import INTERPRET
from torch_fdattn.ops.pdl import pdl_option, uses_pdl

#: Bytes of a rank's part times (W - 1) (W - 2) / W, what the wire is spared, from which on two trips are faster. Four
#: H100, µs in one shot and two: 512 KiB 7.4 and 7.3, 1 MiB 12.5 and 10.0, 2 MiB 21.9 and 17.5; with the product in the
#: launch 640 KiB 17.9 and 17.0, 2 MiB 37.3 and 28.2.
TWO_SHOT_BYTES = 900_000
#: Packets that a program of one warp exchanges. Four H100, 2 MiB: 17.5 µs; 256 packets 20.2, 512 22.4, 1024 33.6.
_BLOCK_PACKETS = 128


def shots(nbytes: int, world: int) -> int:
    """Trips in which so many bytes are all-reduced: 1 or 2."""
    return 2 if nbytes * (world - 1) * (world - 2) >= TWO_SHOT_BYTES * world else 1


def slots(shots: int, world: int) -> int:
    """The `world` of `channel_of_packets` and `packets_per_slot` for calls in so many shots."""
    return world + 1 if shots == 2 else world


@triton.jit
def send_to_owners(
    own, at, inside, owner, epoch, turn, addresses_ptr, state_ptr, buffer_bytes, rank, WORLD: tl.constexpr
):  # fmt: skip
    """The first trip: own (B,), the packets `at` of this rank's part, each to its owner."""
    each = packets_per_slot(buffer_bytes, WORLD + 1)
    sends = inside & may_send(state_ptr, epoch)
    for i in tl.static_range(1, WORLD):
        peer = (rank + i) % WORLD
        push(
            own, at, sends & (owner == peer), addresses_ptr, rank, peer, turn, each, buffer_bytes, WORLD
        )  # fmt: skip


@triton.jit
def share_sums(
    low, high, came, at, inside, owner, epoch, turn, addresses_ptr, state_ptr, fault_ptr, buffer_bytes, limit_ns, rank,
    WORLD: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The second trip: low, high (B,), fp32 sums of the packets that this rank owns, which it sends if all parts `came`;
    returns the packets (B,) of all sums, NaN where one did not come."""
    each = packets_per_slot(buffer_bytes, WORLD + 1)
    mine = inside & (owner == rank)
    total = nonzero_packets(joined(low, high, DTYPE), DTYPE)
    # A sum without all parts is no sum: who waits for it finds out as this rank did who is late, in a first trip of its
    # own. This wait is twice as long, so that those end first: of a program's few last packets a rank may own none.
    sends = mine & may_send(state_ptr, epoch) & came
    sums = (WORLD - 1) * each + at
    for i in tl.static_range(1, WORLD):
        there = buffer(addresses_ptr, (rank + i) % WORLD, turn, buffer_bytes)
        tl.store(there + sums, total, mask=sends)
    here = buffer(addresses_ptr, rank, turn, buffer_bytes)
    found, all_came = receive_lamport(
        (here + sums)[None, :], (inside & (owner != rank))[None, :], owner[None, :], epoch, state_ptr, fault_ptr,
        2 * limit_ns,
    )  # fmt: skip
    packets = tl.where(mine, total, tl.reshape(found, at.shape))
    return tl.where(came & all_came, restore_zeros(packets, DTYPE), NANS)


@triton.jit
def exchange_sums(
    x_ptr, at, inside, addresses_ptr, state_ptr, fault_ptr, buffer_bytes, limit_ns, rank, packets, WORLD: tl.constexpr,
    SOURCES: tl.constexpr, DTYPE: tl.constexpr, SHOTS: tl.constexpr,
):  # fmt: skip
    """Packets `at` (B,) of x summed over the ranks: (their lower numbers, the upper, fp32, as `lamport.halves`; epoch;
    turn)."""
    if SHOTS == 1:
        found, came, epoch, turn = exchange(
            x_ptr, at, inside, addresses_ptr, state_ptr, fault_ptr, buffer_bytes, limit_ns, rank, packets, WORLD, SOURCES,
            False, DTYPE,
        )  # fmt: skip
        low, high = summed(found, came, DTYPE)
        return low, high, epoch, turn
    else:
        BLOCK: tl.constexpr = at.shape[0]
        epoch = read_epoch(state_ptr)
        turn, before = tl.load(state_ptr + TURN), tl.load(state_ptr + PREVIOUS_PACKETS)
        own = nonzero_packets(tl.load(x_ptr + at, mask=inside, other=0), DTYPE)
        # All ranks own some, so that each hears of all others itself and names the one that does not come.
        # Of four packets each, so that stores are wide.
        fours = tl.cdiv(tl.sum(inside.to(tl.int32), 0), 4)
        owner = tl.arange(0, BLOCK) // 4 * WORLD // tl.maximum(fours, 1)
        send_to_owners(
            own, at, inside, owner, epoch, turn, addresses_ptr, state_ptr, buffer_bytes, rank, WORLD
        )  # fmt: skip
        each = packets_per_slot(buffer_bytes, WORLD + 1)
        clear(addresses_ptr, rank, turn, before, each, buffer_bytes, WORLD + 1, SOURCES, BLOCK)
        sources = tl.arange(0, SOURCES)
        others = ((sources < WORLD) & (sources != rank))[:, None]
        here = buffer(addresses_ptr, rank, turn, buffer_bytes)
        found, came = receive_lamport(
            here + slot_of(sources, rank, WORLD)[:, None] * each + at[None, :],
            others & (inside & (owner == rank))[None, :], sources[:, None], epoch, state_ptr, fault_ptr, limit_ns,
        )  # fmt: skip
        found = tl.where((sources == rank)[:, None], own[None, :], tl.where(others, found, 0))
        low, high = summed(found, came, DTYPE)
        sums = share_sums(
            low, high, came, at, inside, owner, epoch, turn, addresses_ptr, state_ptr, fault_ptr, buffer_bytes, limit_ns,
            rank, WORLD, DTYPE,
        )  # fmt: skip
        low, high = halves(sums, DTYPE)
        return low, high, epoch, turn


@triton.jit(do_not_specialize=["buffer_bytes", "limit_ns", "rank"])
def _two_shot_kernel(
    x_ptr, y_ptr, addresses_ptr, state_ptr, fault_ptr, buffer_bytes, limit_ns, rank, packets, WORLD: tl.constexpr,
    SOURCES: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x (packets,) -> y (packets,), the sum over ranks; packets of numbers of DTYPE."""
    await_previous(PDL)
    x_ptr, y_ptr = as_int32(x_ptr), as_int32(y_ptr)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < packets
    low, high, epoch, turn = exchange_sums(
        x_ptr, at, inside, addresses_ptr, state_ptr, fault_ptr, buffer_bytes, limit_ns, rank, packets, WORLD, SOURCES, DTYPE,
        2,
    )  # fmt: skip
    tl.store(y_ptr + at, joined(low, high, DTYPE), mask=inside)
    leave_turn(state_ptr, epoch, turn, packets)


def all_reduce(x: Tensor, y: Tensor, group_name: str, rank: int, world: int) -> None:
    """As `lamport_exchange.all_reduce`, in two trips; three ranks or more."""
    packets = x.nbytes // 4
    purpose = "low_latency/lamport_two_shot"
    where = channel_of_packets(packets, group_name, purpose, x.device, slots(2, world))
    x, buffer_bytes, limit_ns = packet_aligned(x), bytes_per_buffer(where), timeout_ns()
    block = 1 << 12 if INTERPRET else _BLOCK_PACKETS
    pdl = uses_pdl(y)
    launch(
        _two_shot_kernel, cdiv(packets, block),
        x, y, where.memory.addresses, where.state, where.fault.tensor, buffer_bytes, limit_ns, rank, packets, world,
        power_of_two(world), block, triton_dtype(x.dtype), pdl, num_warps=1, **pdl_option(pdl),
    )  # fmt: skip
