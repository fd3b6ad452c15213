"""Scratch memory for where a boolean mask's one row shows keys; imports no triton. What writes it, and why:
`row_ranges_kernel.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.ops.library import INTERPRET

#: Keys from which on a launch more is worth it (README.md of `attention`): at 256 it loses up to a fifth.
LEAST_KEYS = 1 if INTERPRET else 512


def empty_ranges(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Unwritten (B, 3) int32 for a boolean mask with one row a sequence; None: there is no such mask."""
    if mask is None or mask.dtype != torch.bool or k.shape[2] < LEAST_KEYS or not q.numel():
        return None
    if any(size > 1 and step for size, step in zip(mask.shape[-3:-1], mask.stride()[-3:-1], strict=True)):  # fmt: skip
        return None
    return torch.empty(q.shape[0], 3, dtype=torch.int32, device=q.device)
