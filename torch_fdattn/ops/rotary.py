"""Rotary position embedding applied to heads, in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_fdattn.ops.library import INTERPRET, runs_directly
from torch_fdattn.ops.norms import is_plain_norm

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, H, T, D) turned by its positions' angles, returned in x's dtype.

    cos and sin are (B or 1, 1, T, D / 2); in fp32 they make the computation fp32.
    """
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def norm_and_rotate(
    q: Tensor, k: Tensor, q_norm: nn.Module, k_norm: nn.Module, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Projections q (B, T, H, D) and k (B, T, K, D), normed and turned: (B, H, T, D) and (B, K, T, D).

    On GPUs and without gradients one kernel in place of some twenty of torch's. It rounds where they do, but not within
    the rotation; its results lie in memory as the projections do.
    """
    if not _fits(q, k, q_norm, k_norm, cos, sin):
        q, k = q_norm(q).transpose(1, 2), k_norm(k).transpose(1, 2)
        return rotate(q, cos, sin), rotate(k, cos, sin)
    from torch_fdattn.ops.rotary_kernel import launch_norm_rotate  # Triton is not everywhere

    turned_q, turned_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    normed = type(q_norm) is nn.RMSNorm
    weights = (q_norm.weight, k_norm.weight) if normed else (None, None)
    launch_norm_rotate(q, k, turned_q, turned_k, cos, sin, *weights, q_norm.eps if normed else 0.0)
    return turned_q.transpose(1, 2), turned_k.transpose(1, 2)


def _fits(
    q: Tensor, k: Tensor, q_norm: nn.Module, k_norm: nn.Module, cos: Tensor, sin: Tensor
) -> bool:
    dtypes = (torch.float16, torch.float32) if INTERPRET else DTYPES
    return (
        (q.is_cuda or INTERPRET)
        and not torch.compiler.is_compiling()
        and not torch._C._is_any_autocast_enabled()
        and runs_directly(q, k, cos, sin)
        and q.dtype in dtypes
        and k.dtype == q.dtype
        and cos.dtype == sin.dtype == torch.float32
        and _norms_fit(q_norm, k_norm, q.dtype)
        and _shapes_fit(q, k, cos, sin)
    )


def _norms_fit(q_norm: nn.Module, k_norm: nn.Module, dtype: torch.dtype) -> bool:
    if type(q_norm) is nn.Identity and type(k_norm) is nn.Identity:
        return not any(
            hooks for x in (q_norm, k_norm) for hooks in (x._forward_hooks, x._forward_pre_hooks)
        )
    plain = is_plain_norm(q_norm, dtype) and is_plain_norm(k_norm, dtype)
    return plain and q_norm.eps == k_norm.eps and runs_directly(q_norm.weight, k_norm.weight)


def _shapes_fit(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    batch, tokens, _, dims = q.shape
    one, of_k, of_cos, strides = cos.shape[1], k.shape, cos.shape, cos.stride()
    return (
        (of_k[0], of_k[1], of_k[3]) == (batch, tokens, dims)
        and (of_cos[0] in (1, batch) and one == 1 and of_cos[2:] == (tokens, dims // 2))
        and (sin.shape == of_cos and sin.stride() == strides)
        and (q.stride(3) == k.stride(3) == strides[3] == 1)
        and (dims % 2 == 0 and q.numel() > 0 and k.numel() > 0)
    )
