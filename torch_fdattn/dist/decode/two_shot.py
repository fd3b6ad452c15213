"""Strategy `two_shot`: each rank merges its own share of the rows, and sends the result to all.

First shot: every rank sends each row's fp32 partial result to the row's owner. The owner merges them and, second
shot, sends the row in the output's dtype to all others, two 16-bit numbers a packet. All in one launch. Both shots are
a Lamport exchange (`lamport.py`): packets of 4 bytes, which have come when they are not zero. Cost: (W - 1) / W · R ·
((DV + 1) · 4 + DV · 2 + 4) bytes sent by every rank with a 16-bit output, 1 / W of what `fused` sends and less, but
two trips over the wire: for many rows.

**Why three buffers do.** A rank that writes into a peer's buffer in call n must know that the peer's call n - 2, which
zeroed it, has ended. It does: its own call n - 1 has ended, and in that it heard of all ranks. Of whose rows it owns,
from each rank; for a row of another owner, from that owner, which sends it only once it has heard from each rank. So
one row is enough, and there may be fewer rows than ranks. Nothing comes after the buffer was zeroed: a call waits for
every packet that is sent to it. An owner that waits in vain sends its row without having heard from all, and says so:
that breaks the receiver's channel, which sends nothing in later calls.

An owner that waits in vain says in the second shot for whom, or else the others would blame the owner. They wait
for it twice as long as it may wait itself; but where they own rows, too, their own first shot ends it all sooner.
On a channel that broke in an earlier call nothing is sent, awaited or zeroed, and nothing found there is taken.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.decode import fused
from torch_fdattn.dist.decode.rows import (
    Rows,
    merged,
    outputs,
    own_rows,
    with_own,
    write_rows,
)
from torch_fdattn.dist.groups import rank_and_size
from torch_fdattn.dist.symm.faults import timeout_ns
from torch_fdattn.dist.symm.lamport import (
    PREVIOUS_PACKETS,
    TURN,
    buffer,
    bytes_per_buffer,
    channel_of_bytes,
    clear_all,
    leave_turn,
    nonzero_packets,
    receive_lamport_with_lses,
    restore_zeros,
    slot_of,
)
from torch_fdattn.dist.symm.signals import may_send, packed, read_epoch, report, unpacked
from torch_fdattn.launch.launches import launch
from torch_fdattn.launch.pdl import await_previous
from torch_fdattn.ops.launch import cdiv
from torch_fdattn.ops.library import launches
from torch_fdattn.ops.pdl import pdl_option, uses_pdl

#: The lse of a row that lacks a rank's part, its low bits that rank's number + 1: bits that no arithmetic gives.
ABSENT = tl.constexpr(0x7FA00000)
#: Packets that a program zeroes at a time.
_CLEARED = tl.constexpr(256)


class Layout(NamedTuple):
    """A buffer's regions, in packets: where the others begin behind the first, and where the last one ends.

    Each begins at a multiple of four packets, for wide loads and stores:

        parts      W - 1 slots, the next rank's first, of the values (S, D) that this rank merges; S: rows of an owner
        outs       what the owners send of all R rows: (R, PACKETS)
        part_lses  W - 1 slots of S
        out_lses   R
    """

    outs: int
    part_lses: int
    out_lses: int
    end: int

    @classmethod
    def of(cls, rows: Rows, dtype: torch.dtype) -> Layout:
        parts = (rows.world - 1) * cdiv(rows.count, rows.world)
        packets = rows.block_d // 2 if dtype.itemsize == 2 else rows.block_d
        outs = parts * rows.block_d
        part_lses = outs + rows.count * packets
        out_lses = part_lses + cdiv(parts, 4) * 4
        return cls(outs, part_lses, out_lses, out_lses + cdiv(rows.count, 4) * 4)


@triton.jit
def region(base, first):
    """A region of the buffer at `base`."""
    return base + tl.multiple_of(tl.cast(first, tl.int64), 4)


@triton.jit
def send_parts(values, lses, at, sends, d, base, part_lses, v_dim, BLOCK_D: tl.constexpr):
    """First shot: rows' dims d (M, D) and lses (M,) to rows `at` (M,) of all slots, in their owner's buffer at `base`."""
    value_packets = nonzero_packets(values.to(tl.int32, bitcast=True), tl.float32)
    lse_packets = nonzero_packets(lses.to(tl.int32, bitcast=True), tl.float32)
    inside = sends[:, None] & (d[None, :] < v_dim)
    tl.store(base + at[:, None] * BLOCK_D + d[None, :], value_packets, mask=inside)
    tl.store(region(base, part_lses) + at, lse_packets, mask=sends)


@triton.jit
def write_sent(bits, lse_bits, came, row, row_in, d, target, shape):
    """`rows.write_rows` of rows as they travelled, on their owner too: the same bits on all ranks."""
    dtype: tl.constexpr = target[0].dtype.element_ty
    values = unpacked(restore_zeros(bits, dtype), dtype)
    lses = restore_zeros(lse_bits, tl.float32).to(tl.float32, bitcast=True)
    write_rows(values, lses, came, row, row_in, d, target, shape)


@triton.jit(
    do_not_specialize=[
        "buffer_bytes", "limit_ns", "rank", "batch", "rows", "share", "outs", "part_lses", "out_lses", "end",
    ]
)  # fmt: skip
def _two_shot_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, addresses_ptr, state_ptr, fault_ptr, part_strides, buffer_bytes,
    limit_ns, rank, batch, rows, share, outs, part_lses, out_lses, end, heads: tl.constexpr, q_len: tl.constexpr,
    v_dim: tl.constexpr, WORLD: tl.constexpr, SOURCES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    PACKETS: tl.constexpr = BLOCK_D // 2 if dtype.primitive_bitwidth == 16 else BLOCK_D
    shape = (batch, heads, q_len, v_dim)
    epoch = read_epoch(state_ptr)
    turn, before = tl.load(state_ptr + TURN), tl.load(state_ptr + PREVIOUS_PACKETS)
    whole = may_send(state_ptr, epoch)
    owner = tl.program_id(0) % WORLD
    within = tl.program_id(0) // WORLD * BLOCK_R + tl.arange(0, BLOCK_R)
    row = owner * share + within
    row_in = (within < share) & (row < rows)
    travels = row_in & whole
    d = tl.arange(0, BLOCK_D)
    values, lses = own_rows(row, row_in, d, (part_ptr, part_lse_ptr, part_strides), shape)
    if owner != rank:
        at = (slot_of(rank, owner, WORLD) * share + within).to(tl.int64)
        there = buffer(addresses_ptr, owner, turn, buffer_bytes)
        send_parts(values, lses, at, travels, d, there, part_lses, v_dim, BLOCK_D)
    clear_all(addresses_ptr, rank, turn, tl.where(whole, before, 0), buffer_bytes, _CLEARED)

    here = buffer(addresses_ptr, rank, turn, buffer_bytes)
    target = (out_ptr, lse_ptr, 0, heads)
    w = tl.arange(0, PACKETS)
    out_at = row.to(tl.int64)[:, None] * PACKETS + w[None, :]
    packets_in = travels[:, None] & (w[None, :] < tl.cdiv(v_dim * PACKETS, BLOCK_D))
    if owner == rank:
        sources = tl.arange(0, SOURCES)
        others = (sources < WORLD) & (sources != rank)
        expected = others[:, None] & travels[None, :]
        at = (slot_of(sources, rank, WORLD)[:, None] * share + within[None, :]).to(tl.int64)
        theirs, their_lses, came = receive_lamport_with_lses(
            here + at[:, :, None] * BLOCK_D + d[None, None, :], region(here, part_lses) + at,
            expected[:, :, None] & (d < v_dim)[None, None, :], expected, sources, epoch, state_ptr, fault_ptr, limit_ns,
        )  # fmt: skip
        parts, all_lses = with_own(
            theirs.to(tl.float32, bitcast=True), their_lses.to(tl.float32, bitcast=True), values, lses, sources, rank,
            WORLD,
        )  # fmt: skip
        out, lse = merged(parts, all_lses)
        bits, lse_bits = packed(out, dtype), lse.to(tl.int32, bitcast=True)
        if came == 0:
            fault = tl.load(fault_ptr, volatile=True).to(tl.int32)
            lse_bits = tl.zeros_like(lse_bits) + (ABSENT | fault)
        value_packets, lse_packets = (
            nonzero_packets(bits, dtype),
            nonzero_packets(lse_bits, tl.float32),
        )
        for i in tl.static_range(1, WORLD):
            there = buffer(addresses_ptr, (rank + i) % WORLD, turn, buffer_bytes)
            tl.store(region(there, outs) + out_at, value_packets, mask=packets_in)
            tl.store(region(there, out_lses) + row, lse_packets, mask=travels)
        write_sent(bits, lse_bits, came & whole, row, row_in, d, target, shape)
    else:
        one = tl.arange(0, 1)
        found, found_lses, came = receive_lamport_with_lses(
            (region(here, outs) + out_at)[None, :, :], (region(here, out_lses) + row)[None, :],
            packets_in[None, :, :], travels[None, :], one + owner, epoch, state_ptr, fault_ptr, 2 * limit_ns,
        )  # fmt: skip
        bits = tl.reshape(found, [BLOCK_R, PACKETS])
        lse_bits = tl.reshape(found_lses, [BLOCK_R])
        absent = tl.max(
            tl.where(row_in & (lse_bits >> 16 == ABSENT >> 16), lse_bits & 0xFFFF, -1), 0
        )
        if came & (absent >= 0):
            came = absent < 0
            other = (absent > 0) & (absent != rank + 1)  # this rank may be the late one
            report(tl.where(other, absent - 1, owner), epoch, state_ptr, fault_ptr)
        write_sent(bits, lse_bits, came & whole, row, row_in, d, target, shape)
    leave_turn(state_ptr, epoch, turn, end)


def merge(part: Tensor, part_lse: Tensor, dtype: torch.dtype, group_name: str, head_sharded: bool):
    """The merged (out, lse) of all ranks' partial results."""
    if head_sharded:  # its first shot alone
        return fused.merge(part, part_lse, dtype, group_name, True)
    rows = Rows.of(part, rank_and_size(group_name)[1])
    layout = Layout.of(rows, dtype)
    where = channel_of_bytes(4 * layout.end, group_name, "two_shot", part.device)
    out, lse = outputs(part, dtype, rows.heads)
    block, tiles = rows.tile(rows.world)
    pdl = uses_pdl(part)
    launches["dist_merge/two_shot"] += 1
    launch(
        _two_shot_kernel, rows.world * tiles,
        part, part_lse, out, lse, where.memory.addresses, where.state, where.fault.tensor, part.stride(),
        bytes_per_buffer(where), timeout_ns(), where.rank, rows.batch, rows.count, cdiv(rows.count, rows.world), *layout,
        rows.heads, rows.q_len, rows.v_dim, rows.world, rows.sources, block, rows.block_d,
        pdl, num_warps=1, **pdl_option(pdl),
    )  # fmt: skip
    return out, lse
