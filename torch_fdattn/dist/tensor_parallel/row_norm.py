"""An all-reduce of few rows, the residual's addition and RMSNorm in one launch, which are three otherwise.

A program has a row: it sends this rank's part of it to all others by a Lamport exchange
(`dist/symm/lamport.py`), and sums all parts in fp32 in the order of ranks: the same bits on all ranks. The sum is rounded
to the dtype before the residual is added, and so is what they give before it is normalised, as three launches round
them.

The sum of squares (Zhang and Sennrich 2019, equation 4) needs the whole row in one program: up to MAX_COLUMNS. So
programs have several warps, though they wait: every packet is loaded by one thread alone, and the warps learn by a sum
over all of them whether they came.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.groups import rank_and_size
from torch_fdattn.dist.symm.faults import timeout_ns
from torch_fdattn.dist.symm.lamport import (
    as_int32,
    bytes_per_buffer,
    channel_of_packets,
    halves,
    joined,
    leave_turn,
)
from torch_fdattn.dist.tensor_parallel.lamport_exchange import packet_aligned
from torch_fdattn.dist.tensor_parallel.lamport_two_shot import exchange_sums, shots, slots
from torch_fdattn.launch.launches import launch
from torch_fdattn.launch.pdl import await_previous, pdl_trigger
from torch_fdattn.ops.gemm.tile_product import triton_dtype
from torch_fdattn.ops.launch import power_of_two
from torch_fdattn.ops.library import INTERPRET, launches
from torch_fdattn.ops.pdl import pdl_option, uses_pdl

MAX_COLUMNS = 8192
#: (rows up to which, packets that a warp has). On two H200, 2560 packets: 512 takes 0.7 µs less than 1024 for one row, 13
#: more for 2048.
_PACKETS_PER_WARP = ((200, 512), (None, 1024))
#: In two trips a program holds more at a time. Compiled for an H100, 16 bits, four ranks: with 1024 it spills 312 bytes,
#: with 512 none. (float32 beyond 4096 columns, whose sixteen warps have 128 registers a thread: 80.)
_TWO_SHOT_PACKETS_PER_WARP = 512


@triton.jit
def _rounded(low, high, dtype: tl.constexpr):
    return halves(joined(low, high, dtype), dtype)


@triton.jit(do_not_specialize=["buffer_bytes", "limit_ns", "rank", "eps"])
def _sum_norm_kernel(
    x_ptr, bias_ptr, residual_ptr, weight_ptr, normed_ptr, added_ptr, addresses_ptr, state_ptr, fault_ptr, buffer_bytes,
    limit_ns, rank, packets, eps, WORLD: tl.constexpr, SOURCES: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
    PDL: tl.constexpr, SHOTS: tl.constexpr,
):  # fmt: skip
    """x, residual (m, packets), bias (packets,) or None, weight (packets,) -> added (m, packets), the sum over ranks and more,
    normed (m, packets); packets of numbers of DTYPE. SHOTS: trips of the exchange (`lamport_two_shot.py`); 0: x is that sum."""
    await_previous(PDL)
    pdl_trigger(PDL)
    x_ptr, residual_ptr, weight_ptr = as_int32(x_ptr), as_int32(residual_ptr), as_int32(weight_ptr)
    normed_ptr, added_ptr = as_int32(normed_ptr), as_int32(added_ptr)
    PER_PACKET: tl.constexpr = 2 if DTYPE.primitive_bitwidth == 16 else 1
    columns = tl.arange(0, BLOCK)
    inside = columns < packets
    at = tl.program_id(0).to(tl.int64) * packets + columns
    residual = tl.load(residual_ptr + at, mask=inside, other=0)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0)
    if SHOTS:
        low, high, epoch, turn = exchange_sums(
            x_ptr, at, inside, addresses_ptr, state_ptr, fault_ptr, buffer_bytes, limit_ns, rank, packets, WORLD, SOURCES,
            DTYPE, SHOTS,
        )  # fmt: skip
        low, high = _rounded(low, high, DTYPE)
    else:
        low, high = halves(tl.load(x_ptr + at, mask=inside, other=0), DTYPE)
    if bias_ptr is not None:
        bias_low, bias_high = halves(
            tl.load(as_int32(bias_ptr) + columns, mask=inside, other=0), DTYPE
        )
        low, high = _rounded(low + bias_low, high + bias_high, DTYPE)
    residual_low, residual_high = halves(residual, DTYPE)
    added = joined(residual_low + low, residual_high + high, DTYPE)
    tl.store(added_ptr + at, added, mask=inside)
    low, high = halves(added, DTYPE)
    squares = low * low + high * high if PER_PACKET == 2 else low * low
    mean = tl.sum(tl.where(inside, squares, 0.0), 0) / (packets * PER_PACKET)
    scale = tl.rsqrt(mean + eps)
    weight_low, weight_high = halves(weight, DTYPE)
    normed = joined(low * scale * weight_low, high * scale * weight_high, DTYPE)
    tl.store(normed_ptr + at, normed, mask=inside)
    if SHOTS:
        leave_turn(state_ptr, epoch, turn, tl.num_programs(0) * packets)


def takes(columns: int, dtype: torch.dtype) -> bool:
    """Whether rows of so many numbers fit, and are whole packets."""
    return 0 < columns <= MAX_COLUMNS and columns * dtype.itemsize % 4 == 0


def sum_norm(
    x: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, eps: float, group_name: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(normed, added) (…, N) of this rank's part x (…, N), bias (N,), residual (…, N) and the norm's weight (N,); all
    of one dtype of 16 bits or float32, N what this `takes`. group_name None: x is the sum already."""
    x = x.contiguous()
    normed, added = torch.empty_like(x), torch.empty_like(x)
    if not x.numel():
        return normed, added
    launches["tensor_parallel/row_norm"] += 1
    columns = x.shape[-1]
    m, packets = x.numel() // columns, columns * x.element_size() // 4
    x, residual, weight = packet_aligned(x), packet_aligned(residual), packet_aligned(weight)
    bias = None if bias is None else packet_aligned(bias)
    where, of_channel, numbers, world, trips = None, (None, None, None), (0, 0, 0), 1, 0
    if group_name is not None:
        _, world = rank_and_size(group_name)
        trips = shots(4 * m * packets, world)
        purpose = "low_latency/rows" if trips == 1 else "low_latency/two_shot_rows"
        where = channel_of_packets(m * packets, group_name, purpose, x.device, slots(trips, world))
        of_channel = where.memory.addresses, where.state, where.fault.tensor
        numbers = bytes_per_buffer(where), timeout_ns(), where.rank
    pdl, block = uses_pdl(x), power_of_two(packets)
    per_warp = next(per for most, per in _PACKETS_PER_WARP if most is None or m <= most)
    if trips == 2:
        per_warp = _TWO_SHOT_PACKETS_PER_WARP
    warps = 1 if INTERPRET else max(1, min(16, block // per_warp))
    launch(
        _sum_norm_kernel, m,
        x, bias, residual, weight, normed, added, *of_channel, *numbers, packets, eps, world, power_of_two(world), block,
        triton_dtype(x.dtype), pdl, trips, num_warps=warps, **pdl_option(pdl),
    )  # fmt: skip
    return normed, added
