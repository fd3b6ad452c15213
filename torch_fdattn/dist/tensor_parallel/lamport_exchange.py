"""`low_latency`: collectives of few numbers, in one launch and one trip, by a Lamport exchange (`dist/symm/lamport.py`).

What travels, for W ranks:

    all-reduce      every rank sends all to all others: (W - 1) times the bytes. Sums in the order of ranks, in fp32
    reduce-scatter  to each rank what it owns, which sums it so
    all-gather      all to all others; a packet of two minus zeros comes out as zeros
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
from torch_fdattn.launch.launches import launch
from torch_fdattn.launch.pdl import await_previous
from torch_fdattn.ops.gemm.tile_product import triton_dtype
from torch_fdattn.ops.launch import cdiv, power_of_two
from torch_fdattn.ops.library import INTERPRET
from torch_fdattn.ops.pdl import pdl_option, uses_pdl

#: (bytes up to which, packets of all ranks that a program looks at together). On two H200, 160 KiB: 512 takes 0.7 µs
#: less than 1024; 1.3 MiB: 0.4 more; 10 MiB: 10 more.
_TILE_PACKETS = ((1 << 19, 512), (6 << 20, 1024), (None, 2048))


@triton.jit
def exchange(
    x_ptr, at, inside, addresses_ptr, state_ptr, fault_ptr, buffer_bytes, limit_ns, rank, packets,
    WORLD: tl.constexpr, SOURCES: tl.constexpr, SCATTERED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Sends packets `at` (B,) of x to all other ranks, or with SCATTERED those of x (WORLD, packets) that each of them
    owns, and takes theirs: (packets (S, B) by source, the own among them; whether all came; epoch; turn)."""
    epoch = read_epoch(state_ptr)
    turn, before = tl.load(state_ptr + TURN), tl.load(state_ptr + PREVIOUS_PACKETS)
    each = packets_per_slot(buffer_bytes, WORLD)
    mine = tl.cast(rank, tl.int64) * packets if SCATTERED else 0
    own = nonzero_packets(tl.load(x_ptr + mine + at, mask=inside, other=0), DTYPE)
    sends = inside & may_send(state_ptr, epoch)
    for i in tl.static_range(1, WORLD):
        peer = (rank + i) % WORLD
        part = own
        if SCATTERED:
            theirs = x_ptr + tl.cast(peer, tl.int64) * packets
            part = nonzero_packets(tl.load(theirs + at, mask=inside, other=0), DTYPE)
        push(part, at, sends, addresses_ptr, rank, peer, turn, each, buffer_bytes, WORLD)
    clear(addresses_ptr, rank, turn, before, each, buffer_bytes, WORLD, SOURCES, at.shape[0])

    sources = tl.arange(0, SOURCES)
    others = ((sources < WORLD) & (sources != rank))[:, None]
    here = buffer(addresses_ptr, rank, turn, buffer_bytes)
    received, came = receive_lamport(
        here + slot_of(sources, rank, WORLD)[:, None] * each + at[None, :], others & inside[None, :], sources[:, None], epoch,
        state_ptr, fault_ptr, limit_ns,
    )  # fmt: skip
    # The own as the others have it: the sum's bits are the same everywhere.
    received = tl.where((sources == rank)[:, None], own[None, :], tl.where(others, received, 0))
    return received, came, epoch, turn


@triton.jit
def summed(received, came, dtype: tl.constexpr):
    """The packets' sums over sources, fp32: `halves`; NaN if not all came."""
    low, high = halves(received, dtype)
    none = tl.where(came, 0.0, float("nan"))  # makes plus zero of minus zeros
    return tl.sum(low, 0) + none, tl.sum(high, 0) + none


@triton.jit(do_not_specialize=["buffer_bytes", "limit_ns", "rank"])
def _lamport_exchange_kernel(
    x_ptr, y_ptr, addresses_ptr, state_ptr, fault_ptr, buffer_bytes, limit_ns, rank, packets, WORLD: tl.constexpr,
    SOURCES: tl.constexpr, BLOCK: tl.constexpr, SCATTERED: tl.constexpr, GATHERED: tl.constexpr, DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """x (packets,) -> y (packets,), the sum over ranks, or, GATHERED, y (WORLD, packets), all ranks' x; SCATTERED, of
    x (WORLD, packets) each rank owns one. Packets of numbers of DTYPE."""
    await_previous(PDL)
    x_ptr, y_ptr = as_int32(x_ptr), as_int32(y_ptr)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < packets
    received, came, epoch, turn = exchange(
        x_ptr, at, inside, addresses_ptr, state_ptr, fault_ptr, buffer_bytes, limit_ns, rank, packets, WORLD, SOURCES,
        SCATTERED, DTYPE,
    )  # fmt: skip
    if GATHERED:
        received = tl.where(came, restore_zeros(received, DTYPE), NANS)
        sources = tl.arange(0, SOURCES)[:, None]
        expected = (sources < WORLD) & inside[None, :]
        tl.store(y_ptr + sources.to(tl.int64) * packets + at[None, :], received, mask=expected)
    else:
        low, high = summed(received, came, DTYPE)
        tl.store(y_ptr + at, joined(low, high, DTYPE), mask=inside)
    leave_turn(state_ptr, epoch, turn, packets)


def fills_packets(x: Tensor) -> bool:
    """Whether x's numbers fill whole packets."""
    return x.nbytes % 4 == 0


def packet_aligned(x: Tensor) -> Tensor:
    """x, or a copy, that kernels may read as packets."""
    x = x.contiguous()
    return x if x.data_ptr() % 4 == 0 else x.clone()


def _run(
    op: str, x: Tensor, y: Tensor, packets: int, group_name: str, rank: int, world: int
) -> None:  # fmt: skip
    where = channel_of_packets(packets, group_name, f"low_latency/{op}", x.device, world)
    x, buffer_bytes, limit_ns = packet_aligned(x), bytes_per_buffer(where), timeout_ns()
    tile = next(tile for most, tile in _TILE_PACKETS if most is None or 4 * packets <= most)
    block = 1 << 12 if INTERPRET else max(32, tile // power_of_two(world))
    pdl = uses_pdl(y)
    launch(
        _lamport_exchange_kernel, cdiv(packets, block),
        x, y, where.memory.addresses, where.state, where.fault.tensor, buffer_bytes, limit_ns, rank, packets, world, power_of_two(world), block, op == "scatter", op == "gather",
        triton_dtype(x.dtype), pdl, num_warps=1, **pdl_option(pdl),
    )  # fmt: skip


def all_reduce(x: Tensor, y: Tensor, group_name: str, rank: int, world: int) -> None:
    """Writes the sum of x, which `fills_packets`, over the ranks into y; of one dtype, y contiguous."""
    _run("all_reduce", x, y, x.nbytes // 4, group_name, rank, world)


def reduce_scatter(x: Tensor, y: Tensor, group_name: str, rank: int, world: int) -> None:
    """Writes the sum of the rank-th of x's W equal parts over the ranks into y, which `fills_packets`; else as above."""
    _run("scatter", x, y, y.nbytes // 4, group_name, rank, world)


def all_gather(x: Tensor, y: Tensor, group_name: str, rank: int, world: int) -> None:
    """Writes all ranks' x, which `fills_packets`, into y, one after another; else as above."""
    _run("gather", x, y, x.nbytes // 4, group_name, rank, world)
