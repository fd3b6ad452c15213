"""Rotary position embedding applied to heads, in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torch_fdattn.ops.library import INTERPRET, runs_directly
from torch_fdattn.ops.norms import is_hooked, plain_weight
from torch_fdattn.ops.repeated_call import again, find, learn, metadata

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
    weights = _norms(q_norm, k_norm, q, k, cos, sin)
    key = weights and ("norm_and_rotate", *metadata(q, k, cos, sin, *weights[:2]), weights[2])
    known = find(key)
    if key is None or not (known or _fits(q, k, *weights[:2], cos, sin)):
        q, k = q_norm(q).transpose(1, 2), k_norm(k).transpose(1, 2)
        return rotate(q, cos, sin), rotate(k, cos, sin)
    turned_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    turned_k = torch.empty_like(k, memory_format=torch.contiguous_format)
    tensors = q, k, turned_q, turned_k, cos, sin, *weights[:2]
    if not again(known, tensors):
        from torch_fdattn.ops.rotary_kernel import launch_norm_rotate  # Triton is not everywhere

        learn(key, tensors, lambda: launch_norm_rotate(*tensors, weights[2]))
    return turned_q.transpose(1, 2), turned_k.transpose(1, 2)


def _norms(
    q_norm: nn.Module, k_norm: nn.Module, *tensors: Tensor
) -> tuple[Tensor | None, Tensor | None, float] | None:
    """(q's weight, k's weight, epsilon) where nobody sees the norms or what comes behind them; None: somebody may."""
    if torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled():
        return None
    if type(q_norm) is nn.Identity and type(k_norm) is nn.Identity:
        weights, eps = (None, None), 0.0
        plain = not (is_hooked(q_norm) or is_hooked(k_norm))
    else:
        weights, eps = (plain_weight(q_norm), plain_weight(k_norm)), getattr(q_norm, "eps", None)
        plain = weights[0] is not None and weights[1] is not None and eps == k_norm.eps
    return (*weights, eps) if plain and runs_directly(*tensors, *weights) else None


def _fits(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor
) -> bool:
    dtypes = (torch.float16, torch.float32) if INTERPRET else DTYPES
    batch, tokens, _, dims = q.shape
    of_k, of_cos, strides = k.shape, cos.shape, cos.stride()
    return (
        (q.is_cuda or INTERPRET)
        and q.dtype in dtypes
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
