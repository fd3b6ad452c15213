"""The Python entry of attention_fp8, one frame above `torch.ops.fdattn.attention_fp8`.

The default of softcap is the int 0, as in attention's entry.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.ops.attention_fp8.inputs import check_out_dtype
from torch_fdattn.ops.layout import Layout, check_layout
from torch_fdattn.ops.options import window_bounds


def attention_fp8(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor,
    kv_lens: Tensor | None = None, *,
    causal: bool = False, window: tuple[int, int] | None = None, scale: float | None = None,
    softcap: float = 0, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16, layout: Layout = "bhsd",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`attention` of ``q · q_scale``, ``k · k_scale`` and ``v · v_scale``, given in float8_e4m3fn; forward alone.

    An sm_90 multiplies in float8 where head dims are above 32, to 256, and rows are whole 16 bytes: the weights of a row are
    rounded to e4m3 too. Everywhere else (other GPUs, head dims and memory layouts) the inputs are dequantised, which takes
    memory and time, and the result is that of `attention` on them: rounded to out_dtype, on a CPU to float32.

    Args:
        q: queries (B, H, S, D), float8_e4m3fn, any strides; D from 1 to 512.
        k, v: keys and values (B, H_kv, S_kv, D), float8_e4m3fn, any strides; H a multiple of H_kv (GQA, MQA).
        q_scale: float32 (H,) or (B, H), what the numbers of a head are multiplied by: positive and finite, which
            ``TORCH_FDATTN_CHECK=1`` verifies. `quantise_per_head` makes tensors and scales.
        k_scale, v_scale: float32 (H_kv,) or (B, H_kv), likewise.
        kv_lens, causal, window, scale, softcap, alibi_slopes, sinks: as in `attention`. The queries are the last of the
            keys.
        out_dtype: of out: bfloat16 or float16.
        layout: "bshd": q, k, v and out are (B, S, H, D); scales and lse stay as they are.

    Returns:
        out (B, H, S, D) in out_dtype and in q's memory layout, and lse (B, H, S) float32, natural logarithm. A query that sees
        no key has out 0 and lse -inf (or its head's sink).

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.
        NotImplementedError: an argument requires a gradient while grad mode is on, or has a forward-mode tangent.

    Source: FlashAttention-3, arXiv:2407.08608, section 3.3.

    Examples:
        >>> q, k, v = torch.randn(2, 8, 128, 64), torch.randn(2, 2, 128, 64), torch.randn(2, 2, 128, 64)
        >>> q8, q_scale = torch_fdattn.quantise_per_head(q)
        >>> k8, k_scale = torch_fdattn.quantise_per_head(k)
        >>> v8, v_scale = torch_fdattn.quantise_per_head(v)
        >>> out, lse = torch_fdattn.attention_fp8(q8, k8, v8, q_scale, k_scale, v_scale, causal=True)
        >>> out.dtype, out.shape
        (torch.bfloat16, torch.Size([2, 8, 128, 64]))
    """
    left, right = window_bounds(window)
    if scale is not None:
        scale = checks.number("scale", scale)
    tensors = (
        ("q", q), ("k", k), ("v", v), ("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale),
    )  # fmt: skip
    checks.expect_types(tensors, (kv_lens,), scale, softcap, alibi_slopes=alibi_slopes, sinks=sinks)
    checks.expect_bool(causal=causal)
    check_out_dtype(out_dtype)
    check_layout(layout)
    return torch.ops.fdattn.attention_fp8(
        q, k, v, q_scale, k_scale, v_scale, kv_lens, causal=causal, window_left=left, window_right=right,
        scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, out_dtype=out_dtype,
        layout=layout,
    )  # fmt: skip
