"""Strategy `copy_engine`: chunks travel by the copy engines while BLAS multiplies what is there.

The copies take no SM, and the products are the device's BLAS (with SwiGLU `persistent_swiglu_gemm.py`) on whole chunks (a
rank's rows): what it costs is what is lost where a product is cut. Products alternate between two streams, so that one
begins where the other leaves SMs idle. Own rows first when gathering, last when scattering: all copies then have
a product to overlap with.
What is sent comes first also in a graph, which has no order but what is waited for: gathering begins with the kernel
that waits for free memory, which would find every SM taken by a product, and scattering lets the own rows wait for it. An
eager gather begins with the product of the own rows, during which the host prepares the rest.
Rows may differ between ranks. For many rows; a few small kernels are launched around every chunk.

Reduce-scatter: partial products are rounded to the dtype, travel, and are summed in fp32 in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.groups import rank_and_size
from torch_fdattn.dist.symm.copies import Copies, finish, using
from torch_fdattn.dist.symm.faults import timeout_ns
from torch_fdattn.dist.symm.signals import TICKETS, as_int64, await_flag, read_epoch
from torch_fdattn.launch.device import num_sms
from torch_fdattn.launch.launches import launch
from torch_fdattn.ops.gemm import persistent_swiglu_gemm
from torch_fdattn.ops.launch import cdiv
from torch_fdattn.ops.library import launches

#: Elements that a program of four warps sums at a time, and its programs an SM: each of them polls the flags.
_BLOCK = 2048
_PROGRAMS = 8


def starts(rows: Sequence[int]) -> list[int]:
    """The first row of each rank."""
    return [sum(rows[:rank]) for rank in range(len(rows))]


def send_rows(copies: Copies, x: Tensor, rows: Sequence[int]) -> None:
    """Every rank's rows to all others: each receives those of the next rank first, one rank's at a time."""
    for i in range(1, copies.world):
        peer = (copies.rank - i) % copies.world
        copies.send(x, peer, starts(rows)[copies.rank] * x.shape[1])


def gathering(x: Tensor, group_name: str, rows: Sequence[int], purpose: str) -> tuple[Copies, Tensor]:  # fmt: skip
    """(the copies of a call, where the rows of others arrive (sum(rows), K))."""
    shape = (sum(rows), x.shape[1])
    copies = Copies(group_name, purpose, shape[0] * shape[1] * x.element_size(), x.device)
    return copies, copies.data(copies.rank, x.dtype, *shape)


def keep_rows(copies: Copies, gathered: Tensor, x: Tensor, first: int, kept: Tensor) -> None:
    """Writes what was gathered into `kept`, with the own rows x, which nobody sent, from row `first` on."""
    copies.join()
    kept.copy_(gathered)
    kept[first : first + len(x)] = x


def all_gather_matmul(
    x: Tensor, weights: Sequence[Tensor], group_name: str, rows: Sequence[int], keep: bool, gated: bool = False
) -> list[Tensor]:  # fmt: skip
    """[y_i (sum(rows), N_i)], and then, to `keep`, the gathered x; x contiguous.

    gated: y_i (sum(rows), N_i / 2), by `persistent_swiglu_gemm.py`."""
    copies, gathered = gathering(x, group_name, rows, "copy_engine/all_gather")
    rank, world, first = copies.rank, copies.world, starts(rows)
    launches["tensor_parallel/copy_engine_all_gather"] += 1
    ys = [x.new_empty(len(gathered), weight.shape[0] // (1 + gated)) for weight in weights]

    def multiply(chunk: Tensor, source: int) -> None:
        own = slice(first[source], first[source] + rows[source])
        for weight, y in zip(weights, ys, strict=True):
            if not gated:
                torch.mm(chunk, weight.t(), out=y[own])
            elif len(chunk):
                persistent_swiglu_gemm.silu_mul_linear(chunk, weight, y[own])

    found = [*ys, torch.empty_like(gathered)] if keep else ys
    at_once = x.is_cuda and not torch.cuda.is_current_stream_capturing()
    if not at_once:
        copies.start()
    copies.mark()
    with copies.until_finished(found):
        if at_once:
            try:
                multiply(x, rank)
            finally:  # others wait for these rows
                copies.fork()
                with using(copies.streams[0]):
                    copies.start()
                copies.after_start()  # what finishes the call is to come behind it
                send_rows(copies, x, rows)
        else:
            copies.fork()
            send_rows(copies, x, rows)
            multiply(x, rank)
        for i in range(1, world):
            source = (rank + i) % world
            with using(copies.streams[1] if i % 2 else None):
                copies.await_(source)
                multiply(gathered[first[source] : first[source] + rows[source]], source)
        if keep:
            keep_rows(copies, gathered, x, first[rank], found[-1])
    return found


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

    The last program to be done finishes the call (`copies.py`).
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


def matmul_reduce_scatter(
    x: Tensor, weight: Tensor, group_name: str, rows: Sequence[int], bias: Tensor | None = None
) -> Tensor:
    """This rank's rows (rows[rank], N) of the sum over ranks of x (M, K) @ weight (N, K).T + bias (N,)."""
    rank, world = rank_and_size(group_name)
    width, first = weight.shape[0], starts(rows)
    nbytes = world * max(rows) * width * x.element_size()
    copies = Copies(group_name, "copy_engine/reduce_scatter", nbytes, x.device)
    launches["tensor_parallel/copy_engine_reduce_scatter"] += 1
    partial, out = x.new_empty(len(x), width), x.new_empty(rows[rank], width)
    copies.mark()
    copies.fork()
    with using(copies.streams[0]):
        copies.start()
    copies.after_start()
    with copies.until_finished([out]):
        for i in range(1, world + 1):
            owner = (rank + i) % world
            chunk = slice(first[owner], first[owner] + rows[owner])
            stream = copies.streams[1] if i % 2 else None
            with using(stream):
                if bias is None:
                    torch.mm(x[chunk], weight.t(), out=partial[chunk])
                else:
                    torch.addmm(bias, x[chunk], weight.t(), out=partial[chunk])
            if owner != rank:
                copies.follow(stream)
                copies.send(partial[chunk], owner, rank * rows[owner] * width)
        copies.join_products()
        if out.numel():
            own = partial[first[rank] : first[rank] + rows[rank]]
            parts = copies.data(rank, x.dtype, world, rows[rank], width)
            programs = min(cdiv(out.numel(), _BLOCK), _PROGRAMS * num_sms(x.device))
            launch(
                _sum_kernel, programs,
                own, parts, out, *copies.device_side, timeout_ns(), rank, out.numel(), world,
                copies.sources, _BLOCK, num_warps=4,
            )  # fmt: skip
            copies.finished = True
    return out
