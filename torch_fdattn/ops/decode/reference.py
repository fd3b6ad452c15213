"""Decode by explicit formulas: attention over the filled part of a preallocated cache.

The definition is `attention_reference`; only the keys beyond the longest sequence are cut off first,
so that a short sequence in a large cache costs what it holds.
"""

from __future__ import annotations

from torch import Tensor

from torch_fdattn.ops.attention.reference import attention_reference
from torch_fdattn.ops.positions import Mask


def decode_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, mask: Mask, scale: float
) -> tuple[Tensor, Tensor]:
    """(out (B, H, T, D), lse (B, H, T)) in the accumulation dtype."""
    if mask.kv_lens is not None and mask.kv_lens.numel():
        longest = min(max(int(mask.kv_lens.max()), 0), k_cache.shape[2])
        k_cache, v_cache = k_cache[:, :, :longest], v_cache[:, :, :longest]
    return attention_reference(q, k_cache, v_cache, mask, scale)
