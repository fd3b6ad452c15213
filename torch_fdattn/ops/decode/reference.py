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
    longest = longest_of(mask, k_cache.shape[2])
    if longest < k_cache.shape[2]:
        k_cache, v_cache = k_cache[:, :, :longest], v_cache[:, :, :longest]
        k_scale, v_scale = (None if x is None else x[:, :, :longest] for x in (k_scale, v_scale))
    if q.shape[0] == 1:  # whose length is that of k now
        mask = mask._replace(kv_lens=None)
    k, v = _dequantised(k_cache, k_scale, q), _dequantised(v_cache, v_scale, q)
    entries = None if options is None else options.attn_mask
    if entries is not None and entries.dim() and entries.shape[-1] > 1:
        options = options._replace(attn_mask=entries[..., :longest])
    return attend(q, k, v, mask, scale, options)


def paged_decode_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, mask: Mask, scale: float,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, options: Scores | None = None,
    attend: Callable = attention_reference,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As above over pages (P, H_kv, page, D); scales (P, H_kv, page)."""
    longest = longest_of(mask, page_table.shape[1] * k_cache.shape[2])
    k, v, keys_in = gathered(q, k_cache, v_cache, page_table, longest, k_scale, v_scale)
    return attend(q, k, v, mask, scale, options, keys_in)


def gathered(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, longest: int, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """k and v (B, H_kv, longest, D) from pages, and keys_in (B, longest), False on pages outside [0, P); None: all are in."""
    pages, _, page = k_cache.shape[:3]
    ids = page_table[:, : -(-longest // page)]
    keys_in = None
    if not _all_below(pages, ids):
        keys_in = ((ids >= 0) & (ids < pages)).repeat_interleave(page, 1)[:, :longest]
        ids = ids.clamp(0, max(pages - 1, 0))

    def dense(cache: Tensor, scales: Tensor | None) -> Tensor:
        if not pages:
            return q.new_zeros(page_table.shape[0], cache.shape[1], longest, cache.shape[3])
        x = _pages_in_order(cache, ids)
        x = _dequantised(x, None if scales is None else _pages_in_order(scales, ids), q)
        return x if x.shape[2] == longest else x[:, :, :longest]

    k, v = dense(k_cache, k_scale), dense(v_cache, v_scale)
    if keys_in is not None:
        v = v.masked_fill(~keys_in[:, None, :, None], 0.0)  # what stands there may be NaN
    return k, v, keys_in


def _all_below(bound: int, ids: Tensor) -> bool:
    if not ids.numel():
        return True
    low, high = torch.aminmax(ids)
    return int(low) >= 0 and int(high) < bound


def _pages_in_order(pages: Tensor, ids: Tensor) -> Tensor:
    """(B, H_kv, ids · page, …) of pages (P, H_kv, page, …) and their ids (B, ids)."""
    batch, count = ids.shape
    if batch > 1:
        found = pages.index_select(0, ids.flatten()).unflatten(0, (batch, count))
        return found.transpose(1, 2).flatten(2, 3)
    found = pages.new_empty(pages.shape[1], count, *pages.shape[2:])
    if batch:  # one copy: of many keys, two take longer than attention itself
        torch.index_select(pages, 0, ids[0], out=found.transpose(0, 1))
    return found.flatten(1, 2).expand(batch, -1, *[-1] * (pages.dim() - 2))


def longest_of(mask: Mask, capacity: int) -> int:
    if mask.kv_lens is None or not mask.kv_lens.numel():
        return capacity
    return min(max(int(mask.kv_lens.max()), 0), capacity)


def _dequantised(cache: Tensor, scales: Tensor | None, q: Tensor) -> Tensor:
    """The cache times its scales (…, N) in the accumulation dtype; unquantised caches as they are."""
    if cache.dtype.itemsize == 1:
        cache = cache.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    return cache if scales is None else cache * scales[..., None]
