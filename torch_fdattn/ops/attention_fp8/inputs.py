"""What attention_fp8 asks of its inputs, metadata only: what attention does, and dtypes and scales."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torch_fdattn import checks
from torch_fdattn.ops import library
from torch_fdattn.ops.attention.inputs import NAMES, check_inputs
from torch_fdattn.ops.options import AttentionOptions

OUT_DTYPES = (torch.bfloat16, torch.float16)


def check_fp8_inputs(
    q: Tensor, k: Tensor, v: Tensor, scales: tuple[Tensor, Tensor, Tensor], options: AttentionOptions
) -> None:  # fmt: skip
    """scales: of q, k and v, in this order."""
    check_out_dtype(options.dtype)
    for name, tensor in zip(NAMES, (q, k, v), strict=True):
        expect_e4m3(name, tensor)
    check_inputs(q, k, v, options, float8=True)
    if v.shape[3] != k.shape[3]:
        raise ValueError(
            f"v's head_dim must be k's, {k.shape[3]}, got {v.shape[3]}; attention takes a v of another one"
        )
    for name, tensor, scale in zip(NAMES, (q, k, v), scales, strict=True):
        _check_scale(f"{name}_scale", scale, name, tensor)


def check_out_dtype(dtype: object) -> None:
    if dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype must be torch.bfloat16 or torch.float16, got {dtype!r}")


def expect_e4m3(name: str, tensor: Tensor) -> None:
    checks.expect_tensor(name, tensor)
    if tensor.dtype != torch.float8_e4m3fn:
        raise TypeError(
            f"{name} must be torch.float8_e4m3fn, got {tensor.dtype}; quantise what it is in bfloat16, float16 or "
            f"float32: {name}, {name}_scale = torch_fdattn.quantise_per_head({name})"
        )


def _check_scale(name: str, scale: Tensor, of: str, tensor: Tensor) -> None:
    """Of one of q, k and v, `of` its name."""
    checks.expect_tensor(name, scale)
    if scale.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, got {scale.dtype}; {name}.float() is")
    batch, heads = tensor.shape[:2]
    if scale.shape != ((heads,) if scale.dim() == 1 else (batch, heads)):
        one = f"; one number for all heads is given as {name}.expand({heads})" if scale.numel() == 1 and scale.dim() < 2 else ""  # fmt: skip
        raise ValueError(
            f"{name} must have shape ({heads},) or ({batch}, {heads}) like {of}'s heads, got {tuple(scale.shape)}{one}"
        )
    checks.expect_device(name, scale, tensor.device, of)
    if checks.readable(scale):
        low, high = (float(x) for x in torch.aminmax(scale))
        if not (low > 0 and high < float("inf")):
            raise ValueError(f"{name} must be positive and finite, got values from {low} to {high}")


def refuse_derivatives(**tensors: Tensor | None) -> None:
    """Of all that could ask for one; in torch.func's transforms too."""
    for name, tensor in tensors.items():
        told = f"attention_fp8 is forward only, and {name}"
        if torch.is_grad_enabled() and library.requires_grad(tensor):
            raise NotImplementedError(
                f"{told} requires a gradient: call it under torch.no_grad() or give {name}.detach(); "
                "torch_fdattn.attention has derivatives"
            )
        if forward_ad._current_level >= 0 and library.has_tangent(tensor):
            raise NotImplementedError(
                f"{told} has a tangent (torch.func.jvp, torch.autograd.forward_ad): give it without; "
                "torch_fdattn.attention has derivatives"
            )
