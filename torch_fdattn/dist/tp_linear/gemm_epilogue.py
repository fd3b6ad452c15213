"""Method `gemm_epilogue`: a product of few rows whose tiles are on the wire before the whole is there.

Weights of a decode step are read once, by as many programs as it takes to load them at the memory's speed: each has
some columns of y and a part of the features. The last of a tile's programs to be done sums their fp32 parts, in the
order of the features, rounds to the dtype and sends the tile as words (`signals.py`) to every rank, itself included.
A second kernel, which the device starts when the first one ends, sums the words of all ranks (`low_latency.py`): the
same bits on all ranks, and the wire's time is hidden behind other tiles' products.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.channel import Channel, channel
from torch_fdattn.dist.groups import rank_and_size
from torch_fdattn.dist.signals import as_words, at_rank, may_send, packed, read_epoch, word
from torch_fdattn.dist.tp_linear.gemm import product, triton_dtype
from torch_fdattn.dist.tp_linear.low_latency import sum_words, words_bytes
from torch_fdattn.ops.attention.configs import dot_precision
from torch_fdattn.ops.launch import cdiv, on_device, power_of_two
from torch_fdattn.ops.library import INTERPRET, launches
from torch_fdattn.ops.repeated_launch import launch


class Split(NamedTuple):
    """A program's tile, and in how many parts the features are cut."""

    m: int
    n: int
    k: int
    parts: int
    warps: int
    stages: int


def split_for(rows: int, columns: int, features: int, dtype: torch.dtype, processors: int) -> Split:
    """About two programs a processor, each with several blocks of features. Not measured yet."""
    m = max(16, power_of_two(rows))
    if INTERPRET:
        n, k, warps, stages = 16, 32, 4, 1
    elif dtype.itemsize > 2:
        n, k, warps, stages = 32, 32, 4, 3
    elif m <= 32:
        n, k, warps, stages = 32, 256, 4, 4
    elif m <= 64:
        n, k, warps, stages = 64, 128, 4, 4
    else:
        n, k, warps, stages = 128, 64, 4, 5
    tiles, blocks = cdiv(columns, n), max(1, cdiv(features, k))
    wanted = max(1, (2 if m <= 64 else 1) * processors // tiles)
    parts = max(1, min(wanted, blocks // 4))
    per_part = cdiv(blocks, parts)
    return Split(m, n, k, max(1, cdiv(blocks, per_part)), warps, stages)


@triton.jit(do_not_specialize=["half_bytes", "rank", "m"])
def _gemm_send_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, parts_ptr, tickets_ptr, addresses_ptr, state_ptr, x_stride, w_strides, scale_stride, half_bytes,
    rank, m, n, k, per_part, WORLD: tl.constexpr, DTYPE: tl.constexpr, PARTS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """x (m, k), w (n, k), scale (n,) or None, bias (n,) or None; parts (PARTS, tiles, BLOCK_M, BLOCK_N) fp32; words (m, n) of this rank, to all ranks."""
    tile, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    rows = tl.arange(0, BLOCK_M)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    first = part * per_part
    acc = product(
        tl.zeros([BLOCK_M, BLOCK_N], tl.float32), x_ptr, w_ptr, rows, columns, m, n, first, tl.minimum(k, first + per_part), x_stride, w_strides[0],
        w_strides[1], EVEN_K, BLOCK_K, STAGES, PRECISION,
    )  # fmt: skip
    if scale_ptr is not None:
        acc *= tl.load(scale_ptr + columns * scale_stride, mask=columns < n, other=0.0)[None, :]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=(columns < n) & (part == 0), other=0.0)
        acc += bias.to(tl.float32)[None, :]
    last = True
    if PARTS > 1:
        within = rows[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tile_ptrs = parts_ptr + tile * (BLOCK_M * BLOCK_N) + within
        stride = tl.num_programs(0) // PARTS * (BLOCK_M * BLOCK_N)
        present = (rows < m)[:, None]
        tl.store(tile_ptrs + part * stride, acc, mask=present)
        tl.debug_barrier()
        ticket = tl.atomic_add(tickets_ptr + tile, 1, sem="acq_rel", scope="gpu")
        tl.debug_barrier()
        last = ticket == PARTS - 1
        if last:
            tl.store(tickets_ptr + tile, 0)
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for i in range(PARTS):
                acc += tl.load(
                    tile_ptrs + i * stride, mask=present, other=0.0, cache_modifier=".cg"
                )
    if last:
        epoch = read_epoch(state_ptr)
        PER_WORD: tl.constexpr = 2 if DTYPE.primitive_bitwidth == 16 else 1
        word_columns = tile * (BLOCK_N // PER_WORD) + tl.arange(0, BLOCK_N // PER_WORD)
        row_words = n // PER_WORD
        words = word(packed(acc, DTYPE), epoch)
        at = rank * m * row_words + rows[:, None] * row_words + word_columns[None, :]
        inside = (rows < m)[:, None] & (word_columns < row_words)[None, :]
        inside = inside & may_send(state_ptr, epoch)
        for i in tl.static_range(0, WORLD):
            there = at_rank(addresses_ptr, (rank + 1 + i) % WORLD, epoch, half_bytes)
            tl.store(as_words(there) + at, words, mask=inside)


#: Bytes of a tile's words at least: one row of `split_for`'s fewest columns, in pairs.
_LEAST_TILE = 16 // 2 * 8
# A ticket a tile, of a channel, since calls on a channel come one after another; zeros between them. As many as the
# channel has room for: captured graphs hold their address.
_tickets: weakref.WeakKeyDictionary[Channel, Tensor] = weakref.WeakKeyDictionary()


def _tickets_of(where: Channel) -> Tensor:
    found = _tickets.get(where)
    if found is None:
        most = where.half_bytes // _LEAST_TILE + 1  # of which one is not whole
        found = torch.zeros(most, dtype=torch.int32, device=where.state.device)
        _tickets[where] = found
    return found


def _processors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1


def matmul_all_reduce(
    x: Tensor, weight: Tensor, group_name: str, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:  # fmt: skip
    """The sum over ranks of x (M, K) @ (weight (N, K) * scale (N,)).T + bias (N,); M at most `op.EPILOGUE_ROWS`, N even, x's features
    and the bias contiguous."""
    _, world = rank_and_size(group_name)
    (m, k), n = x.shape, weight.shape[0]
    y = x.new_empty(m, n)
    if not y.numel():
        return y
    split = split_for(m, n, k, x.dtype, _processors(x))
    tiles, parts = cdiv(n, split.n), split.parts
    where = channel(group_name, "gemm_epilogue", words_bytes(y.numel(), y.dtype, world), x.device)
    tickets = _tickets_of(where)
    scratch = x.new_empty(
        parts * tiles * split.m * split.n if parts > 1 else 1, dtype=torch.float32
    )
    per_part = cdiv(cdiv(k, split.k), parts) * split.k
    where.enter()
    launches["tp_linear/gemm_epilogue"] += 1
    with on_device(x):
        launch(
            _gemm_send_kernel, tiles * parts,
            x, weight, scale, bias, scratch, tickets, where.memory.addresses, where.state, x.stride(0), weight.stride(),
            0 if scale is None else scale.stride(0), where.half_bytes, where.rank, m, n, k, per_part, world, triton_dtype(x.dtype), parts, k % split.k == 0,
            split.m, split.n, split.k, split.stages, dot_precision(x.dtype), num_warps=split.warps,
        )  # fmt: skip
        try:
            sum_words(None, y, where, world)
        except BaseException:
            where.leave()
            raise
    return y
