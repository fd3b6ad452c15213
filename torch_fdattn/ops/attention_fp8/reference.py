"""The definition: how tensors become float8_e4m3fn with scales, and what numbers such tensors stand for.

stored = round(x / scale),  scale = max |x| of a head / 448
attention_fp8(q, k, v, q_scale, k_scale, v_scale) = attention(q · q_scale, k · k_scale, v · v_scale)
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.ops.append_kv.arguments import QUANTISED
from torch_fdattn.ops.append_kv.reference import stored
from torch_fdattn.ops.layout import Layout, to_bhsd

FORMAT = torch.float8_e4m3fn


def quantise_per_head(x: Tensor, *, layout: Layout = "bhsd") -> tuple[Tensor, Tensor]:
    """x in float8_e4m3fn with a scale for each head of each sequence, as `attention_fp8` takes both.

    Args:
        x: (B, H, S, D), bfloat16, float16, float32 or float64, any strides. What stands beyond a sequence's
            length counts for its scale too: fill padding with zeros, not with NaN or large numbers. Numbers must be
            finite in float32: an infinity makes its whole head NaN.
        layout: "bshd": x and what is returned are (B, S, H, D); the scale is the same.

    Returns:
        x / scale, rounded to nearest, ties to even, in float8_e4m3fn and in x's order of memory; and scale (B, H), float32:
        the largest |x| of the head / 448, or 1 where that is 0.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.

    Examples:
        >>> x = torch.randn(2, 4, 16, 64)
        >>> stored, scale = torch_fdattn.quantise_per_head(x)
        >>> stored.dtype, scale.shape
        (torch.float8_e4m3fn, torch.Size([2, 4]))
        >>> torch.allclose(stored.float() * scale[..., None, None], x, rtol=2**-4, atol=1e-4)
        True
    """
    (by_head,) = to_bhsd(layout, x=x) if layout != "bhsd" else (x,)
    checks.expect_4d("x", by_head)
    checks.expect_float("x", by_head)
    largest = by_head.new_zeros(by_head.shape[:2])
    if by_head.shape[2] and by_head.shape[3]:
        largest = by_head.abs().amax((2, 3))
    scale = largest.float() / QUANTISED[FORMAT]
    scale = torch.where(scale == 0, 1.0, scale)  # NaN stays
    rounded = stored(by_head, scale[..., None], FORMAT)
    return rounded if layout == "bhsd" else rounded.transpose(1, 2), scale


def dequantised(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x · scale, rounded once to dtype, in x's order of memory; scale float32 (heads,) or (batch, heads)."""
    exact = x.to(dtype)  # which bfloat16, float16 and float32 hold as it is
    out = torch.empty_like(x, dtype=dtype)
    return torch.mul(exact, scale[..., None, None], out=out)
