"""Writing to a cache by explicit formulas in torch: the definition, and the CPU kernel.

    slot(b, t)       = kv_lens_b + t,   written where 0 <= slot < capacity and t < new_lens_b
    turned(x)        = (x₁ cos - x₂ sin, x₂ cos + x₁ sin, rest), halves x₁, x₂ of the first rotary_dim elements
    stored(x)        = x in the cache's dtype; quantised: round(x / scale), ties to even, saturated

The angle is that of positions_bt, by default the slot, clamped to the table. One rounding: what is turned in
fp32 (fp64 for fp64 keys) goes to the cache without a stop in k's dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_fdattn.ops.append_kv.arguments import QUANTISED, Append
from torch_fdattn.ops.attention.reference import accumulated
from torch_fdattn.ops.rotary import rotate

#: Tokens in pages that are copied one by one.
FEW_TOKENS = 4


def writer_of(call: Append) -> Callable[[Append], None]:
    """What writes this call and all of its metadata: slices, where tokens are stored as they are, next to each other or few."""
    optional = call.cos, call.k_scale, call.v_scale
    if call.k_cache.dtype in QUANTISED or any(x is not None for x in optional):
        return append_reference
    if call.page_table is None:
        return append_slices
    few = call.k.shape[2] == 1 and call.k.shape[0] <= FEW_TOKENS
    return append_to_slots if few else append_reference


def append_reference(call: Append) -> None:
    """Writes k and v to the caches, and turns q in place."""
    token = torch.arange(call.k.shape[2], device=call.k.device)
    slots = call.kv_lens.long()[:, None] + token
    real = torch.ones_like(slots, dtype=torch.bool)
    if call.new_lens is not None:
        real = token < call.new_lens.long()[:, None]
    k, v = accumulated(call.k), accumulated(call.v)
    if call.cos is not None:
        positions = slots if call.positions is None else call.positions.long()
        angles = [
            table[positions.clamp(0, table.shape[0] - 1)][:, None] for table in (call.cos, call.sin)
        ]
        k = _turned(k, *angles, call.rotary_dim)
        if call.q is not None:
            turned = _turned(accumulated(call.q), *angles, call.rotary_dim).to(call.q.dtype)
            call.q.copy_(torch.where(real[:, None, :, None], turned, call.q))

    inside = real & (slots >= 0) & (slots < call.capacity)
    b, t = inside.nonzero(as_tuple=True)
    row, slot = b, slots[b, t]
    if call.page_table is not None:
        page_size = call.k_cache.shape[2]
        row, slot = call.page_table[b, slot // page_size].long(), slot % page_size
        kept = (row >= 0) & (row < call.k_cache.shape[0])
        b, t, row, slot = b[kept], t[kept], row[kept], slot[kept]
    for cache, x, scale in (
        (call.k_cache, k, call.k_scale), (call.v_cache, v, call.v_scale),
    ):  # fmt: skip
        scales = None if scale is None else scale.expand(cache.shape[:3])[row, :, slot]
        _as_bits(cache)[row, :, slot] = _as_bits(stored(x[b, :, t], scales, cache.dtype))


def append_slices(call: Append) -> None:
    """In order, a copy for each sequence: index tensors cost more than the few tokens that they write."""
    counts = [call.k.shape[2]] * call.k.shape[0]
    if call.new_lens is not None:
        counts = [min(new, most) for new, most in zip(call.new_lens.tolist(), counts, strict=True)]
    for b, (first, count) in enumerate(zip(call.kv_lens.tolist(), counts, strict=True)):
        begin, end = max(first, 0), min(first + count, call.capacity)
        if begin < end:
            for cache, x in ((call.k_cache, call.k), (call.v_cache, call.v)):
                cache[b, :, begin:end] = x[b, :, begin - first : end - first]


def append_to_slots(call: Append) -> None:
    """`append_slices` of a token for each sequence into its page."""
    page_size = call.k_cache.shape[2]
    is_new = [True] * call.k.shape[0] if call.new_lens is None else (call.new_lens > 0).tolist()
    for b, (position, stores) in enumerate(zip(call.kv_lens.tolist(), is_new, strict=True)):
        if not (stores and 0 <= position < call.capacity):
            continue
        page, slot = int(call.page_table[b, position // page_size]), position % page_size
        if 0 <= page < call.k_cache.shape[0]:
            call.k_cache[page, :, slot] = call.k[b, :, 0]
            call.v_cache[page, :, slot] = call.v[b, :, 0]


def stored(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x (…, D) as a cache of this dtype holds it under a scale (…); NaN is 0 in int8."""
    if dtype not in QUANTISED:
        return x.to(dtype)
    if scale is not None:
        x = x / scale[..., None]
    x = x.clamp(-QUANTISED[dtype], QUANTISED[dtype])
    if dtype == torch.int8:
        x = torch.round(x.nan_to_num(0.0))
    return x.to(dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> Tensor:
    return torch.cat((rotate(x[..., :rotary_dim], cos, sin), x[..., rotary_dim:]), -1)


def _as_bits(x: Tensor) -> Tensor:
    """float8 as uint8, since torch does not index it."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
