"""Method `gemm_all_reduce`: a product of few rows and its sum over the ranks in one launch.

A program has some columns of y, for all rows (`small_m_gemm.py`). A finished tile goes to all other ranks by a
Lamport exchange (`dist/symm/lamport.py`); then the program takes theirs and sums in fp32, in the order of ranks:
the same bits on all ranks. Many bytes of three ranks or more go in two trips (`lamport_two_shot.py`): of each tile a rank
owns some rows.

A program waits for the same columns alone, and only once it has sent its own: the first columns that any rank has not
finished wait for nobody. With tiles that fit a device at once, none waits for a place.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.groups import rank_and_size
from torch_fdattn.dist.symm.faults import timeout_ns
from torch_fdattn.dist.symm.lamport import (
    PREVIOUS_PACKETS,
    TURN,
    as_int32,
    buffer,
    bytes_per_buffer,
    channel_of_packets,
    clear,
    halves,
    joined,
    leave_turn,
    nonzero_packets,
    packets_per_slot,
    push,
    receive_lamport,
    slot_of,
)
from torch_fdattn.dist.symm.signals import may_send, packed, read_epoch
from torch_fdattn.dist.tensor_parallel.lamport_two_shot import (
    send_to_owners,
    share_sums,
    shots,
    slots,
)
from torch_fdattn.launch.launches import launch
from torch_fdattn.launch.pdl import await_previous, pdl_trigger
from torch_fdattn.ops.attention.configs import dot_precision
from torch_fdattn.ops.gemm.small_m_gemm import (
    AHEAD,
    columns_product,
    prefetch,
    smaller,
    tile_for,
)
from torch_fdattn.ops.gemm.tile_product import operands, triton_dtype
from torch_fdattn.ops.launch import cdiv, power_of_two
from torch_fdattn.ops.library import launches
from torch_fdattn.ops.pdl import pdl_option, uses_pdl

#: Packets that a program zeroes at a time.
_CLEARED = tl.constexpr(1024)


@triton.jit(do_not_specialize=["buffer_bytes", "limit_ns", "rank", "m"])
def _gemm_all_reduce_kernel(
    y_ptr, x, w, w_ptr, scale_ptr, bias_ptr, addresses_ptr, state_ptr, fault_ptr, x_stride, w_strides, scale_stride, buffer_bytes,
    limit_ns, rank, m, n, k, WORLD: tl.constexpr, SOURCES: tl.constexpr, DTYPE: tl.constexpr, LAYOUT: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr, SHOTS: tl.constexpr,
):  # fmt: skip
    """x (m, k), w (n, k), scale (n,) or None, bias (n,) or None -> y (m, n), the sum over ranks of
    x @ (w * scale).T + bias; m at most BLOCK_M. AHEAD: bytes of a row of w that are on their way before x is there."""
    first_column = tl.program_id(0) * BLOCK_N
    if AHEAD:
        prefetch(w_ptr, first_column, n, k, w_strides[0], BLOCK_N, AHEAD)
    await_previous(PDL)
    epoch = read_epoch(state_ptr)
    turn, before = tl.load(state_ptr + TURN), tl.load(state_ptr + PREVIOUS_PACKETS)
    SLOTS: tl.constexpr = WORLD + SHOTS - 1
    each = packets_per_slot(buffer_bytes, SLOTS)
    clear(addresses_ptr, rank, turn, before, each, buffer_bytes, SLOTS, SOURCES, _CLEARED)

    acc = columns_product(
        x, w, first_column, m, n, k, x_stride, w_strides, LAYOUT, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, PRECISION,
    )  # fmt: skip
    pdl_trigger(PDL)  # not before: what comes next would take places and loads from this
    columns = first_column + tl.arange(0, BLOCK_N)
    if scale_ptr is not None:
        acc *= tl.load(scale_ptr + columns * scale_stride, mask=columns < n, other=0.0)[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + columns, mask=columns < n, other=0.0).to(tl.float32)[:, None]

    PER_PACKET: tl.constexpr = 2 if DTYPE.primitive_bitwidth == 16 else 1
    ACROSS: tl.constexpr = BLOCK_N // PER_PACKET
    own = tl.reshape(packed(tl.trans(acc.to(DTYPE)), DTYPE), [BLOCK_M * ACROSS])
    own = nonzero_packets(own, DTYPE)
    row_packets = n // PER_PACKET
    within = tl.arange(0, BLOCK_M * ACROSS)
    row, across = within // ACROSS, first_column // PER_PACKET + within % ACROSS
    at, inside = row * row_packets + across, (row < m) & (across < row_packets)
    if SHOTS == 1:
        takes = inside
        sends = inside & may_send(state_ptr, epoch)
        for i in tl.static_range(1, WORLD):
            peer = (rank + i) % WORLD
            push(own, at, sends, addresses_ptr, rank, peer, turn, each, buffer_bytes, WORLD)
    else:
        owner = row * WORLD // m  # of some rows each, of which all ranks have as many
        takes = inside & (owner == rank)
        send_to_owners(
            own, at, inside, owner, epoch, turn, addresses_ptr, state_ptr, buffer_bytes, rank, WORLD
        )  # fmt: skip

    all_came = epoch == epoch
    here = buffer(addresses_ptr, rank, turn, buffer_bytes)
    low, high = tl.zeros_like(own).to(tl.float32), tl.zeros_like(own).to(tl.float32)
    for source in range(WORLD):
        packets = own  # as the others have it
        came = epoch == epoch
        if source != rank:
            found, came = receive_lamport(
                (here + slot_of(source, rank, WORLD) * each + at)[None, :], takes[None, :],
                tl.full([1, 1], 0, tl.int32) + source, epoch, state_ptr, fault_ptr, limit_ns,
            )  # fmt: skip
            packets = tl.reshape(found, [BLOCK_M * ACROSS])
        lower, upper = halves(packets, DTYPE)
        none = tl.where(came, 0.0, float("nan"))  # makes plus zero of minus zeros
        low, high = low + lower + none, high + upper + none
        all_came &= came
    if SHOTS == 1:
        sums = joined(low, high, DTYPE)
    else:
        sums = share_sums(
            low, high, all_came, at, inside, owner, epoch, turn, addresses_ptr, state_ptr, fault_ptr, buffer_bytes,
            limit_ns, rank, WORLD, DTYPE,
        )  # fmt: skip
    tl.store(as_int32(y_ptr) + at, sums, mask=inside)
    leave_turn(state_ptr, epoch, turn, m * row_packets)


def matmul_all_reduce(
    x: Tensor, weight: Tensor, group_name: str, bias: Tensor | None = None, scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The sum over ranks of x (M, K) @ (weight (N, K) * scale (N,)).T + bias (N,); M at most `op.GEMM_ALL_REDUCE_ROWS`, N even,
    x's features and the bias contiguous."""
    (m, k), n = x.shape, weight.shape[0]
    y = x.new_empty(m, n)
    if not y.numel():
        return y
    launches["tensor_parallel/gemm_all_reduce"] += 1
    rank, world = rank_and_size(group_name)
    # A rank that owned no row would hear of the others through the owners alone, and name one of them for a late one.
    trips = shots(y.nbytes, world) if m >= world else 1
    purpose = "gemm_all_reduce" if trips == 1 else "gemm_all_reduce/two_shot"
    where = channel_of_packets(y.nbytes // 4, group_name, purpose, x.device, slots(trips, world))
    numbers = bytes_per_buffer(where), timeout_ns(), rank
    tile = tile_for(m, x)
    (w,), few, layout = operands((weight,), x, tile)
    if layout != "rows":  # x of one feature may lie by "columns"
        w, few, layout, tile = weight, x, None, smaller(tile)
    pdl = uses_pdl(x)
    launch(
        _gemm_all_reduce_kernel, cdiv(n, tile.m),
        y, few, w, weight, scale, bias, where.memory.addresses, where.state, where.fault.tensor, x.stride(0),
        weight.stride(), 0 if scale is None else scale.stride(0), *numbers,
        m, n, k, world, power_of_two(world), triton_dtype(x.dtype), layout, k % tile.k == 0, tile.n, tile.m, tile.k,
        tile.stages, dot_precision(x.dtype), pdl, AHEAD if pdl and layout else 0, trips,
        num_warps=tile.warps, **pdl_option(pdl),
    )  # fmt: skip
    return y
