"""`copy_engine`'s reduce-scatter of many rows between two ranks: no pass that sums.

Rows of the other rank are multiplied into this rank's own memory, in two halves. The copy engine of the other rank
fetches each half straight into its result as soon as it is there, and BLAS adds the own rows' product to it (beta 1),
half by half, so that every copy has a product beside it. All products are in the caller's stream: two streams, whose
products fill each other's ends, measured slower here (README.md).

The own product is not rounded before it is added. Of more ranks, parts would have to be summed before BLAS adds the
last one; they are, by a kernel, in `copy_engine.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from torch_fdattn.dist.tp_linear.copies import CHUNKS, Copies, using
from torch_fdattn.ops.library import launches

#: Rows of each rank from which on half of them are enough for a product. Fewer were not measured.
LEAST_ROWS = 2048


def takes(rows: Sequence[int]) -> bool:
    """Whether a call that scatters so many rows to each rank is for this."""
    return len(rows) == 2 and min(rows) >= LEAST_ROWS


def halves(rows: int) -> list[slice]:
    ends = [rows * i // CHUNKS.value for i in range(CHUNKS.value + 1)]
    return [slice(*ends) for ends in pairwise(ends)]


def matmul_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    group_name: str,
    rows: Sequence[int],
    rank: int,
    bias: Tensor | None = None,
) -> Tensor:
    """As `copy_engine.matmul_reduce_scatter`, of what it `takes`."""
    peer, width = 1 - rank, weight.shape[0]
    nbytes = max(rows) * width * x.element_size()
    copies = Copies(group_name, "copy_engine/fetched_scatter", nbytes, x.device, CHUNKS.value)
    launches["tp_linear/copy_engine_reduce_scatter"] += 1
    of_first, of_second = x.split(rows)
    own, theirs = (of_first, of_second) if rank == 0 else (of_second, of_first)
    part, out = copies.data(rank, x.dtype, rows[peer], width), x.new_empty(rows[rank], width)
    copies.fork()
    with using(copies.streams[0]):
        copies.start()
    copies.after_start()
    with copies.until_finished([out]):
        for chunk, half in enumerate(halves(rows[peer])):
            if bias is None:
                torch.mm(theirs[half], weight.t(), out=part[half])
            else:
                torch.addmm(bias, theirs[half], weight.t(), out=part[half])
            copies.follow(None, 1)
            copies.tell(peer, chunk, copies.streams[1])
        for chunk, half in enumerate(halves(rows[rank])):
            with using(copies.streams[0]):
                copies.await_(peer, chunk)
            copies.fetch(out[half], peer, half.start * width)
            copies.lead()
            out[half].addmm_(own[half], weight.t())
        if bias is not None:
            out += bias
    return out
