"""Which launches may be programmatic dependent ones (`launch/pdl.py`)."""

from __future__ import annotations

from torch import Tensor

from torch_fdattn.launch.pdl import supports_pdl
from torch_fdattn.ops.attention.configs import device_capability


def starts_early(part: Tensor) -> bool:
    """Whether the kernel may be launched before the one that makes `part` has ended (it waits for it)."""
    return part.is_cuda and supports_pdl(device_capability(part.device))
