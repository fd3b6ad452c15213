"""A one-sided all-gather: every rank writes its tensor into the memory of all others, in one kernel.

Two protocols (`signals.py`): up to LL_MAX_BYTES a rank, 32 bits travel with the call's epoch in one packet, which
needs no flag but twice the bytes; beyond, 64 bits at a time, and a flag for each tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.groups import rank_and_size
from torch_fdattn.dist.symm.channel import channel
from torch_fdattn.dist.symm.faults import timeout_ns
from torch_fdattn.dist.symm.signals import (
    as_int64,
    at_rank,
    await_flags,
    leave_epoch,
    ll_packet,
    may_send,
    payload,
    raise_flags,
    read_epoch,
    receive_packets,
)
from torch_fdattn.launch import prepared
from torch_fdattn.launch.launches import Launch
from torch_fdattn.launch.pdl import await_previous, pdl_trigger
from torch_fdattn.ops.launch import cdiv, power_of_two
from torch_fdattn.ops.library import INTERPRET, launches
from torch_fdattn.ops.pdl import pdl_option, uses_pdl

#: Packets of all ranks that a program polls together.
TILE_PACKETS = 256
#: Bytes a rank up to which packets are faster than flags.
LL_MAX_BYTES = 1 << 16
#: Bytes of a tile behind a flag.
_TILE = 4096


@triton.jit(do_not_specialize=["half_bytes", "limit_ns", "rank", "count"])
def _gather_packets_kernel(
    x_ptr, out_ptr, addresses_ptr, state_ptr, fault_ptr, half_bytes, limit_ns, rank, count, WORLD: tl.constexpr,
    SOURCES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x int32 (count,) -> out int32 (WORLD, count)."""
    await_previous(PDL)
    pdl_trigger(PDL)
    epoch = read_epoch(state_ptr)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    sent = inside & may_send(state_ptr, epoch)
    x = tl.load(x_ptr + at, mask=inside, other=0)
    for i in tl.static_range(1, WORLD):
        base = as_int64(at_rank(addresses_ptr, (rank + i) % WORLD, epoch, half_bytes))
        tl.store(base + rank * count + at, ll_packet(x, epoch), mask=sent)
    sources = tl.arange(0, SOURCES)
    others = (sources < WORLD) & (sources != rank)
    base = as_int64(at_rank(addresses_ptr, rank, epoch, half_bytes))
    expected = others[:, None] & inside[None, :]
    pointers = base + sources[:, None] * count + at[None, :]
    none = tl.zeros_like(others)
    packets, _, came = receive_packets(
        pointers[:, :, None], base + sources[:, None], expected[:, :, None], none[:, None], sources, epoch,
        state_ptr, fault_ptr, limit_ns,
    )  # fmt: skip
    found = tl.reshape(payload(packets, tl.int32), [SOURCES, BLOCK])
    found = tl.where((sources == rank)[:, None], x[None, :], found)
    found = tl.where(came, found, -1)  # NaN in any format
    inside_all = (sources < WORLD)[:, None] & inside[None, :]
    tl.store(out_ptr + sources[:, None].to(tl.int64) * count + at[None, :], found, mask=inside_all)
    leave_epoch(state_ptr, epoch, tl.num_programs(0))


@triton.jit(do_not_specialize=["half_bytes", "limit_ns", "rank", "count"])
def _gather_tiles_kernel(
    x_ptr, out_ptr, addresses_ptr, state_ptr, fault_ptr, half_bytes, limit_ns, rank, count, WORLD: tl.constexpr,
    SOURCES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x int64 (count,) -> out int64 (WORLD, count)."""
    await_previous(PDL)
    pdl_trigger(PDL)
    epoch = read_epoch(state_ptr)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    sent = inside & may_send(state_ptr, epoch)
    x = tl.load(x_ptr + at, mask=inside, other=0)
    flags = tl.num_programs(0)  # of each source; the data lies behind them
    data = WORLD * flags
    for i in tl.static_range(1, WORLD):
        base = as_int64(at_rank(addresses_ptr, (rank + i) % WORLD, epoch, half_bytes))
        tl.store(base + data + rank.to(tl.int64) * count + at, x, mask=sent)
    tl.store(out_ptr + rank.to(tl.int64) * count + at, x, mask=inside)
    sources = tl.arange(0, SOURCES)
    others = (sources < WORLD) & (sources != rank)
    address = tl.load(addresses_ptr + sources, mask=others, other=0) + (epoch & 1) * half_bytes
    raise_flags(
        as_int64(address) + rank * flags + tl.program_id(0),
        others & may_send(state_ptr, epoch),
        epoch,
    )
    base = as_int64(at_rank(addresses_ptr, rank, epoch, half_bytes))
    mine = base + sources * flags + tl.program_id(0)
    came = await_flags(mine, others, sources, epoch, state_ptr, fault_ptr, limit_ns)
    for i in tl.static_range(1, WORLD):
        source = ((rank + i) % WORLD).to(tl.int64)
        found = tl.load(base + data + source * count + at, mask=inside, other=0, volatile=True)
        tl.store(out_ptr + source * count + at, tl.where(came, found, -1), mask=inside)
    leave_epoch(state_ptr, epoch, tl.num_programs(0))


def all_gather(x: Tensor, group_name: str) -> Tensor:
    """`torch_fdattn.dist.one_sided_all_gather` of ranks that share symmetric memory."""
    rank, world = rank_and_size(group_name)
    if not x.is_contiguous() or x.nbytes % 4:
        raise ValueError(
            f"x must be contiguous and of a multiple of 4 bytes, got {x.nbytes} bytes with strides {x.stride()}"
        )
    out = torch.empty(world, *x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    by_packets = x.nbytes <= LL_MAX_BYTES or x.nbytes % 8
    unit = torch.int32 if by_packets else torch.int64
    if x.data_ptr() % unit.itemsize:
        x = x.clone()  # which begins where words may
    flat, flat_out = x.reshape(-1).view(unit), out.view(-1).view(unit)
    count = flat.numel()
    sources = power_of_two(world)
    if by_packets:
        kernel, block, packets = _gather_packets_kernel, max(32, TILE_PACKETS // sources), count
        if INTERPRET:
            block = min(power_of_two(count), 1 << 13)
    else:
        kernel, block = _gather_tiles_kernel, _TILE // 8
        packets = count + cdiv(count, block)
    where = channel(group_name, f"symm_all_gather/{unit}", world * packets * 8, x.device)
    where.enter()
    launches["one_sided_all_gather"] += 1
    tensors = flat, flat_out, where.memory.addresses, where.state, where.fault.tensor
    pdl = uses_pdl(x)
    numbers = where.half_bytes, timeout_ns(), rank, count, world, sources, block, pdl
    key = ("one_sided_all_gather", unit, x.device, *numbers) if x.is_cuda else None
    call = prepared.find(key) or prepared.prepare(key)
    if not call.by_driver(tensors):
        options = {"num_warps": 1, **pdl_option(pdl)}
        call.run(tensors, (Launch(kernel, cdiv(count, block), *tensors, *numbers, **options),))
    return out
