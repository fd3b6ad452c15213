"""Weights in float8 with scales: y = x @ (weight * scale).T, in x's dtype.

Only weights are quantised: a product by BLAS takes them in x's dtype, which one pass makes of them in every call;
`gemm_all_reduce.py`, whose time is what it takes to read them, converts them in registers. No gradients of weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.checks import expect_device, expect_dtype, expect_tensor
from torch_fdattn.ops.library import INTERPRET, can_call_kernel

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)


def check(weight_name: str, weight: Tensor, scale_name: str, scale: Tensor | None) -> None:
    """That a weight (N, K) in float8, and no other, has a scale: float32, of shape (N,) or ().

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if scale is None:
        if weight.dtype in FORMATS:
            raise TypeError(f"{weight_name} in {weight.dtype} needs {scale_name}, got None")
        return
    expect_tensor(scale_name, scale)
    if weight.dtype not in FORMATS:
        raise TypeError(
            f"{scale_name} is for weights in float8_e4m3fn or float8_e5m2, got {weight_name} in {weight.dtype}"
        )
    expect_dtype(scale_name, scale, torch.float32, "scales")
    expect_device(scale_name, scale, weight.device, weight_name)
    if scale.shape not in ((), (weight.shape[0],)):
        raise ValueError(
            f"{scale_name} must have shape () or ({weight.shape[0]},) like {weight_name}'s rows, "
            f"got {tuple(scale.shape)}"
        )
    if torch.is_grad_enabled() and (weight.requires_grad or scale.requires_grad):
        raise ValueError(
            f"{weight_name} in {weight.dtype} and {scale_name} have no gradients: neither may require one"
        )


def columns_of(scale: Tensor, weight: Tensor) -> Tensor:
    """A scale for each row of the weight, (N,)."""
    return scale.expand(weight.shape[0])


def dequantised(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """weight * scale, rounded once to dtype; without a scale the weight itself."""
    if scale is None:
        return weight
    if (weight.is_cuda or INTERPRET) and can_call_kernel(weight, scale) and dtype != torch.float64:
        from torch_fdattn.ops.gemm.dequantise import convert  # Triton is not everywhere

        out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        convert(weight.contiguous(), columns_of(scale, weight), out)
        return out
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (weight.to(wide) * scale.to(wide).expand(weight.shape[0])[:, None]).to(dtype)
