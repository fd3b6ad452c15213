"""Tensors from rank to rank, by functional all-to-alls: NCCL and gloo both serve them, and torch.compile traces them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fdattn.dist.groups import is_traced


def all_to_all(
    parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], group_name: str
) -> list[Tensor]:
    """parts[r] goes to rank r; from rank r comes a tensor of shapes[r]."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.cat([part.flatten() for part in parts])
    received = torch.ops._c10d_functional.all_to_all_single(
        flat, sizes, [part.numel() for part in parts], group_name
    )
    received = torch.ops._c10d_functional.wait_tensor(received)
    return [x.view(shape) for x, shape in zip(received.split(sizes), shapes, strict=True)]


def with_dependency(x: Tensor, *others: Tensor | None) -> Tensor:
    """x, which in a graph depends on the other tensors too.

    A graph's backward drops collectives whose result nothing in it reads: of those that it runs again for a checkpoint, those
    of a block whose keys this rank's mask hides, say. The ranks whose masks do not hide theirs would then pair them with this
    rank's next collective, and compute with its data. So what a strategy returns, and what it sends in its backward, depends
    on all that it received. Nothing is read, and x keeps its values.
    """
    given = [other for other in others if other is not None]
    if not is_traced(x):
        return x
    # Rows of no indices, and not an empty slice: in a backward the indices depend on gradients, so that the rows cannot be
    # taken in the forward and kept, in place of the collective.
    indices = torch.cat([each[:0].flatten().long() for each in (x, *given)])
    return x + sum(each.index_select(0, indices).sum().to(x.dtype) for each in given)


def send_to_next(
    x: Tensor, shape: Sequence[int], rank: int, world_size: int, group_name: str
) -> Tensor:
    """x goes to the next rank; returns what the previous rank sent, of `shape`."""
    target, source = (rank + 1) % world_size, (rank - 1) % world_size
    nothing = x[:0]
    return all_to_all(
        [x if r == target else nothing for r in range(world_size)],
        [shape if r == source else nothing.shape for r in range(world_size)],
        group_name,
    )[source]
