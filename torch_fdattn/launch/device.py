"""The device that a launch goes to: what it has, and made current; imports no triton."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager

import torch

_HERE = contextlib.nullcontext()  # has no state


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device: make it the tensors' own."""
    # Not torch.cuda.current_device, which first looks whether CUDA was initialised: it was, there is a tensor.
    if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
        return torch.cuda.device(device)
    return _HERE


@functools.cache
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; few for the interpreter, an H100's for meta tensors."""
    if device.type != "cuda":
        return 132 if device.type == "meta" else 2
    return torch.cuda.get_device_properties(device).multi_processor_count
