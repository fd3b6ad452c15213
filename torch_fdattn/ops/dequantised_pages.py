"""K and V of some pages of a cache of one byte an element, as numbers: for attention that takes no scales."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.ops.append_kv.arguments import QUANTISED
from torch_fdattn.ops.library import INTERPRET, can_call_kernel, launches


def dequantised_pages(
    k_cache: Tensor, v_cache: Tensor, k_scale: Tensor, v_scale: Tensor, pages: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Copies of pages, each element times its scale in fp32, rounded once.

    On GPUs one launch for both. Elsewhere torch's own ops.

    Args:
        k_cache, v_cache: (P, K, page, D), float8_e4m3fn, float8_e5m2 or int8, any strides but of D.
        k_scale, v_scale: fp32 (P, K, page), any strides.
        pages: int32 (n,), any of [0, P), some more than once; a negative one stands for none: its copy means nothing, and
            is finite where the cache is.
        dtype: of the copies.

    Returns:
        k and v (n, K, page, D), heads of a token next to each other where a kernel runs.

    Examples:
        >>> cache, scale = torch.ones(3, 2, 4, 8, dtype=torch.int8), torch.full((3, 2, 4), 0.5)
        >>> pages = torch.tensor([2, 0], dtype=torch.int32)
        >>> k, v = dequantised_pages(cache, cache, scale, scale, pages, torch.float32)
        >>> k.shape, k[0, 0, 0, 0].item()
        (torch.Size([2, 2, 4, 8]), 0.5)
    """
    if not _runs_kernel(k_cache, v_cache, k_scale, v_scale, pages):
        ids = pages.clamp(min=0)
        k, v = (
            (x[ids].float() * scale[ids][..., None]).to(dtype)
            for x, scale in ((k_cache, k_scale), (v_cache, v_scale))
        )
        return k, v
    from torch_fdattn.ops.dequantised_pages_kernel import launch_dequantise_pages  # imports triton

    launches["dequantised_pages/triton"] += 1
    _, heads, page_size, dims = k_cache.shape
    k, v = torch.empty(2, len(pages), page_size, heads, dims, dtype=dtype, device=pages.device)
    launch_dequantise_pages(k_cache, v_cache, k_scale, v_scale, pages, k, v)
    return k.transpose(1, 2), v.transpose(1, 2)


def _runs_kernel(
    k_cache: Tensor, v_cache: Tensor, k_scale: Tensor, v_scale: Tensor, pages: Tensor
) -> bool:
    given = k_cache, v_cache, k_scale, v_scale, pages
    return (
        (pages.is_cuda or INTERPRET)
        and not torch.compiler.is_compiling()
        and can_call_kernel(*given)
        and all(x.device == pages.device for x in given)
        and k_cache.dtype == v_cache.dtype
        and k_cache.dtype in QUANTISED
        and k_cache.shape == v_cache.shape
        and k_scale.shape == v_scale.shape == k_cache.shape[:3]
        and k_scale.dtype == v_scale.dtype == torch.float32
        and k_cache.stride(3) == v_cache.stride(3) == 1
        and (pages.dtype == torch.int32 and pages.is_contiguous() and pages.numel() > 0)
        and k_cache.numel() > 0
    )
