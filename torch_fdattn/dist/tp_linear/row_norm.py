"""An all-reduce of few rows, the residual's addition and RMSNorm in one launch, which are three otherwise.

A program has a row: it sends this rank's part of it to all others, as values that tell themselves that they came
(`push_values.py`), and sums all parts in fp32 in the order of ranks: the same bits on all ranks. The sum is rounded
to the dtype before the residual is added, and so is what they give before it is normalised, as three launches round
them.

The sum of squares (Zhang and Sennrich 2019, equation 4) needs the whole row in one program: up to MOST_COLUMNS. So
programs have several warps, though they wait: every word is loaded by one thread alone, and the warps learn by a sum
over all of them whether they came.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.channel import channel
from torch_fdattn.dist.decode.rows import starts_early
from torch_fdattn.dist.faults import timeout_ns
from torch_fdattn.dist.groups import rank_and_size
from torch_fdattn.dist.signals import await_previous, may_send, read_epoch
from torch_fdattn.dist.tp_linear.gemm import triton_dtype
from torch_fdattn.dist.tp_linear.push_values import (
    BEFORE,
    TURN,
    as_values,
    buffer,
    clear,
    halves,
    joined,
    leave_turn,
    receive_values,
    room,
    third_of,
    words_of_a_rank,
)
from torch_fdattn.ops.launch import on_device, power_of_two
from torch_fdattn.ops.library import INTERPRET, launches
from torch_fdattn.ops.repeated_launch import launch

MOST_COLUMNS = 8192
#: Words that a warp has.
_WORDS_PER_WARP = 512


@triton.jit
def _rounded(low, high, dtype: tl.constexpr):
    return halves(joined(low, high, dtype), dtype)


@triton.jit(do_not_specialize=["third_bytes", "limit_ns", "rank", "eps"])
def _sum_norm_kernel(
    x_ptr, bias_ptr, residual_ptr, weight_ptr, normed_ptr, added_ptr, addresses_ptr, state_ptr, fault_ptr, third_bytes,
    limit_ns, rank, words, eps, WORLD: tl.constexpr, SOURCES: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """x, residual (m, words), bias (words,) or None, weight (words,) -> added (m, words), the sum over ranks and more,
    normed (m, words); int32 words of numbers of DTYPE."""
    await_previous(PDL)
    PER_WORD: tl.constexpr = 2 if DTYPE.primitive_bitwidth == 16 else 1
    epoch = read_epoch(state_ptr)
    turn, before = tl.load(state_ptr + TURN), tl.load(state_ptr + BEFORE)
    row, m = tl.program_id(0), tl.num_programs(0)
    each = words_of_a_rank(third_bytes, WORLD)
    columns = tl.arange(0, BLOCK)
    inside = columns < words
    at = row.to(tl.int64) * words + columns
    own = as_values(tl.load(x_ptr + at, mask=inside, other=0), DTYPE)
    sends = inside & may_send(state_ptr, epoch)
    for i in tl.static_range(1, WORLD):
        there = buffer(addresses_ptr, (rank + i) % WORLD, turn, third_bytes)
        tl.store(there + rank * each + at, own, mask=sends)

    residual = tl.load(residual_ptr + at, mask=inside, other=0)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0)
    sources = tl.arange(0, SOURCES)
    others = ((sources < WORLD) & (sources != rank))[:, None]
    clear(addresses_ptr, rank, turn, before, each, third_bytes, sources, others, BLOCK)

    here = buffer(addresses_ptr, rank, turn, third_bytes)
    found, came = receive_values(
        here + sources[:, None] * each + at[None, :], others & inside[None, :], sources, epoch, state_ptr, fault_ptr,
        limit_ns,
    )  # fmt: skip
    found = tl.where((sources == rank)[:, None], own[None, :], tl.where(others, found, 0))
    low, high = halves(found, DTYPE)
    none = tl.where(came, 0.0, float("nan"))
    low, high = _rounded(tl.sum(low, 0) + none, tl.sum(high, 0) + none, DTYPE)
    if bias_ptr is not None:
        bias_low, bias_high = halves(tl.load(bias_ptr + columns, mask=inside, other=0), DTYPE)
        low, high = _rounded(low + bias_low, high + bias_high, DTYPE)
    residual_low, residual_high = halves(residual, DTYPE)
    added = joined(residual_low + low, residual_high + high, DTYPE)
    tl.store(added_ptr + at, added, mask=inside)
    low, high = halves(added, DTYPE)
    squares = low * low + high * high if PER_WORD == 2 else low * low
    mean = tl.sum(tl.where(inside, squares, 0.0), 0) / (words * PER_WORD)
    scale = tl.rsqrt(mean + eps)
    weight_low, weight_high = halves(weight, DTYPE)
    normed = joined(low * scale * weight_low, high * scale * weight_high, DTYPE)
    tl.store(normed_ptr + at, normed, mask=inside)
    leave_turn(state_ptr, epoch, turn, m * words)


def takes(columns: int, dtype: torch.dtype) -> bool:
    """Whether rows of so many numbers fit, and are whole words."""
    return 0 < columns <= MOST_COLUMNS and columns * dtype.itemsize % 4 == 0


def _words(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.int32)


def sum_norm(
    x: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, eps: float, group_name: str
) -> tuple[Tensor, Tensor]:
    """(normed, added) (M, N) of this rank's part x (M, N), bias (N,), residual (M, N) and the norm's weight (N,); all
    of one dtype of 16 bits or float32, N what this `takes`."""
    _, world = rank_and_size(group_name)
    m, words = x.shape[0], x.shape[1] * x.element_size() // 4
    normed, added = x.new_empty(x.shape), x.new_empty(x.shape)
    if not x.numel():
        return normed, added
    where = channel(group_name, "low_latency/rows", room(m * words, world), x.device)
    where.enter()
    launches["tp_linear/row_norm"] += 1
    early, block = starts_early(x), power_of_two(words)
    warps = 1 if INTERPRET else max(1, min(16, block // _WORDS_PER_WARP))
    with on_device(x):
        launch(
            _sum_norm_kernel, m,
            _words(x), None if bias is None else _words(bias), _words(residual), _words(weight), _words(normed),
            _words(added), where.memory.addresses, where.state, where.fault.tensor, third_of(where.half_bytes),
            timeout_ns(), where.rank, words, eps, world, power_of_two(world), block, triton_dtype(x.dtype), early,
            num_warps=warps, **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return normed, added
