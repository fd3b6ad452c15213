"""`flash_attn_with_kvcache` of FlashAttention-2."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.dropins.flash_attn.arguments import (
    check_qkv,
    expect_rank,
    raises_runtime_errors,
    score_options,
)
from torch_fdattn.dropins.flash_attn.cache import CacheCall, checked_cache, run_over_cache
from torch_fdattn.dropins.flash_attn.functions import unseen_to_inf
from torch_fdattn.dropins.flash_attn.rotation import Rotation


@raises_runtime_errors
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`flash_attn.flash_attn_with_kvcache`: attention over a cache, to which new keys and values are first appended.

    Args:
        q: (B, S, H, D). Up to 16 queries run `decode`, more `attention` or `varlen_attention`.
        k_cache, v_cache: (B_cache, capacity, H_k, D), written in place; with block_table pages (P, page, H_k, D) of any
            size.
        k, v: (B, S_new, H_k, D), what is appended at cache_seqlens. Beyond the capacity tokens are dropped; where lengths
            lie on the host, or under TORCH_FDATTN_CHECK=1, that is an error.
        rotary_cos, rotary_sin: (positions ≥ capacity, rotary_dim / 2) in q's dtype: k turns at its positions in the cache,
            q from cache_seqlens on where causal or a window hides keys, else all of it at cache_seqlens.
        cache_seqlens: an int, or int32 (B,): lengths before the call. None: the cache is full.
        cache_batch_idx: int32 (B,), the rows of the cache. Default: the first B. Not with block_table.
        cache_leftpad: int32 (B,): keys before it are hidden. Not with block_table.
        block_table: int32 (B, pages a sequence).
        rotary_interleaved: pairs are dims 0 and 1, 2 and 3, …; else dims i and i + rotary_dim / 2.
        num_splits: changes no result and is ours to choose: the splits of `decode` follow from shapes.
        return_softmax_lse: also lse.

    The other arguments and the errors are those of `flash_attn_func`.

    Returns:
        out (B, S, H, D), or (out, lse) with lse float32 (B, H, S). No gradient: a backward raises.

    Source: flash_attn_interface.py of FlashAttention 2.8.

    Examples:
        >>> from torch_fdattn.dropins.flash_attn import flash_attn_with_kvcache
        >>> k_cache, v_cache = torch.zeros(2, 2, 64, 2, 16)
        >>> k, v = torch.randn(2, 2, 1, 2, 16)
        >>> out = flash_attn_with_kvcache(torch.randn(2, 1, 8, 16), k_cache, v_cache, k, v, cache_seqlens=10, causal=True)
        >>> out.shape, torch.equal(k_cache[:, 10], k[:, 0])
        (torch.Size([2, 1, 8, 16]), True)
    """
    checks.expect_int64(num_splits=num_splits)
    checks.expect_bool(return_softmax_lse=return_softmax_lse)
    expect_rank("q", q, 4)
    check_qkv(q, k_cache, v_cache, names=("q", "k_cache", "v_cache"))
    for name, given in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
        if block_table is not None and given is not None:  # as FlashAttention-2 refuses them
            raise NotImplementedError(f"{name} must be None with block_table, got a tensor")
    where = cache_seqlens, cache_batch_idx, cache_leftpad, block_table, "block_table"
    cache = checked_cache(q, q.shape[0], k_cache, v_cache, *where)
    scores = softmax_scale, causal, window_size, softcap, alibi_slopes
    options = score_options(q, q.shape[0], *scores)
    rotation = Rotation(rotary_cos, rotary_sin, rotary_interleaved)
    out, lse = run_over_cache(CacheCall(q, cache, k, v, rotation, options))
    return (out, unseen_to_inf(lse)) if return_softmax_lse else out
