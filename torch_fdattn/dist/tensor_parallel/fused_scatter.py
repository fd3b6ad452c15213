"""Strategy `fused`, reduce-scatter: one persistent kernel multiplies, and sends each tile to the rank that sums it.

Programs go through the tiles of the other ranks' rows first: a finished tile is rounded to the dtype, written into its
owner's memory, and a flag raised there once the next product has hidden the way. Then the own rows: to a tile's
product is added, in fp32 and in the order of the ranks after this one, what the others sent for it. (A product that
began with that sum would have its wgmma serialised by ptxas, C7515: 1.42 in place of 1.26 of BLAS.) No pass of its own
for the sum, no copies, one launch.

A program waits only for tiles that other ranks compute before all those that wait; with no more programs than run at
once, all of them run. The same number of rows on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.groups import rank_and_size
from torch_fdattn.dist.symm.channel import channel
from torch_fdattn.dist.symm.faults import timeout_ns
from torch_fdattn.dist.symm.signals import (
    as_int64,
    at_rank,
    await_flag,
    may_send,
    raise_flag,
    take_epoch,
)
from torch_fdattn.dist.tensor_parallel.fused_gather import programs
from torch_fdattn.launch.launches import launch
from torch_fdattn.ops.attention.configs import dot_precision
from torch_fdattn.ops.gemm.tile_product import grouped, operands, tile_for, tile_product
from torch_fdattn.ops.launch import cdiv
from torch_fdattn.ops.library import launches


@triton.jit
def _part(address, source, m, n, tiles, dtype: tl.constexpr, WORLD: tl.constexpr):
    """A source's part (m, n) in a half; the flags (WORLD, tiles) are before all of them."""
    flags = tl.cdiv(WORLD * tiles, 32) * 256  # bytes; the parts begin where wide stores may
    part = (address + flags).to(tl.pointer_type(dtype)) + source.to(tl.int64) * m * n
    return tl.multiple_of(part, 16)


@triton.jit
def _halves(acc):
    """The left and the right columns of a tile: what follows a product needs registers beside its own for one half only."""
    ROWS: tl.constexpr = acc.shape[0]
    COLUMNS: tl.constexpr = acc.shape[1]
    return tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _elements(first_row, first_column, half: tl.constexpr, tile, m, n):
    """(offsets of half a tile's elements in (m, n), which of them exist)."""
    rows = first_row + tl.arange(0, tile.shape[0])
    columns = first_column + half * tile.shape[1] + tl.arange(0, tile.shape[1])
    return (
        rows.to(tl.int64)[:, None] * n + columns[None, :],
        (rows < m)[:, None] & (columns < n)[None, :],
    )


@triton.jit
def _send(part, first_row, first_column, acc, m, n, sends, dtype: tl.constexpr):
    halves = _halves(acc)
    for half in tl.static_range(2):
        at, inside = _elements(first_row, first_column, half, halves[half], m, n)
        tl.store(part + at, halves[half].to(dtype), mask=inside & sends)


@triton.jit
def _raise(addresses_ptr, owner, epoch, half_bytes, index):
    raise_flag(as_int64(at_rank(addresses_ptr, owner, epoch, half_bytes)) + index, epoch)


