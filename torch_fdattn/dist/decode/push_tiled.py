"""Strategy `push_tiled`: rows are pushed to the other ranks, with a signal for each tile of them.

One kernel: every program writes its tile of rows into all other ranks' memory, raises its flag there, waits for
the same tile's flags of all ranks in its own memory, and merges. A tile is merged as soon as its own W parts
have arrived, whatever the others do (the fine signals of iris's flash decode). Cost: (W - 1) · R · (DV + 1) · 4
bytes sent by every rank, and a fence before each tile's flag.
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
    await_flags,
    leave_epoch,
    may_send,
    raise_flags,
    read_epoch,
)
from torch_fdattn.launch.launches import launch
from torch_fdattn.ops.library import launches


@triton.jit
def numbers(address, source, row, rows, WORLD: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers to a source's rows: values' first ones, and lses'. The flags before them are one a row."""
    base = (address + rows.to(tl.int64) * (WORLD * 8)).to(tl.pointer_type(tl.float32))
    at = (source * rows + row).to(tl.int64)
    return base + at * BLOCK_D, base + (rows * BLOCK_D).to(tl.int64) * WORLD + at


@triton.jit
def push_rows(values, lses, row, row_in, address, rank, rows, v_dim, WORLD: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Writes rows (M, D) and lses (M,) into a peer's half."""
    d = tl.arange(0, BLOCK_D)
    value_ptr, lse_ptr = numbers(address, rank, row, rows, WORLD, BLOCK_D)
    tl.store(value_ptr[:, None] + d[None, :], values, mask=row_in[:, None] & (d[None, :] < v_dim))
    tl.store(lse_ptr, lses, mask=row_in)


@triton.jit
def pushed_rows(row, row_in, sources, inside, address, rows, v_dim, WORLD: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """(values (S, M, D), lses (S, M)) that the sources that are `inside` have pushed."""
    d = tl.arange(0, BLOCK_D)
    value_ptr, lse_ptr = numbers(address, sources[:, None], row[None, :], rows, WORLD, BLOCK_D)
    expected = inside[:, None] & row_in[None, :]
    # Past the first-level cache, which does not see what other devices write.
    values = tl.load(
        value_ptr[:, :, None] + d[None, None, :], mask=expected[:, :, None] & (d < v_dim)[None, None, :],
        other=0.0, volatile=True,
    )  # fmt: skip
    return values, tl.load(lse_ptr, mask=expected, other=float("-inf"), volatile=True)


@triton.jit
def flags_at(addresses_ptr, ranks, inside, epoch, half_bytes):
    """Pointers to the flags of some ranks' memory, (S,)."""
    address = tl.load(addresses_ptr + ranks, mask=inside, other=0) + (epoch & 1) * half_bytes
    return as_int64(address)


@triton.jit(
    do_not_specialize=["half_bytes", "limit_ns", "rank", "batch", "rows", "share", "first_head"]
)
def _push_tiled_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, addresses_ptr, state_ptr, fault_ptr, part_strides, half_bytes,
    limit_ns, rank, batch, rows, share, first_head, heads: tl.constexpr, out_heads: tl.constexpr,
    q_len: tl.constexpr, v_dim: tl.constexpr, WORLD: tl.constexpr, SOURCES: tl.constexpr, OWNERS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    shape = (batch, heads, q_len, v_dim)
    epoch = read_epoch(state_ptr)
    row, row_in, owner = tile_of(tl.program_id(0), share, OWNERS, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    own_values, own_lses = own_rows(row, row_in, d, (part_ptr, part_lse_ptr, part_strides), shape)
    sends = may_send(state_ptr, epoch)
    for i in tl.static_range(1, WORLD):
        peer = (rank + i) % WORLD
        if (OWNERS == 1) | (peer == owner):
            address = at_rank(addresses_ptr, peer, epoch, half_bytes)
            push_rows(
                own_values,
                own_lses,
                row,
                row_in & sends,
                address,
                rank,
                rows,
                v_dim,
                WORLD,
                BLOCK_D,
            )
    sources = tl.arange(0, SOURCES)
    others = (sources < WORLD) & (sources != rank)
    theirs = others & sends
    if OWNERS > 1:
        theirs = theirs & (sources == owner)
    flags = flags_at(addresses_ptr, sources, others, epoch, half_bytes)
    raise_flags(flags + rank * rows + tl.program_id(0), theirs, epoch)
    if (OWNERS == 1) | (owner == rank):
        address = at_rank(addresses_ptr, rank, epoch, half_bytes)
        came = await_flags(
            as_int64(address) + sources * rows + tl.program_id(0), others, sources, epoch, state_ptr, fault_ptr,
            limit_ns,
        )  # fmt: skip
        values, lses = pushed_rows(
            row, row_in, sources, others, address, rows, v_dim, WORLD, BLOCK_D
        )
        values, lses = with_own(values, lses, own_values, own_lses, sources, rank, WORLD)
        out, lse = merged(values, lses)
        write_rows(out, lse, came, row, row_in, d, (out_ptr, lse_ptr, first_head, out_heads), shape)
    leave_epoch(state_ptr, epoch, tl.num_programs(0))


def pushed_bytes(rows: Rows) -> int:
    """Bytes of all sources' flags and rows."""
    return rows.world * rows.count * (8 + (rows.block_d + 1) * 4)


def merge(part: Tensor, part_lse: Tensor, dtype: torch.dtype, group_name: str, head_sharded: bool):
    """The merged (out, lse) of all ranks' partial results."""
    call = RowExchange.begin(part, dtype, group_name, "push_tiled", pushed_bytes, head_sharded)
    launches["dist_merge/push_tiled"] += 1
    launch(
        _push_tiled_kernel, call.owners * call.tiles,
        part, part_lse, *call.memory, part.stride(), *call.numbers, *call.constants, num_warps=1,
    )  # fmt: skip
    return call.out, call.lse
