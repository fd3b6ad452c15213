"""Which launches may be programmatic dependent ones (`launch/pdl.py`)."""

from __future__ import annotations

from torch import Tensor

from torch_fdattn.launch.pdl import supports_pdl
from torch_fdattn.ops.attention.configs import device_capability


def uses_pdl(tensor: Tensor) -> bool:
    """Whether a kernel that waits for the one before it (`await_previous`) may be launched while that one runs."""
    return tensor.is_cuda and supports_pdl(device_capability(tensor.device))


def pdl_option(pdl: bool) -> dict[str, bool]:
    """The launch option; none where there is no PDL."""
    return {"launch_pdl": True} if pdl else {}
