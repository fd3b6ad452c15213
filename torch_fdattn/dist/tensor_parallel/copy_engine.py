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
from torch import Tensor

from torch_fdattn.dist.groups import rank_and_size
from torch_fdattn.dist.symm.copies import Copies, using
from torch_fdattn.dist.symm.received_sums import sum_received
from torch_fdattn.ops.gemm import persistent_swiglu_gemm
from torch_fdattn.ops.library import launches


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
    copies.begin()
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
            sum_received(copies, own, out)
    return out
