"""Rotary positions of what joins a cache, in torch: pairs of neighbouring dims, or of halves."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.ops.attention.reference import accumulated


class Rotation(NamedTuple):
    """cos and sin (positions, rotary_dim / 2), both None for none; which dims are a pair."""

    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool
    first: Tensor | None = (
        None  # int32 (B,), positions of the first new tokens; None: the cache's lengths
    )


def check_rotation(rotation: Rotation, q: Tensor, capacity: int, appends: bool) -> None:
    cos, sin, interleaved, _ = rotation
    if cos is None and sin is None:
        return
    for name, table, other in (("rotary_cos", cos, "rotary_sin"), ("rotary_sin", sin, "rotary_cos")):  # fmt: skip
        if table is None:
            raise ValueError(f"{name} must be given where {other} is, got None")
        checks.expect_tensor(name, table)
        checks.expect_dtype(name, table, q.dtype, "q")
        checks.expect_device(name, table, q.device, "q")
    checks.expect_bool(rotary_interleaved=interleaved)
    if cos.dim() != 2 or not 2 <= 2 * cos.shape[1] <= q.shape[-1]:
        raise ValueError(
            "rotary_cos must have shape (positions, rotary_dim / 2) with rotary_dim from 2 to q's head_dim "
            f"{q.shape[-1]}, got {tuple(cos.shape)}"
        )
    checks.expect_shape("rotary_sin", sin, tuple(cos.shape), "rotary_cos")
    if cos.shape[0] < capacity:
        raise ValueError(
            f"rotary_cos must have a row for each of the cache's {capacity} positions, got {cos.shape[0]}"
        )
    if not appends:
        raise ValueError("k and v must be given where rotary_cos and rotary_sin are, got None")


def rotate_at(x: Tensor, rotation: Rotation, positions: Tensor) -> Tensor:
    """x (…, H, D) turned by the angles of positions (…), in fp32 (fp64 for fp64), and rounded to x's dtype."""
    rows = positions.long().clamp(0, rotation.cos.shape[0] - 1)
    cos, sin = (accumulated(table[rows])[..., None, :] for table in rotation[:2])
    dims = 2 * cos.shape[-1]
    turning = accumulated(x[..., :dims])
    if rotation.interleaved:
        first, second = turning.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = turning.chunk(2, -1)
    turned = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(turned, -1).flatten(-2) if rotation.interleaved else torch.cat(turned, -1)
    return torch.cat((turned.to(x.dtype), x[..., dims:]), -1)
