"""Strategy `push`: rows are pushed to the other ranks, with one signal for all of a source's rows.

Two kernels. In the first every program writes its tile of rows into all other ranks' memory; the last one to have
done so raises this source's one flag there. The second waits, in each program, for the flags of all sources,
and merges (the coarse signals of iris's flash decode). Cost: the bytes of `push_tiled`; one fence and W - 1 flags
in all, but no row is merged before the last one has come.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.decode.push_tiled import (
    flags_at,
    push_rows,
    pushed_bytes,
    pushed_rows,
)
from torch_fdattn.dist.decode.rows import (
    RowExchange,
    merged,
    own_rows,
    tile_of,
    with_own,
    write_rows,
)
from torch_fdattn.dist.symm.signals import (
    ARRIVALS,
    as_int64,
    at_rank,
    await_flags,
    may_send,
    raise_flags,
    read_epoch,
    take_epoch,
)
from torch_fdattn.launch.launches import launch
from torch_fdattn.ops.library import launches


@triton.jit(do_not_specialize=["half_bytes", "rank", "batch", "rows", "share"])
def _push_kernel(
    part_ptr, part_lse_ptr, addresses_ptr, state_ptr, part_strides, half_bytes, rank, batch, rows, share,
    heads: tl.constexpr, q_len: tl.constexpr, v_dim: tl.constexpr, WORLD: tl.constexpr, SOURCES: tl.constexpr,
    OWNERS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    shape = (batch, heads, q_len, v_dim)
    epoch = read_epoch(state_ptr)
    row, row_in, owner = tile_of(tl.program_id(0), share, OWNERS, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    values, lses = own_rows(row, row_in, d, (part_ptr, part_lse_ptr, part_strides), shape)
    sends = may_send(state_ptr, epoch)
    for i in tl.static_range(1, WORLD):
        peer = (rank + i) % WORLD
        if (OWNERS == 1) | (peer == owner):
            address = at_rank(addresses_ptr, peer, epoch, half_bytes)
            push_rows(values, lses, row, row_in & sends, address, rank, rows, v_dim, WORLD, BLOCK_D)
    tl.debug_barrier()
    arrived = tl.atomic_add(state_ptr + ARRIVALS, 1, sem="acq_rel", scope="sys")
    if arrived == tl.num_programs(0) - 1:
        tl.store(state_ptr + ARRIVALS, 0)
        sources = tl.arange(0, SOURCES)
        others = (sources < WORLD) & (sources != rank)
        flags = flags_at(addresses_ptr, sources, others, epoch, half_bytes)
        raise_flags(flags + rank, others & sends, epoch)


@triton.jit(
    do_not_specialize=["half_bytes", "limit_ns", "rank", "batch", "rows", "share", "first_head"]
)
def _merge_pushed_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, addresses_ptr, state_ptr, fault_ptr, part_strides, half_bytes,
    limit_ns, rank, batch, rows, share, first_head, heads: tl.constexpr, out_heads: tl.constexpr,
    q_len: tl.constexpr, v_dim: tl.constexpr, WORLD: tl.constexpr, SOURCES: tl.constexpr, OWNERS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    shape = (batch, heads, q_len, v_dim)
    epoch = take_epoch(state_ptr, tl.num_programs(0))
    first_row = rank * share if OWNERS > 1 else 0
    within = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    row, row_in = first_row + within, within < share
    sources = tl.arange(0, SOURCES)
    others = (sources < WORLD) & (sources != rank)
    address = at_rank(addresses_ptr, rank, epoch, half_bytes)
    came = await_flags(
        as_int64(address) + sources, others, sources, epoch, state_ptr, fault_ptr, limit_ns
    )
    d = tl.arange(0, BLOCK_D)
    own_values, own_lses = own_rows(row, row_in, d, (part_ptr, part_lse_ptr, part_strides), shape)
    values, lses = pushed_rows(row, row_in, sources, others, address, rows, v_dim, WORLD, BLOCK_D)
    values, lses = with_own(values, lses, own_values, own_lses, sources, rank, WORLD)
    out, lse = merged(values, lses)
    write_rows(out, lse, came, row, row_in, d, (out_ptr, lse_ptr, first_head, out_heads), shape)


def merge(part: Tensor, part_lse: Tensor, dtype: torch.dtype, group_name: str, head_sharded: bool):
    """The merged (out, lse) of all ranks' partial results."""
    call = RowExchange.begin(part, dtype, group_name, "push", pushed_bytes, head_sharded)
    rows, where = call.rows, call.channel
    launches["dist_merge/push"] += 1
    launch(
        _push_kernel, call.owners * call.tiles,
        part, part_lse, where.memory.addresses, where.state, part.stride(), where.half_bytes, where.rank, rows.batch,
        rows.count, rows.count // call.owners, rows.heads, rows.q_len, rows.v_dim, rows.world, rows.sources, call.owners,
        call.block, rows.block_d, num_warps=1,
    )  # fmt: skip
    launch(
        _merge_pushed_kernel, call.tiles,
        part, part_lse, *call.memory, part.stride(), *call.numbers, *call.constants, num_warps=1,
    )  # fmt: skip
    return call.out, call.lse
