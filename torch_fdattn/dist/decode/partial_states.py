"""What the strategies have in common: who exchanges, and partial states as rows.

A partial state is the triple of flash decoding, numerator, denominator and maximum, in the form (out, lse):
out = numerator / denominator, lse = maximum + log denominator. It travels as rows of head dim + 1 numbers,
out and lse in one row, in fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class MergeGroup(NamedTuple):
    """The ranks that merge their states, and what each is to end up with."""

    group_name: str
    rank: int
    world_size: int
    head_sharded: bool = (
        False  # each rank its heads / world_size heads in order of ranks, or else all heads
    )
    inner_group: str | None = None
    outer_group: str | None = None


def pack(out: Tensor, lse: Tensor) -> Tensor:
    """out (…, D) and lse (…) as rows (…, D + 1)."""
    return torch.cat([out, lse.unsqueeze(-1)], -1)


def unpack(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(out in `dtype`, lse), both contiguous."""
    out, lse = rows[..., :-1], rows[..., -1]
    return out.to(dtype).contiguous(), lse.contiguous()
