"""Scratch memory for where a boolean mask's one row shows keys; imports no triton. What writes it, and why:
`row_ranges_kernel.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.ops.library import INTERPRET

#: Keys from which on a launch more is worth it (docs/notes/attention.md): at 256 it loses up to a fifth.
MIN_KEYS = 1 if INTERPRET else 512


def has_ranges(mask: Tensor | None, q: Tensor, k: Tensor) -> bool:
    """Whether the kernels look for them: a boolean mask with one row a sequence, over keys enough."""
    if mask is None or mask.dtype != torch.bool or k.shape[2] < MIN_KEYS or not q.numel():
        return False
    of_heads_and_queries = zip(mask.shape[-3:-1], mask.stride()[-3:-1], strict=True)
    return not any(size > 1 and step for size, step in of_heads_and_queries)


def empty_ranges(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Unwritten (B, 3) int32, or None where they have none."""
    if not has_ranges(mask, q, k):
        return None
    return torch.empty(q.shape[0], 3, dtype=torch.int32, device=q.device)
