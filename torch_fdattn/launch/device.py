"""The device that a launch goes to; imports no triton."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch

_HERE = contextlib.nullcontext()  # has no state


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device: make it the tensors' own."""
    # Not torch.cuda.current_device, which first looks whether CUDA was initialised: it was, there is a tensor.
    if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
        return torch.cuda.device(device)
    return _HERE
