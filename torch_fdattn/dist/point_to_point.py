"""Tensors from rank to rank, by functional all-to-alls: NCCL and gloo both serve them, and torch.compile traces them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
