"""Which norms a kernel of ours may compute in their stead."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules import module as _of_all


def is_plain_norm(norm: nn.Module, *dtypes: torch.dtype) -> bool:
    """Whether it is RMSNorm with a weight, of these dtypes, and nothing around it."""
    return (
        type(norm) is nn.RMSNorm
        and norm.weight is not None
        and norm.eps is not None
        and not is_hooked(norm)
        and all(norm.weight.dtype == dtype for dtype in dtypes)
    )


def is_hooked(module: nn.Module) -> bool:
    """Whether hooks see, or change, what goes in or comes out of its forward: its own, those of all modules, or
    another forward in the place of its class's, as accelerate puts it there."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or _of_all._global_forward_hooks
        or _of_all._global_forward_pre_hooks
        or "forward" in vars(module)
    )
