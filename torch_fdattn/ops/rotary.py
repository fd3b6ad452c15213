"""Rotary position embedding applied to heads, in the half-split layout of Hugging Face checkpoints; with norms of the heads,
and with storing k and v in a paged cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fdattn.ops.append_kv.arguments import QUANTISED
from torch_fdattn.ops.library import INTERPRET, can_call_kernel, launches

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, H, T, D) turned by its positions' angles, returned in x's dtype.

    cos and sin are (B or 1, 1, T, D / 2); in fp32 they make the computation fp32.
    """
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def norm_and_rotate(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """RMSNorm of the heads of q and k, and their rotation by the positions' angles.

    On GPUs and without gradients one kernel in place of some twenty of torch's. It rounds where they do, but not within
    the rotation; its results lie in memory as the projections do. Elsewhere torch's own ops.

    Args:
        q, k: projections (B, T, H, D) and (B, T, K, D).
        q_weight, k_weight: the norms' weights (D,); None: no norms.
        eps: what is added to the mean of squares.
        cos, sin: (B or 1, 1, T, D / 2), fp32.

    Returns:
        (B, H, T, D) and (B, K, T, D), in the dtypes of q and k.
    """
    if not _runs_kernel(q, k, q_weight, k_weight, cos, sin):
        if q_weight is not None:
            q = F.rms_norm(q, q.shape[-1:], q_weight, eps)
        if k_weight is not None:
            k = F.rms_norm(k, k.shape[-1:], k_weight, eps)
        if q.dtype != k.dtype:
            return rotate(q.transpose(1, 2), cos, sin), rotate(k.transpose(1, 2), cos, sin)
        heads = torch.cat((q, k), 2).transpose(
            1, 2
        )  # so few numbers in a step that calls count, not bytes
        return rotate(heads, cos, sin).split((q.shape[2], k.shape[2]), 1)
    from torch_fdattn.ops.rotary_kernel import launch_norm_rotate  # imports triton

    turned_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    turned_k = torch.empty_like(k, memory_format=torch.contiguous_format)
    launch_norm_rotate(q, k, turned_q, turned_k, cos, sin, q_weight, k_weight, eps)
    return turned_q.transpose(1, 2), turned_k.transpose(1, 2)


#: A head's largest absolute value is taken for this where it is smaller, so that its scale is a number to divide by.
SMALLEST_MAXIMUM = 1e-20


class KVSlots(NamedTuple):
    """Where tokens' K and V go in a paged cache of their dtype, or of one byte an element."""

    k_cache: Tensor  # (P, K, page, D), any strides but of D
    v_cache: Tensor  # likewise
    pages: Tensor  # int32 (tokens,), one behind the other; a negative one: nowhere
    slots: Tensor  # int32 (tokens,), in their pages
    # Of one byte an element: fp32 (P, K, page), any strides, written too.
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def norm_rotate_and_store(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor,
    to: KVSlots,
) -> Tensor | None:  # fmt: skip
    """`norm_and_rotate` that stores k, and v (B, T, K, D), in the same launch.

    Returns:
        Turned q (B, H, T, D); None where no kernel can do it, and then nothing is stored.
    """
    if not (_runs_kernel(q, k, q_weight, k_weight, cos, sin) and _can_store(k, v, to)):
        return None
    from torch_fdattn.ops.rotary_kernel import launch_norm_rotate  # imports triton

    launches["norm_rotate_and_store/triton"] += 1
    turned = torch.empty_like(q, memory_format=torch.contiguous_format)
    launch_norm_rotate(q, k, turned, None, cos, sin, q_weight, k_weight, eps, v, to)
    return turned.transpose(1, 2)


def _can_store(k: Tensor, v: Tensor, to: KVSlots) -> bool:
    k_cache, v_cache, pages, slots, *scales = to
    stored, quantised = k_cache.dtype, k_cache.dtype in QUANTISED
    return (
        can_call_kernel(v, *to)
        and all(x is None or x.device == k.device for x in (v, *to))
        and k.dtype == v.dtype
        and (stored == k.dtype or quantised)
        and v_cache.dtype == stored
        and all((x is not None) == quantised for x in scales)
        and all(x is None or x.dtype == torch.float32 for x in scales)
        and all(x is None or x.shape == k_cache.shape[:3] for x in scales)
        and v.shape == k.shape
        and k_cache.shape == v_cache.shape
        and (k_cache.shape[1], k_cache.shape[3]) == k.shape[2:]
        and v.stride(3) == k_cache.stride(3) == v_cache.stride(3) == 1
        and pages.dtype == slots.dtype == torch.int32
        and pages.shape == slots.shape == (k.shape[0] * k.shape[1],)
        and pages.is_contiguous()
        and slots.is_contiguous()
    )


def _runs_kernel(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor
) -> bool:
    return (
        (q.is_cuda or INTERPRET)  # first: a step on a CPU comes here often
        and not torch.compiler.is_compiling()
        and not torch._C._is_any_autocast_enabled()
        and (q_weight is None) == (k_weight is None)
        and can_call_kernel(q, k, cos, sin, q_weight, k_weight)
        and _fits(q, k, q_weight, k_weight, cos, sin)
    )


def _fits(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor
) -> bool:
    dtypes = (torch.float16, torch.float32) if INTERPRET else DTYPES
    batch, tokens, _, dims = q.shape
    of_k, of_cos, strides = k.shape, cos.shape, cos.stride()
    return (
        q.dtype in dtypes
        and all(x is None or x.dtype == q.dtype for x in (k, q_weight, k_weight))
        and all(x is None or x.device == q.device for x in (k, q_weight, k_weight, cos, sin))
        and all(x is None or x.shape == (dims,) for x in (q_weight, k_weight))
        and cos.dtype == sin.dtype == torch.float32
        and (of_k[0], of_k[1], of_k[3]) == (batch, tokens, dims)
        and (of_cos[0] in (1, batch) and of_cos[1:] == (1, tokens, dims // 2))
        and (sin.shape == of_cos and sin.stride() == strides)
        and (q.stride(3) == k.stride(3) == strides[3] == 1)
        and (dims % 2 == 0 and q.numel() > 0 and k.numel() > 0)
    )
