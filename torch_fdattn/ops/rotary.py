"""Rotary position embedding applied to heads, in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, H, T, D) turned by its positions' angles, returned in x's dtype.

    cos and sin are (B or 1, 1, T, D / 2); in fp32 they make the computation fp32.
    """
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