@triton.jit
def _add_and_store(
    y_ptr, acc, here, first_row, first_column, m, n, tile, tiles, rank, epoch, state_ptr, fault_ptr, limit_ns,
    WORLD: tl.constexpr,
):  # fmt: skip
    """acc plus what the others sent for this tile, into y; NaN if it did not come."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    came = True
    for i in range(1, WORLD):
        source = (rank + i) % WORLD
        mine = as_int64(here) + source * tiles + tile
        came &= await_flag(mine, source, epoch, state_ptr, fault_ptr, limit_ns)
    halves = _halves(acc)
    for half in tl.static_range(2):
        total = halves[half]
        at, inside = _elements(first_row, first_column, half, total, m, n)
        for i in range(1, WORLD):
            part = _part(here, (rank + i) % WORLD, m, n, tiles, dtype, WORLD)
            # Past the first-level cache, which does not see what other devices write.
            total += tl.load(part + at, mask=inside, other=0.0, volatile=True).to(tl.float32)
        tl.store(y_ptr + at, tl.where(came, total, float("nan")).to(dtype), mask=inside)


@triton.jit(do_not_specialize=["half_bytes", "limit_ns", "rank", "m"])
def _gemm_scatter_kernel(
    y_ptr, x, w, bias_ptr, x_stride, w_strides, addresses_ptr, state_ptr, fault_ptr, half_bytes, limit_ns, rank, m, n, k,
    WORLD: tl.constexpr, LAYOUT: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x (WORLD, m, k), w (n, k), bias (n,) or None -> y (m, n): this rank's rows of the sum over ranks."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    epoch = take_epoch(state_ptr, tl.num_programs(0))
    sends = may_send(state_ptr, epoch)
    here = at_rank(addresses_ptr, rank, epoch, half_bytes)
    m_tiles, n_tiles = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    tiles, count = m_tiles * n_tiles, tl.num_programs(0)
    theirs = tiles * (WORLD - 1)
    waiting, its_owner = -1, rank  # a tile that was sent, whose flag is still to be raised
    for number in range(tl.program_id(0), theirs, count):
        owner, tile = (rank + 1 + number // tiles) % WORLD, number % tiles
        tile_m, tile_n = grouped(tile, m_tiles, n_tiles, GROUP)
        acc = tile_product(
            bias_ptr, x, owner * m, tile_m * BLOCK_M, m, w, tile_n * BLOCK_N, n, k, x_stride, w_strides, LAYOUT, EVEN_K,
            BLOCK_M, BLOCK_N, BLOCK_K, STAGES, PRECISION,
        )  # fmt: skip
        if waiting >= 0:  # behind a product, what was written before it is there, and nobody waits
            _raise(addresses_ptr, its_owner, epoch, half_bytes, rank * tiles + waiting)
            waiting = -1
        there = at_rank(addresses_ptr, owner, epoch, half_bytes)
        part = _part(there, rank, m, n, tiles, dtype, WORLD)
        _send(part, tile_m * BLOCK_M, tile_n * BLOCK_N, acc, m, n, sends, dtype)
        if sends:
            waiting, its_owner = tile, owner
    if waiting >= 0:
        _raise(addresses_ptr, its_owner, epoch, half_bytes, rank * tiles + waiting)
    passed = tl.cdiv(tl.maximum(theirs - tl.program_id(0), 0), count)
    for tile in range(tl.program_id(0) + passed * count - theirs, tiles, count):
        tile_m, tile_n = grouped(tile, m_tiles, n_tiles, GROUP)
        acc = tile_product(
            bias_ptr, x, rank * m, tile_m * BLOCK_M, m, w, tile_n * BLOCK_N, n, k, x_stride, w_strides, LAYOUT, EVEN_K,
            BLOCK_M, BLOCK_N, BLOCK_K, STAGES, PRECISION,
        )  # fmt: skip
        _add_and_store(
            y_ptr, acc, here, tile_m * BLOCK_M, tile_n * BLOCK_N, m, n, tile, tiles, rank, epoch, state_ptr, fault_ptr,
            limit_ns, WORLD,
        )  # fmt: skip


def matmul_reduce_scatter(
    x: Tensor, weight: Tensor, group_name: str, rows: Sequence[int], bias: Tensor | None = None
) -> Tensor:
    """This rank's rows (m, N) of the sum over ranks of x (W m, K) @ weight (N, K).T + bias (N,); x's features and the
    bias contiguous."""
    rank, world = rank_and_size(group_name)
    m, n, k = rows[rank], weight.shape[0], x.shape[1]
    y = x.new_empty(m, n)
    if not y.numel():
        return y
    tile = tile_for(m, n, world, x)
    given = operands((x,), weight, tile)
    tiles = cdiv(m, tile.m) * cdiv(n, tile.n)
    nbytes = cdiv(world * tiles, 32) * 256 + world * m * n * x.element_size()
    where = channel(group_name, "fused/reduce_scatter", nbytes, x.device)
    where.enter()
    launches["tensor_parallel/fused_reduce_scatter"] += 1
    launch(
        _gemm_scatter_kernel, programs(world * tiles, x.device),
        y, *given.xs, given.weight, bias, x.stride(0), weight.stride(), where.memory.addresses, where.state, where.fault.tensor,
        where.half_bytes, timeout_ns(), rank, m, n, k, world, given.layout, k % tile.k == 0,
        tile.m, tile.n, tile.k, tile.stages, tile.group, dot_precision(x.dtype), num_warps=tile.warps,
    )  # fmt: skip
    return y
