"""Method `low_latency` of a middling number: values that tell themselves that they came.

One shot, as `push_tiles.py`, but with neither flag nor fence, for which a tile waits 2 µs, and with half the bytes of
words (`low_latency.py`): memory that waits for values holds zeros, and a 32-bit word of values that is zero travels as
minus zero. (The Lamport protocol of FlashInfer's and TensorRT-LLM's all-reduces, there with minus zero for what did
not come.) So a word is there when it is not zero, each for itself.

Memory is made zero again by who has read it. Calls take three buffers in turn: one call writes into the first, zeroes
what the call before used, and knows that the third, which the next call uses, is zero on every rank that has sent
anything in this call: it zeroed that in the call before. The turn, and how many words the last call used, are on the
device, so captured graphs may be replayed in any order with eager calls.

state, beside what `signals.py` has there: turn, words of the call before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.channel import channel
from torch_fdattn.dist.decode.rows import starts_early
from torch_fdattn.dist.faults import timeout_ns
from torch_fdattn.dist.signals import (
    LOOKS,
    TICKETS,
    await_previous,
    look_at_clock,
    may_send,
    next_epoch,
    read_epoch,
    report,
    start_clock,
)
from torch_fdattn.dist.tp_linear.gemm import triton_dtype
from torch_fdattn.ops.launch import cdiv, on_device, power_of_two
from torch_fdattn.ops.repeated_launch import launch

TURN = tl.constexpr(5)
BEFORE = tl.constexpr(6)
#: Words of all ranks that a program looks at together. Not measured yet.
_TILE_WORDS = 1024


@triton.jit
def _buffer(addresses_ptr, rank, turn, third_bytes):
    address = tl.load(addresses_ptr + rank) + turn * third_bytes
    return tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def _halves(words, dtype: tl.constexpr):
    """The numbers of words, fp32: (the lower, the upper); of one fp32 number twice the same."""
    if dtype.primitive_bitwidth == 16:
        low = (words & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
        high = ((words >> 16) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
        return low.to(tl.float32), high.to(tl.float32)
    else:
        both = words.to(tl.float32, bitcast=True)
        return both, both


@triton.jit
def _joined(low, high, dtype: tl.constexpr):
    """`_halves`, undone and rounded."""
    if dtype.primitive_bitwidth == 16:
        lower = low.to(dtype).to(tl.uint16, bitcast=True).to(tl.int32)
        return lower | (high.to(dtype).to(tl.uint16, bitcast=True).to(tl.int32) << 16)
    else:
        return low.to(tl.int32, bitcast=True)


@triton.jit
def _receive(pointers, wanted, sources, epoch, state_ptr, fault_ptr, limit_ns):
    """(words (S, B) of sources, once all that are wanted have come, whether they came)."""
    words = tl.load(pointers, mask=wanted, other=1, volatile=True)
    missing = tl.sum((words == 0).to(tl.int32), 1)
    if tl.sum(missing, 0) > 0:
        start, stop = start_clock(state_ptr)
        looks = 0
        while (tl.sum(missing, 0) > 0) & (stop == 0):
            words = tl.load(pointers, mask=wanted, other=1, volatile=True)
            missing = tl.sum((words == 0).to(tl.int32), 1)
            looks += 1
            if (looks % LOOKS == 0) & (tl.sum(missing, 0) > 0):
                stop, elsewhere = look_at_clock(start, state_ptr, limit_ns)
                if stop & (elsewhere == 0):
                    late = tl.max(tl.where(missing > 0, sources, -1), 0)
                    report(late, epoch, state_ptr, fault_ptr)
    return words, tl.sum(missing, 0) == 0


@triton.jit(do_not_specialize=["third_bytes", "limit_ns", "rank"])
def _sum_values_kernel(
    x_ptr, y_ptr, addresses_ptr, state_ptr, fault_ptr, third_bytes, limit_ns, rank, words, WORLD: tl.constexpr,
    SOURCES: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x (words,) -> y (words,), the sum over ranks: int32 words of numbers of DTYPE."""
    await_previous(PDL)
    ZERO: tl.constexpr = -0x7FFF8000 if DTYPE.primitive_bitwidth == 16 else -0x80000000
    epoch = read_epoch(state_ptr)
    turn, before = tl.load(state_ptr + TURN), tl.load(state_ptr + BEFORE)
    program, programs = tl.program_id(0), tl.num_programs(0)
    room = tl.multiple_of(third_bytes // (16 * WORLD) * 4, 4)  # words of a rank in a buffer
    at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < words
    own = tl.load(x_ptr + at, mask=inside, other=0)
    own = tl.where(own == 0, ZERO, own)  # here, too: the sum's bits are the same everywhere
    sends = inside & may_send(state_ptr, epoch)
    for i in tl.static_range(1, WORLD):
        there = _buffer(addresses_ptr, (rank + i) % WORLD, turn, third_bytes)
        tl.store(there + rank * room + at, own, mask=sends)

    sources = tl.arange(0, SOURCES)
    others = ((sources < WORLD) & (sources != rank))[:, None]
    last = _buffer(addresses_ptr, rank, (turn + 2) % 3, third_bytes)
    for first in range(program * BLOCK, before, programs * BLOCK):
        # Whole tiles, which wide stores write, inside a rank's words.
        used = tl.multiple_of(tl.cast(first, tl.int64), 4) + tl.arange(0, BLOCK)
        old = last + sources[:, None] * room + used[None, :]
        tl.store(old, tl.zeros([SOURCES, BLOCK], tl.int32), mask=others & (used < room)[None, :])

    here = _buffer(addresses_ptr, rank, turn, third_bytes)
    found, came = _receive(
        here + sources[:, None] * room + at[None, :], others & inside[None, :], sources, epoch, state_ptr, fault_ptr,
        limit_ns,
    )  # fmt: skip
    found = tl.where((sources == rank)[:, None], own[None, :], tl.where(others, found, 0))
    low, high = _halves(found, DTYPE)
    none = tl.where(came, 0.0, float("nan"))  # makes plus zero of minus zeros
    tl.store(y_ptr + at, _joined(tl.sum(low, 0) + none, tl.sum(high, 0) + none, DTYPE), mask=inside)

    ticket = tl.atomic_add(state_ptr + TICKETS, 1, sem="relaxed", scope="gpu")
    if ticket == programs - 1:
        tl.store(state_ptr + TICKETS, 0)
        tl.store(state_ptr + TURN, (turn + 1) % 3)
        tl.store(state_ptr + BEFORE, tl.full([], words, tl.int64))
        tl.store(state_ptr, next_epoch(epoch))


def takes(x: Tensor) -> bool:
    """Whether x's numbers fill whole words."""
    return x.nbytes % 4 == 0 and x.data_ptr() % 4 == 0


def all_reduce(x: Tensor, y: Tensor, group_name: str, rank: int, world: int) -> None:
    """Writes the sum of x, which this takes, over the ranks into y; both contiguous, of one dtype."""
    words = x.nbytes // 4
    nbytes = 3 * world * 4 * cdiv(words, 4) * 4
    where = channel(group_name, "low_latency/values", cdiv(nbytes, 2), x.device)
    where.enter()
    third = 2 * where.half_bytes // 3 // 16 * 16
    block = max(32, _TILE_WORDS // power_of_two(world))
    early = starts_early(y)
    with on_device(x):
        launch(
            _sum_values_kernel, cdiv(words, block),
            x.view(-1).view(torch.int32), y.view(-1).view(torch.int32), where.memory.addresses, where.state,
            where.fault.tensor, third, timeout_ns(), rank, words, world, power_of_two(world), block,
            triton_dtype(x.dtype), early,
            num_warps=1, **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
