"""Which norms a kernel of ours may compute in their stead."""

from __future__ import annotations

import torch
from torch import nn


def is_plain_norm(norm: nn.Module, *dtypes: torch.dtype) -> bool:
    """Whether it is RMSNorm with a weight, of these dtypes, and nothing around it."""
    return (
        type(norm) is nn.RMSNorm
        and norm.weight is not None
        and norm.eps is not None
        and not (norm._forward_hooks or norm._forward_pre_hooks)
        and all(norm.weight.dtype == dtype for dtype in dtypes)
    )
