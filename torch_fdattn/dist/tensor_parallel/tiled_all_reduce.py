"""Method `low_latency` of more numbers: tiles that go to other ranks as they are, each with a flag behind it.

Half the bytes of packets (`low_latency.py`), for a fence and a flag a tile. Two forms:

    one shot    every rank sends its part to all others and sums all parts: (W - 1) times the bytes, one trip
    two shots   tile t of every rank goes to its owner, who sums it and sends the sum to all: 2 (W - 1) / W times the
                bytes, two trips. For three ranks and more

Sums are in fp32 in the order of ranks and rounded once: the same bits on all ranks, and in both forms.

A program waits only for programs of its own number on other ranks, which come after no program that waits for it:
whatever number of them runs at once, all of them end.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.symm.channel import channel
from torch_fdattn.dist.symm.faults import timeout_ns
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
from torch_fdattn.launch.pdl import await_previous
from torch_fdattn.ops.launch import cdiv, power_of_two
from torch_fdattn.ops.pdl import pdl_option, uses_pdl

#: Bytes of a tile, which one warp moves, for few numbers and for many. On two H200, 1.3 MiB: 2048 takes 0.9 µs less
#: than 4096; 10 MiB: 4 more.
_FEW_BYTES, _TILE_OF_FEW, _TILE = 4 << 20, 2048, 4096


@triton.jit
def _slot(
    address, slot, tile, tiles, FLAGS: tl.constexpr, BLOCK: tl.constexpr, dtype: tl.constexpr
):
    """Tile `tile` of a slot; the flags, FLAGS times `tiles` of them, lie before all slots, which begin where wide
    stores may."""
    first = (address + tl.cdiv(tiles * FLAGS, 2).to(tl.int64) * 16).to(tl.pointer_type(dtype))
    return tl.multiple_of(first + (slot * tiles + tile).to(tl.int64) * BLOCK, 16) + tl.arange(
        0, BLOCK
    )


@triton.jit
def _send(values, slot, addresses_ptr, epoch, half_bytes, sends, rank, WORLD: tl.constexpr, FLAGS: tl.constexpr):  # fmt: skip
    """A tile to all other ranks, into the same slot everywhere."""
    for i in tl.static_range(1, WORLD):
        there = at_rank(addresses_ptr, (rank + i) % WORLD, epoch, half_bytes)
        target = _slot(there, slot, tl.program_id(0), tl.num_programs(0), FLAGS, values.shape[0], values.dtype)  # fmt: skip
        tl.store(target, values, mask=sends)


@triton.jit
def _exchange_flags(
    first, addresses_ptr, state_ptr, fault_ptr, epoch, half_bytes, limit_ns, sends, rank, WORLD: tl.constexpr,
    SOURCES: tl.constexpr,
):  # fmt: skip
    """Raises this tile's flag at the others, and waits for theirs; flags of this kind begin at the first-th."""
    sources = tl.arange(0, SOURCES)
    others = (sources < WORLD) & (sources != rank)
    tiles = tl.num_programs(0)
    there = tl.load(addresses_ptr + sources, mask=others, other=0) + (epoch & 1) * half_bytes
    at = first * tiles + tl.program_id(0)
    raise_flags(as_int64(there) + at + rank * tiles, others & sends, epoch)
    here = as_int64(at_rank(addresses_ptr, rank, epoch, half_bytes))
    return await_flags(here + at + sources * tiles, others, sources, epoch, state_ptr, fault_ptr, limit_ns)  # fmt: skip


@triton.jit
def _summed(own, here, came, rank, WORLD: tl.constexpr, FLAGS: tl.constexpr):
    """The sum (BLOCK,) over ranks, fp32, of this rank's part and of those in the slots 0 to W - 1; NaN if not all came."""
    total = tl.zeros(own.shape, tl.float32)
    for source in tl.static_range(WORLD):
        slot = _slot(here, source, tl.program_id(0), tl.num_programs(0), FLAGS, own.shape[0], own.dtype)  # fmt: skip
        # Past the first-level cache, which does not see what other devices write.
        part = tl.load(slot, mask=source != rank, other=0.0, volatile=True)
        total += tl.where(source == rank, own, part).to(tl.float32)
    return tl.where(came, total, float("nan"))


