"""Which norms a kernel of ours may compute in their stead."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules import module as _of_all


def plain_weight(norm: nn.Module, *dtypes: torch.dtype) -> torch.Tensor | None:
    """The weight of an RMSNorm with an epsilon and nothing around it, where it is of these dtypes; else None."""
    if type(norm) is not nn.RMSNorm or norm.eps is None or is_hooked(norm):
        return None
    weight = norm._parameters.get("weight")  # past nn.Module.__getattr__, which takes the host 1 µs
    return None if weight is None or any(weight.dtype != x for x in dtypes) else weight


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
