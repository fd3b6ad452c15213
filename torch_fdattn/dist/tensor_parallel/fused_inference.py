"""Fused ops of inference layers: add + RMSNorm, a product with SwiGLU, norms and rotary positions of heads with storing K and V.

Their kernels are those of the tensor-parallel matmuls beside it, and of `ops/gemm`. Where a kernel cannot run (CPUs, other dtypes,
gradients, torch.compile, autocast), torch's own ops compute the same. Sums and norms are rounded where launches of their
own round them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fdattn.ops import swiglu
from torch_fdattn.ops.glu import glu
from torch_fdattn.ops.library import INTERPRET, can_call_kernel
from torch_fdattn.ops.rotary import KVSlots, norm_and_rotate, norm_rotate_and_store, rotate

_DTYPES = (torch.float16, torch.float32) if INTERPRET else swiglu.DTYPES


def swiglu_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``silu(x @ gate.T + b) * (x @ up.T + c)``, the first half of an MLP.

    One launch where that was measured to take less time (`ops/swiglu.py`), without a bias and in 16 bits; else a product
    and a launch of SwiGLU.

    Args:
        x: (…, K).
        weight: (2N, K), gate's rows before up's, in x's dtype.
        bias: (2N,), or None.

    Returns:
        (…, N) in x's dtype.

    Examples:
        >>> swiglu_linear(torch.ones(3, 8), torch.ones(12, 8)).shape
        torch.Size([3, 6])
    """
    if not torch.compiler.is_compiling() and bias is None and (x.is_cuda or INTERPRET):
        sizes = x.shape[:-1].numel(), len(weight) // 2, x.shape[-1]
        if swiglu.is_better_in_product(*sizes):
            from torch_fdattn.ops.gemm import swiglu_gemm  # imports triton

            rows = x.reshape(-1, x.shape[-1]).contiguous()
            if swiglu_gemm.can_launch_directly(rows, weight):
                inner = swiglu_gemm.silu_mul_linear(rows, weight)
                return inner.view(*x.shape[:-1], inner.shape[-1])
    return swiglu.silu_mul(*F.linear(x, weight, bias).chunk(2, -1))


def glu_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """`swiglu_linear`, or with another activation a product and `torch_fdattn.ops.glu.glu`."""
    if activation == "silu":
        return swiglu_linear(x, weight, bias)
    return glu(*F.linear(x, weight, bias).chunk(2, -1), activation)


def add_norm(x: Tensor, residual: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """(added, normed): ``added = residual + x``, ``normed = norm(added)``.

    One launch on a GPU, of an `nn.RMSNorm` with an epsilon, of one dtype and of up to 8192 columns.

    Args:
        x, residual: (…, N).
        norm: any module of (…, N).

    Examples:
        >>> added, normed = add_norm(torch.ones(2, 8), torch.ones(2, 8), nn.RMSNorm(8, 1e-6))
        >>> added[0, 0].item(), round(normed[0, 0].item(), 3)
        (2.0, 1.0)
    """
    kernels = x.is_cuda or INTERPRET  # first: a step on a CPU comes here often
    if (
        kernels
        and type(norm) is nn.RMSNorm
        and norm.eps is not None
        and _fits(x, residual, norm.weight)
    ):
        normed, added = _row_norm().sum_norm(x, None, residual, norm.weight, norm.eps, None)
        return added, normed
    added = residual + x
    return added, norm(added)


def norm_and_rotate_heads(
    q: Tensor, k: Tensor, q_norm: nn.Module, k_norm: nn.Module, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """`torch_fdattn.ops.rotary.norm_and_rotate` of norms given as modules: one launch on a GPU where there are none
    (`nn.Identity`), or both are `nn.RMSNorm` with one epsilon."""
    if (found := _norms_of_kernel(q_norm, k_norm)) is not None:
        return norm_and_rotate(q, k, *found, cos, sin)
    q, k = q_norm(q).transpose(1, 2), k_norm(k).transpose(1, 2)
    return rotate(q, cos, sin), rotate(k, cos, sin)


def rotate_and_append(
    q: Tensor, k: Tensor, v: Tensor, q_norm: nn.Module, k_norm: nn.Module, cos: Tensor, sin: Tensor, layer: int, cache: Any,
) -> Tensor:  # fmt: skip
    """`norm_and_rotate_heads`, and k and v (B, T, K, D) appended to a layer of the cache: turned q (B, H, T, D).

    One launch on a GPU where the cache has `kv_slots`, and it says where the tokens go
    (`torch_fdattn.models.transformer.KVCache`).
    """
    found = _norms_of_kernel(q_norm, k_norm) if q.is_cuda or INTERPRET else None
    if found is not None and hasattr(cache, "kv_slots"):
        to = cache.kv_slots(layer)
        if isinstance(to, KVSlots):
            turned = norm_rotate_and_store(q, k, v, *found, cos, sin, to)
            if turned is not None:
                return turned
    q, k = norm_and_rotate_heads(q, k, q_norm, k_norm, cos, sin)
    cache.append(layer, k, v.transpose(1, 2))
    return q


def _norms_of_kernel(
    q_norm: nn.Module, k_norm: nn.Module
) -> tuple[Tensor | None, Tensor | None, float] | None:
    """The weights and the epsilon of `norm_and_rotate`; None where the modules are other norms than it has."""
    kinds = {type(q_norm), type(k_norm)}
    if kinds == {nn.Identity}:
        return None, None, 0.0
    if kinds == {nn.RMSNorm} and q_norm.eps is not None and q_norm.eps == k_norm.eps:
        return q_norm.weight, k_norm.weight, q_norm.eps
    return None


def _fits(x: Tensor, residual: Tensor, weight: Tensor | None) -> bool:
    if weight is None or torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled():
        return False
    return (
        can_call_kernel(x, residual, weight)
        and x.dtype in _DTYPES
        and x.dtype == residual.dtype == weight.dtype
        and x.device == residual.device == weight.device
        and x.shape == residual.shape
        and weight.shape == x.shape[-1:]
        and _row_norm().takes(x.shape[-1], x.dtype)
    )


@functools.cache
def _row_norm():
    from torch_fdattn.dist.tensor_parallel import row_norm  # imports triton

    return row_norm
