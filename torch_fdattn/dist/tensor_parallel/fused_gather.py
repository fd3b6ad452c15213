"""Strategy `fused`, all-gather: one persistent kernel multiplies rows of all ranks, and waits for them itself.

Copy engines move the rows as in `copy_engine.py`. The kernel's programs go through all tiles, own rows first and then
rank after rank as they arrive; before the first tile of a rank a program waits for that rank's flag. One product in
place of one for each rank: nothing is lost between them, and the device is idle at most once, at the end.

All that could keep the rows from coming runs before this kernel or on copy engines, so it may fill the device.
The same number of rows on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.symm.faults import timeout_ns
from torch_fdattn.dist.symm.signals import as_int64, await_flag, read_epoch
from torch_fdattn.dist.tensor_parallel.copy_engine import gathering, keep_rows, send_rows
from torch_fdattn.launch.launches import launch
from torch_fdattn.ops.attention.configs import dot_precision
from torch_fdattn.ops.gemm.tile_product import (
    grouped,
    operands,
    order_descriptors,
    tile_for,
    tile_product,
)
from torch_fdattn.ops.launch import cdiv
from torch_fdattn.ops.library import INTERPRET, launches


@triton.jit
def _one_tile(
    y_ptr, x, first, tile, w, m, n, k, m_tiles, n_tiles, w_strides, LAYOUT: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of y (m, n) = x[first : first + m] (m, k) @ w (n, k).T."""
    tile_m, tile_n = grouped(tile, m_tiles, n_tiles, GROUP)
    acc = tile_product(
        None, x, first, tile_m * BLOCK_M, m, w, tile_n * BLOCK_N, n, k, k, w_strides, LAYOUT, EVEN_K, BLOCK_M, BLOCK_N,
        BLOCK_K, STAGES, PRECISION,
    )  # fmt: skip
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    at = rows.to(tl.int64)[:, None] * n + columns[None, :]
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["limit_ns", "rank", "m"])
def _gather_gemm_kernel(
    y_ptr, x, gathered, w, w_strides, addresses_ptr, state_ptr, fault_ptr, limit_ns, rank, m, n, k,
    WORLD: tl.constexpr, LAYOUT: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """x (m, k), gathered (WORLD, m, k) of which the own is not there, w (n, k) -> y (WORLD, m, n)."""
    epoch = read_epoch(state_ptr)
    arrived = as_int64(tl.load(addresses_ptr + rank))
    m_tiles, n_tiles = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    tiles, count = m_tiles * n_tiles, tl.num_programs(0)
    for tile in range(tl.program_id(0), tiles, count):
        _one_tile(
            y_ptr + (tl.cast(rank, tl.int64) * m) * n, x, 0, tile, w, m, n, k, m_tiles, n_tiles, w_strides, LAYOUT, EVEN_K,
            BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP, PRECISION,
        )  # fmt: skip
    own = tl.cdiv(tl.maximum(tiles - tl.program_id(0), 0), count)  # of this program
    seen = 0
    for tile in range(tl.program_id(0) + own * count, tiles * WORLD, count):
        step = tile // tiles
        source = (rank + step) % WORLD
        if step > seen:
            await_flag(arrived + source, source, epoch, state_ptr, fault_ptr, limit_ns)
            if LAYOUT is not None:
                order_descriptors()
            seen = step
        _one_tile(
            y_ptr + (tl.cast(source, tl.int64) * m) * n, gathered, source * m, tile % tiles, w, m, n, k, m_tiles, n_tiles,
            w_strides, LAYOUT, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP, PRECISION,
        )  # fmt: skip


def programs(tiles: int, device: torch.device) -> int:
    """As many as run at once; interpreted ones run one after another, and none may wait for a later one."""
    if INTERPRET:
        return 1
    return min(tiles, torch.cuda.get_device_properties(device).multi_processor_count)


def all_gather_matmul(
    x: Tensor, weights: Sequence[Tensor], group_name: str, rows: Sequence[int], keep: bool
) -> list[Tensor]:
    """[y_i (sum(rows), N_i)], and then, to `keep`, the gathered x; x contiguous, rows the same for all ranks."""
    copies, gathered = gathering(x, group_name, rows, "fused/all_gather")
    rank, world, (m, k) = copies.rank, copies.world, x.shape
    launches["tensor_parallel/fused_all_gather"] += 1
    ys = [x.new_empty(world * m, weight.shape[0]) for weight in weights]
    found = [*ys, torch.empty_like(gathered)] if keep else ys
    copies.start()  # in the caller's stream: before the kernel below takes the device
    copies.mark()
    copies.fork()
    with copies.until_finished(found):
        send_rows(copies, x, rows)
        for weight, y in zip(weights, ys, strict=True):
            n = weight.shape[0]
            tile = tile_for(m, n, world, x)
            tiles = world * cdiv(m, tile.m) * cdiv(n, tile.n)
            if not tiles:
                continue
            given = operands((x, gathered), weight, tile)
            launch(
                _gather_gemm_kernel, programs(tiles, x.device),
                y, *given.xs, given.weight, weight.stride(), *copies.device_side, timeout_ns(), rank, m, n, k, world,
                given.layout, k % tile.k == 0, tile.m, tile.n, tile.k, tile.stages, tile.group, dot_precision(x.dtype),
                num_warps=tile.warps,
            )  # fmt: skip
        if keep:
            keep_rows(copies, gathered, x, rank * m, found[-1])
    return found