@triton.jit(do_not_specialize=["half_bytes", "limit_ns", "rank"])
def _one_shot_kernel(
    x_ptr, y_ptr, addresses_ptr, state_ptr, fault_ptr, half_bytes, limit_ns, rank, count, WORLD: tl.constexpr,
    SOURCES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x (count,) -> y (count,), the sum over ranks."""
    await_previous(PDL)
    epoch = read_epoch(state_ptr)
    sends = may_send(state_ptr, epoch)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0)
    _send(x, rank, addresses_ptr, epoch, half_bytes, sends, rank, WORLD, WORLD)
    came = _exchange_flags(
        0, addresses_ptr, state_ptr, fault_ptr, epoch, half_bytes, limit_ns, sends, rank, WORLD, SOURCES
    )  # fmt: skip
    here = at_rank(addresses_ptr, rank, epoch, half_bytes)
    total = _summed(x, here, came, rank, WORLD, WORLD)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=at < count)
    leave_epoch(state_ptr, epoch, tl.num_programs(0))


@triton.jit(do_not_specialize=["half_bytes", "limit_ns", "rank"])
def _two_shot_kernel(
    x_ptr, y_ptr, addresses_ptr, state_ptr, fault_ptr, half_bytes, limit_ns, rank, count, WORLD: tl.constexpr,
    SOURCES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `_one_shot_kernel`. Slots: the parts that others sent of the own tiles, then the sums of their owners."""
    await_previous(PDL)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    FLAGS: tl.constexpr = 2 * WORLD
    epoch = read_epoch(state_ptr)
    sends = may_send(state_ptr, epoch)
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    elements = tl.arange(0, BLOCK)
    for i in tl.static_range(1, WORLD):
        owner = (rank + i) % WORLD
        at = (owner * tiles + tile).to(tl.int64) * BLOCK + elements
        part = tl.load(x_ptr + at, mask=at < count, other=0.0)
        there = at_rank(addresses_ptr, owner, epoch, half_bytes)
        tl.store(_slot(there, rank, tile, tiles, FLAGS, BLOCK, dtype), part, mask=sends)
    came = _exchange_flags(
        0, addresses_ptr, state_ptr, fault_ptr, epoch, half_bytes, limit_ns, sends, rank, WORLD, SOURCES
    )  # fmt: skip
    here = at_rank(addresses_ptr, rank, epoch, half_bytes)
    at = (rank * tiles + tile).to(tl.int64) * BLOCK + elements
    own = tl.load(x_ptr + at, mask=at < count, other=0.0)
    total = _summed(own, here, came, rank, WORLD, FLAGS).to(dtype)
    tl.store(y_ptr + at, total, mask=at < count)
    # A sum without all parts is no sum: who waits for it finds that out as this rank did, the late one among them.
    sends = sends & came
    _send(total, WORLD + rank, addresses_ptr, epoch, half_bytes, sends, rank, WORLD, FLAGS)
    came = _exchange_flags(
        WORLD, addresses_ptr, state_ptr, fault_ptr, epoch, half_bytes, limit_ns, sends, rank, WORLD, SOURCES
    )  # fmt: skip
    for i in tl.static_range(1, WORLD):
        owner = (rank + i) % WORLD
        at = (owner * tiles + tile).to(tl.int64) * BLOCK + elements
        found = tl.load(_slot(here, WORLD + owner, tile, tiles, FLAGS, BLOCK, dtype), volatile=True)
        tl.store(y_ptr + at, tl.where(came, found, float("nan")), mask=at < count)
    leave_epoch(state_ptr, epoch, tl.num_programs(0))


def all_reduce(x: Tensor, y: Tensor, group_name: str, rank: int, world: int, *, shots: int) -> None:
    """Writes the sum of x over the ranks into y; both contiguous, of one dtype."""
    count, size = x.numel(), x.element_size()
    block = (_TILE_OF_FEW if x.nbytes <= _FEW_BYTES else _TILE) // size
    tiles = cdiv(count, block * (world if shots == 2 else 1))
    slots = shots * world
    nbytes = cdiv(slots * tiles, 2) * 16 + slots * tiles * block * size
    where = channel(group_name, f"low_latency/{shots}_shot", nbytes, x.device)
    where.enter()
    pdl = uses_pdl(y)
    launch(
        _two_shot_kernel if shots == 2 else _one_shot_kernel, tiles,
        x, y, where.memory.addresses, where.state, where.fault.tensor, where.half_bytes, timeout_ns(), rank,
        count, world, power_of_two(world), block, pdl, num_warps=1,
        **pdl_option(pdl),
    )  # fmt: skip
