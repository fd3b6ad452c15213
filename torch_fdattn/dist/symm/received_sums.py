"""Sums of what copy engines brought (`copies.py`), in the order of ranks."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.symm.copies import Copies, finish
from torch_fdattn.dist.symm.faults import timeout_ns
from torch_fdattn.dist.symm.signals import TICKETS, as_int64, await_flag, read_epoch
from torch_fdattn.launch.device import num_sms
from torch_fdattn.launch.launches import launch
from torch_fdattn.ops.launch import cdiv

#: Elements that a program of four warps sums at a time, and its programs an SM: each of them polls the flags.
_BLOCK = 2048
_PROGRAMS = 8


@triton.jit
def _arrived(addresses_ptr, state_ptr, fault_ptr, epoch, limit_ns, rank, WORLD: tl.constexpr):
    """1 once the chunks of all other ranks are there, for programs of any number of warps; 0: one did not come."""
    here = as_int64(tl.load(addresses_ptr + rank))
    came = 1
    for i in range(1, WORLD):
        source = (rank + i) % WORLD
        found = await_flag(here + source, source, epoch, state_ptr, fault_ptr, limit_ns)
        came &= found.to(tl.int32)
    return came


@triton.jit(do_not_specialize=["limit_ns", "rank"])
def _sum_kernel(
    own_ptr, parts_ptr, out_ptr, addresses_ptr, state_ptr, fault_ptr, limit_ns, rank, count, WORLD: tl.constexpr,
    SOURCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """own (count,), parts (WORLD, count), of which the own is not there -> out (count,), their sum.

    The last program to be done finishes the call.
    """
    epoch = read_epoch(state_ptr)
    came = _arrived(addresses_ptr, state_ptr, fault_ptr, epoch, limit_ns, rank, WORLD)
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        own = tl.load(own_ptr + at, mask=inside, other=0.0)
        total = tl.zeros([BLOCK], tl.float32)
        part_ptr = parts_ptr
        for source in tl.static_range(WORLD):
            theirs = inside & (source != rank)
            # Past the first-level cache, which does not see what other devices write.
            part = tl.load(part_ptr + at, mask=theirs, other=0.0, volatile=True)
            part_ptr += count
            total += tl.where(source == rank, own, part).to(tl.float32)
        total = tl.where(came != 0, total, float("nan"))
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)
    tl.debug_barrier()
    ticket = tl.atomic_add(state_ptr + TICKETS, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    if ticket == tl.num_programs(0) - 1:
        tl.store(state_ptr + TICKETS, 0)
        kept = _arrived(addresses_ptr, state_ptr, fault_ptr, epoch, limit_ns, rank, WORLD)
        finish(
            (out_ptr,), (count,), kept, epoch, addresses_ptr, state_ptr, rank, WORLD, SOURCES, BLOCK
        )


def sum_received(copies: Copies, own: Tensor, out: Tensor) -> None:
    """Writes the sum of `own` and of the part that each other rank sent, in fp32, and finishes the call.

    The part of rank r begins at element r · own.numel() of this rank's data. own and out: contiguous, not empty, of one
    dtype.
    """
    parts = copies.data(copies.rank, own.dtype, copies.world, own.numel())
    programs = min(cdiv(out.numel(), _BLOCK), _PROGRAMS * num_sms(own.device))
    launch(
        _sum_kernel, programs,
        own, parts, out, *copies.device_side, timeout_ns(), copies.rank, out.numel(), copies.world, copies.sources,
        _BLOCK, num_warps=4,
    )  # fmt: skip
    copies.finished = True
