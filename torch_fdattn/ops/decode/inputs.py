"""What decode and paged_decode ask of their inputs; metadata only, the same for real and fake tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import Scores

MAX_QUERY_TOKENS = 16


class WholeLengths(NamedTuple):
    """kv_lens counts the keys of whole sequences, of which the cache holds a shard: local key j is key
    start + (j // block) · stride + j % block, or kv_start + j where kv_start is given. The kernels cut them.
    """

    start: int
    block: int
    stride: int
    most: int  # keys of a whole sequence at most


#: Cache dtypes of one byte, which come with scales.
QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def check_decode(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None, mask: Mask, scale: float,
    options: Scores, whole: WholeLengths | None = None,
) -> None:  # fmt: skip
    """q (B, H, T, D), k (B, H_kv, N, D), v (B, H_kv, N, DV), or pages behind page_table."""
    for name, tensor in (("q", q), ("k_cache", k), ("v_cache", v)):
        checks.expect_4d(name, tensor)
    checks.expect_float("q", q)
    batch, heads, q_len, head_dim = q.shape
    if not 1 <= q_len <= MAX_QUERY_TOKENS:
        raise ValueError(
            f"q must have 1 to {MAX_QUERY_TOKENS} query tokens (dimension 2), got {q_len}; "
            "use attention for longer queries"
        )
    checks.expect_head_dim("q", head_dim, checks.MOST_ATTENTION_DIMS)
    checks.expect_head_dim("v_cache", v.shape[3], checks.MOST_ATTENTION_DIMS)
    rows, kv_heads, slots = k.shape[0] if page_table is not None else batch, k.shape[1], k.shape[2]
    checks.expect_shape("k_cache", k, (rows, kv_heads, slots, head_dim), "q")
    checks.expect_shape("v_cache", v, (rows, kv_heads, slots, v.shape[3]), "k_cache")
    checks.expect_groups(heads, kv_heads, "q", "k_cache")
    for name, cache in (("k_cache", k), ("v_cache", v)):
        if cache.dtype not in QUANTISED:
            checks.expect_dtype(name, cache, q.dtype, "q")
        checks.expect_device(name, cache, q.device, "q")
    checks.expect_dtype("v_cache", v, k.dtype, "k_cache")
    if page_table is not None:
        checks.expect_page_table(page_table, batch, "q's batch", q.device)
        checks.expect_pages("k_cache", slots)
        slots *= page_table.shape[1]
    # Of a shard, whoever knows whole sequences has compared them with a bound that is the same on all ranks: one
    # rank that raised alone, for want of keys, would be waited for by the others.
    checks.check_lengths("kv_lens", mask.kv_lens, q, bound=slots if whole is None else None)
    checks.check_window(mask.window_left, mask.window_right)
    # The position of the last key follows from the length, if that is the whole sequence's.
    masked = whole is None and (
        mask.window_left >= 0 or mask.window_right >= 0 or options.alibi_slopes is not None
    )
    checks.check_positions(
        mask.q_start, mask.kv_start, mask.kv_block, mask.kv_stride, q, slots, masked
    )
    checks.expect_number("scale", scale)
    checks.check_scale(scale)
    checks.check_scores(options.softcap, options.alibi_slopes, options.sinks, q)
    checks.check_attn_mask(options.attn_mask, q, (*q.shape[:3], k.shape[2]))


def expanded_scale(name: str, scale: Tensor | None, cache: Tensor, q: Tensor) -> Tensor | None:
    """A cache's scales as a view of shape cache.shape[:3]."""
    if scale is None:
        return None
    checks.expect_tensor(name, scale)
    if cache.dtype not in QUANTISED:
        raise ValueError(
            f"{name} must be None for an unquantised cache, got one for a cache of {cache.dtype}"
        )
    if scale.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, got {scale.dtype}")
    checks.expect_device(name, scale, q.device, "q")
    try:
        return scale.expand(cache.shape[:3])
    except RuntimeError:
        raise ValueError(
            f"{name} must be broadcastable to {tuple(cache.shape[:3])} like the cache, "
            f"got shape {tuple(scale.shape)}"
        ) from None
