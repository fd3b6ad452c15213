"""What every kernel launch needs: the tensors' device made current, and mask arguments in order."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from torch_fdattn.ops.positions import Mask

# Keeps position + window within int32; no cache is longer.
_FAR = 1 << 30


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device: make it the tensors' own."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()


def mask_pointers(mask: Mask) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return mask.kv_lens, mask.q_start, mask.kv_start


def mask_numbers(mask: Mask) -> tuple[int, int, int, int]:
    """(window_left, window_right, kv_block, kv_stride)."""
    return (min(mask.window_left, _FAR), min(mask.window_right, _FAR), mask.kv_block, mask.kv_stride)


def mask_flags(mask: Mask) -> dict[str, bool]:
    """The compile-time switches that follow from a mask."""
    return {
        "HAS_LEFT": mask.window_left >= 0,
        "HAS_RIGHT": mask.window_right >= 0,
        "STRIPED": mask.kv_block > 0,
    }


def padded(size: int) -> int:
    """The next power of two, at least 16: the smallest side of a tensor-core tile."""
    return max(16, 1 << (size - 1).bit_length())


def wide_rows(*tensors: Tensor) -> bool:
    """Whether a tile of up to 128 rows can span 2**31 elements of one of (B, H, S, D) tensors."""
    return any(tensor.stride(2) >= 1 << 24 for tensor in tensors)
