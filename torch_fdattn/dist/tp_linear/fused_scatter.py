"""Strategy `fused`, reduce-scatter: one persistent kernel multiplies, and sends each tile to the rank that sums it.

Programs go through the tiles of the other ranks' rows first: a finished tile is rounded to the dtype, written into its
owner's memory, and a flag raised there. Then the own rows: what the others sent for a tile is summed in fp32, in the
order of the ranks after this one, and is what the tile's product begins with. (Added at the end, it would need
registers beside the product's.) fp32 adds it at the end: each of a product's additions rounds at the size of what is
there already. No pass of its own for the sum, no copies, one launch.

A program waits only for tiles that other ranks compute before all those that wait; with no more programs than run at
once, all of them run. The same number of rows on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.channel import channel
from torch_fdattn.dist.faults import timeout_ns
from torch_fdattn.dist.groups import rank_and_size
from torch_fdattn.dist.signals import (
    as_words,
    at_rank,
    await_flag,
    may_send,
    raise_flag,
    take_epoch,
)
from torch_fdattn.dist.tp_linear.fused_gather import programs
from torch_fdattn.dist.tp_linear.gemm import grouped, product, tile_for
from torch_fdattn.ops.attention.configs import dot_precision
from torch_fdattn.ops.launch import cdiv, on_device
from torch_fdattn.ops.library import launches
from torch_fdattn.ops.repeated_launch import launch


@triton.jit
def _part(address, source, m, n, tiles, dtype: tl.constexpr, WORLD: tl.constexpr):
    """A source's part (m, n) in a half; the flags (WORLD, tiles) are before all of them."""
    flags = tl.cdiv(WORLD * tiles, 32) * 256  # bytes; the parts begin where wide stores may
    part = (address + flags).to(tl.pointer_type(dtype)) + source.to(tl.int64) * m * n
    return tl.multiple_of(part, 16)


@triton.jit
def _elements(rows, columns, m, n):
    """(offsets of a tile's elements in (m, n), which of them exist)."""
    return (
        rows.to(tl.int64)[:, None] * n + columns[None, :],
        (rows < m)[:, None] & (columns < n)[None, :],
    )


@triton.jit
def _received(
    acc, here, rows, columns, m, n, tile, tiles, rank, epoch, state_ptr, fault_ptr, limit_ns, dtype: tl.constexpr,
    WORLD: tl.constexpr,
):  # fmt: skip
    """acc plus what the others sent for this tile; NaN if it did not come."""
    for i in range(1, WORLD):
        source = (rank + i) % WORLD
        mine = as_words(here) + source * tiles + tile
        came = await_flag(mine, source, epoch, state_ptr, fault_ptr, limit_ns)
        part = _part(here, source, m, n, tiles, dtype, WORLD)
        at, inside = _elements(rows, columns, m, n)
        # Past the first-level cache, which does not see what other devices write.
        found = tl.load(part + at, mask=inside, other=0.0, volatile=True).to(tl.float32)
        acc += tl.where(came, found, float("nan"))
    return acc


@triton.jit(do_not_specialize=["half_bytes", "limit_ns", "rank", "m"])
def _gemm_scatter_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, x_stride, w_strides, addresses_ptr, state_ptr, fault_ptr, half_bytes, limit_ns, rank, m, n, k,
    WORLD: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x (WORLD, m, k), w (n, k), bias (n,) or None -> y (m, n): this rank's rows of the sum over ranks."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    BEGINS: tl.constexpr = dtype.primitive_bitwidth == 16  # with what the others sent
    epoch = take_epoch(state_ptr, tl.num_programs(0))
    sends = may_send(state_ptr, epoch)
    here = at_rank(addresses_ptr, rank, epoch, half_bytes)
    m_tiles, n_tiles = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    tiles = m_tiles * n_tiles
    for number in range(tl.program_id(0), tiles * WORLD, tl.num_programs(0)):
        owner = (rank + 1 + number // tiles) % WORLD
        tile = number % tiles
        tile_m, tile_n = grouped(tile, m_tiles, n_tiles, GROUP)
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
        if BEGINS and owner == rank:
            acc = _received(
                acc, here, rows, columns, m, n, tile, tiles, rank, epoch, state_ptr, fault_ptr, limit_ns, dtype, WORLD
            )  # fmt: skip
        acc = product(
            acc, x_ptr + owner.to(tl.int64) * m * x_stride, w_ptr, rows, columns, m, n, 0, k, x_stride, w_strides[0],
            w_strides[1], EVEN_K, BLOCK_K, STAGES, PRECISION,
        )  # fmt: skip
        if not BEGINS and owner == rank:
            acc = _received(
                acc, here, rows, columns, m, n, tile, tiles, rank, epoch, state_ptr, fault_ptr, limit_ns, dtype, WORLD
            )  # fmt: skip
        at, inside = _elements(rows, columns, m, n)  # anew: a product leaves few registers
        if owner == rank:
            tl.store(y_ptr + at, acc.to(dtype), mask=inside)
        else:
            there = at_rank(addresses_ptr, owner, epoch, half_bytes)
            part = _part(there, rank, m, n, tiles, dtype, WORLD)
            tl.store(part + at, acc.to(dtype), mask=inside & sends)
            if sends:
                raise_flag(as_words(there) + rank * tiles + tile, epoch)


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
    tile = tile_for(m, n, x.dtype)
    tiles = cdiv(m, tile.m) * cdiv(n, tile.n)
    nbytes = cdiv(world * tiles, 32) * 256 + world * m * n * x.element_size()
    where = channel(group_name, "fused/reduce_scatter", nbytes, x.device)
    where.enter()
    launches["tp_linear/fused_reduce_scatter"] += 1
    with on_device(x):
        launch(
            _gemm_scatter_kernel, programs(world * tiles, x.device),
            x, weight, bias, y, x.stride(0), weight.stride(), where.memory.addresses, where.state, where.fault.tensor,
            where.half_bytes, timeout_ns(), rank, m, n, k, world, k % tile.k == 0, tile.m, tile.n, tile.k,
            tile.stages, tile.group, dot_precision(x.dtype), num_warps=tile.warps,
        )  # fmt: skip
    return y
