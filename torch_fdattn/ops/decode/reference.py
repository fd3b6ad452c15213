"""Decode by explicit formulas: attention over the filled part of a preallocated cache.

The definition is `attention_reference`, over keys and values times their scales. Only the keys beyond the
longest sequence are cut off first, so that a short sequence in a large cache costs what it holds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_fdattn.ops.attention.reference import attention_reference
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import Scores


def decode_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, mask: Mask, scale: float,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, options: Scores | None = None,
    attend: Callable = attention_reference,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out (B, H, T, DV), lse (B, H, T)) in the accumulation dtype; scales (B, H_kv, N).

    attend: what computes attention over the dense keys, in place of the reference.
    """
    longest = _longest(mask, k_cache.shape[2])
    k, v = (
        _dequantised(cache[:, :, :longest], None if x is None else x[:, :, :longest], q)
        for cache, x in ((k_cache, k_scale), (v_cache, v_scale))
    )
    if options is not None and options.attn_mask is not None and options.attn_mask.shape[-1] > 1:
        options = options._replace(attn_mask=options.attn_mask[..., :longest])
    return attend(q, k, v, mask, scale, options)


def paged_decode_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, mask: Mask, scale: float,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, options: Scores | None = None,
    attend: Callable = attention_reference,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As above over pages (P, H_kv, page, D); scales (P, H_kv, page)."""
    k, v, keys_in = gathered(q, k_cache, v_cache, page_table, mask, k_scale, v_scale)
    return attend(q, k, v, mask, scale, options, keys_in)


def gathered(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, mask: Mask, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """k and v (B, H_kv, longest, D) from pages, and keys_in (B, longest), False on pages outside [0, P)."""
    pages, _, page = k_cache.shape[:3]
    longest = _longest(mask, page_table.shape[1] * page)
    ids = page_table[:, : -(-longest // page)].long()
    keys_in = ((ids >= 0) & (ids < pages)).repeat_interleave(page, 1)[:, :longest]
    ids = ids.clamp(0, max(pages - 1, 0))

    def dense(cache: Tensor, scales: Tensor | None) -> Tensor:
        if not pages:
            return q.new_zeros(page_table.shape[0], cache.shape[1], longest, cache.shape[3])
        x = _dequantised(cache[ids], None if scales is None else scales[ids], q)
        return x.transpose(1, 2).flatten(2, 3)[:, :, :longest]

    k, v = dense(k_cache, k_scale), dense(v_cache, v_scale)
    v = v.masked_fill(~keys_in[:, None, :, None], 0.0)  # what stands there may be NaN
    return k, v, keys_in


def _longest(mask: Mask, capacity: int) -> int:
    if mask.kv_lens is None or not mask.kv_lens.numel():
        return capacity
    return min(max(int(mask.kv_lens.max()), 0), capacity)


def _dequantised(cache: Tensor, scales: Tensor | None, q: Tensor) -> Tensor:
    """The cache times its scales (…, N) in the accumulation dtype; unquantised caches as they are."""
    if cache.dtype.itemsize == 1:
        cache = cache.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    return cache if scales is None else cache * scales[..., None]
