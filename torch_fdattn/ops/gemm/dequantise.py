"""The kernel that makes 16 or 32 bits of weights in float8 (`float8.py`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.launch.launches import launch
from torch_fdattn.ops.attention.configs import device_capability
from torch_fdattn.ops.decode.configs import E4M3_CAPABILITY
from torch_fdattn.ops.decode.one_byte import unquantised
from torch_fdattn.ops.launch import cdiv

#: Weights that a program converts.
_BLOCK = 2048


def as_bytes(weight: Tensor) -> bool:
    """Whether kernels take it apart: the device has no conversion of float8_e4m3fn."""
    return (
        weight.dtype == torch.float8_e4m3fn
        and weight.is_cuda
        and device_capability(weight.device) < E4M3_CAPABILITY
    )


@triton.jit
def _dequantise_kernel(w_ptr, scale_ptr, out_ptr, scale_stride, k, BLOCK: tl.constexpr):
    """w (n, k), contiguous, scale by scale_stride -> out (n, k)."""
    blocks = tl.cdiv(k, BLOCK)
    row = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * k + column
    w = unquantised(tl.load(w_ptr + at, mask=column < k), tl.float32)
    w *= tl.load(scale_ptr + row * scale_stride)
    tl.store(out_ptr + at, w.to(out_ptr.dtype.element_ty), mask=column < k)


def convert(weight: Tensor, scale: Tensor, out: Tensor) -> None:
    """Writes weight (N, K) * scale (N,) into out; both contiguous."""
    if as_bytes(weight):
        weight = weight.view(torch.uint8)
    if out.numel():
        launch(
            _dequantise_kernel, len(weight) * cdiv(weight.shape[1], _BLOCK),
            weight, scale, out, scale.stride(0), weight.shape[1], _BLOCK, num_warps=4,
        )  # fmt: skip
