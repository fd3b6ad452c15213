"""Strategy `fused`: rows travel as LL packets, and the kernel that sends them also merges them.

Every program takes a tile of rows, writes each number together with the call's epoch as one 64-bit packet into
every other rank's memory, polls its own memory until the packets of all ranks have arrived, and merges them in the
order of ranks: one launch, one trip over the wire, no flag and no fence (the LL protocol of NCCL, whose docs
name it for small messages). Cost: (W - 1) · R · (DV + 1) · 8 bytes sent by every rank, twice the payload; so it
is for few rows, where latency counts. With head_sharded outputs each row goes to its owner alone.

A program waits only for the program of the same tile on other ranks. All ranks take the tiles in the same order, so
those that run can always finish.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.decode.rows import (
    RowExchange,
    Rows,
    merged,
    own_rows,
    tile_of,
    with_own,
    write_rows,
)
from torch_fdattn.dist.symm.signals import (
    as_int64,
    at_rank,
    leave_epoch,
    ll_packet,
    may_send,
    payload,
    read_epoch,
    receive_packets,
)
from torch_fdattn.launch.launches import launch
from torch_fdattn.launch.pdl import await_previous
from torch_fdattn.ops.library import launches
from torch_fdattn.ops.pdl import pdl_option, uses_pdl


@triton.jit
def slots(address, source, row, rows, WORLD: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers to the packets of a source's rows: to the first of each row's values, and to lses."""
    at = (source * rows + row).to(tl.int64)
    base = as_int64(address)
    return base + at * BLOCK_D, base + (rows * BLOCK_D).to(tl.int64) * WORLD + at


@triton.jit
def send_rows(values, lses, row, row_in, d, peer, rank, rows, epoch, channel, v_dim, WORLD: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Writes rows' dims d (M, D) and lses (M,) as packets into a peer's memory."""
    value_ptr, lse_ptr = slots(
        at_rank(channel[0], peer, epoch, channel[1]), rank, row, rows, WORLD, BLOCK_D
    )
    inside = row_in[:, None] & (d[None, :] < v_dim)
    tl.store(value_ptr[:, None] + d[None, :], ll_packet(values, epoch), mask=inside)
    tl.store(lse_ptr, ll_packet(lses, epoch), mask=row_in)


@triton.jit
def receive_rows(row, row_in, d, sources, inside, address, rows, epoch, channel, v_dim, WORLD: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """(values (S, M, D), lses (S, M), whether they came) of the sources (S,) that are `inside`; address: of this
    rank's half."""
    value_ptr, lse_ptr = slots(address, sources[:, None], row[None, :], rows, WORLD, BLOCK_D)
    expected = inside[:, None] & row_in[None, :]
    values, lses, came = receive_packets(
        value_ptr[:, :, None] + d[None, None, :], lse_ptr, expected[:, :, None] & (d < v_dim)[None, None, :], expected,
        sources, epoch, channel[2], channel[3], channel[4],
    )  # fmt: skip
    return payload(values, tl.float32), payload(lses, tl.float32), came


@triton.jit
def exchange_rows(
    own, row, sent, row_in, d, owner, rank, address, rows, epoch, channel, target, shape, WORLD: tl.constexpr,
    SOURCES: tl.constexpr, OWNERS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sends this rank's own (values (M, D), lses (M,)) of the rows `sent`, receives the others' at its `address`,
    and writes what they merge to."""
    v_dim = shape[3]
    for i in tl.static_range(1, WORLD):
        peer = (rank + i) % WORLD
        if (OWNERS == 1) | (peer == owner):
            send_rows(
                own[0], own[1], row, sent, d, peer, rank, rows, epoch, channel, v_dim, WORLD, BLOCK_D
            )  # fmt: skip
    if (OWNERS == 1) | (owner == rank):
        sources = tl.arange(0, SOURCES)
        others = (sources < WORLD) & (sources != rank)
        values, lses, came = receive_rows(
            row, row_in, d, sources, others, address, rows, epoch, channel, v_dim, WORLD, BLOCK_D
        )
        values, lses = with_own(values, lses, own[0], own[1], sources, rank, WORLD)
        out, lse = merged(values, lses)
        write_rows(out, lse, came, row, row_in, d, target, shape)


@triton.jit(
    do_not_specialize=["half_bytes", "limit_ns", "rank", "batch", "rows", "share", "first_head"]
)
def _fused_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, addresses_ptr, state_ptr, fault_ptr, part_strides, half_bytes,
    limit_ns, rank, batch, rows, share, first_head, heads: tl.constexpr, out_heads: tl.constexpr,
    q_len: tl.constexpr, v_dim: tl.constexpr, WORLD: tl.constexpr, SOURCES: tl.constexpr, OWNERS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    shape = (batch, heads, q_len, v_dim)
    channel = (addresses_ptr, half_bytes, state_ptr, fault_ptr, limit_ns)
    epoch = read_epoch(state_ptr)
    row, row_in, owner = tile_of(tl.program_id(0), share, OWNERS, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    own = own_rows(row, row_in, d, (part_ptr, part_lse_ptr, part_strides), shape)
    sent = row_in & may_send(state_ptr, epoch)
    address = at_rank(addresses_ptr, rank, epoch, half_bytes)
    exchange_rows(
        own, row, sent, row_in, d, owner, rank, address, rows, epoch, channel,
        (out_ptr, lse_ptr, first_head, out_heads), shape, WORLD, SOURCES, OWNERS, BLOCK_D,
    )  # fmt: skip
    leave_epoch(state_ptr, epoch, tl.num_programs(0))


def packet_bytes(rows: Rows) -> int:
    """Bytes of all sources' packets."""
    return rows.world * rows.count * (rows.block_d + 1) * 8


def merge(part: Tensor, part_lse: Tensor, dtype: torch.dtype, group_name: str, head_sharded: bool):
    """The merged (out, lse) of all ranks' partial results."""
    call = RowExchange.begin(part, dtype, group_name, "fused", packet_bytes, head_sharded)
    pdl = uses_pdl(part)
    launches["dist_merge/fused"] += 1
    launch(
        _fused_kernel, call.owners * call.tiles,
        part, part_lse, *call.memory, part.stride(), *call.numbers, *call.constants, pdl, num_warps=1, **pdl_option(pdl),
    )  # fmt: skip
    return call.out, call.lse
