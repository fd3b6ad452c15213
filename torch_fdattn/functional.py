"""The Python entries of the ops: keywords with defaults, one frame above `torch.ops.fdattn`."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from torch_fdattn import checks


def attention(
    q: Tensor, k: Tensor, v: Tensor, kv_lens: Tensor | None = None, *,
    causal: bool = False, window: tuple[int, int] | None = None, scale: float | None = None,
    q_start: Tensor | None = None, kv_start: Tensor | None = None,
    kv_block: int = 0, kv_stride: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Softmax attention with its log-sum-exp: ``softmax(scale · q kᵀ + mask) v``.

    Args:
        q: queries (B, H, S, D), bfloat16, float16 or float32 (float64 on the CPU), any strides;
            D a multiple of 8 from 16 to 256.
        k, v: keys and values (B, H_kv, S_kv, D), H a multiple of H_kv (GQA, MQA), any strides.
        kv_lens: int32 (B,) on q's device; how many keys of each sequence are valid, clamped to
            [0, S_kv]. None: all.
        causal: a query sees keys up to its own position.
        window: (left, right): a query at position p sees keys at p - left … p + right; -1 is unbounded.
        scale: of the scores; default D ** -0.5. Positive.
        q_start: int32 (B,), position of the first query. Default: the queries are the last of the
            keys (bottom-right alignment).
        kv_start: int32 (B,), position of the first key. Default 0.
        kv_block, kv_stride: key j stands at ``kv_start + (j // kv_block) · kv_stride + j % kv_block``,
            the position map of a cache sharded round-robin; 0: contiguous.

    Returns:
        out (B, H, S, D) in q's dtype and memory layout, and lse (B, H, S) float32 (float64 for float64 inputs), natural
        logarithm.
        A query that sees no key has out 0 and lse -inf. Both are differentiable in q, k and v.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.

    Source: FlashAttention-2, arXiv:2307.08691.
    """
    left, right = window_bounds(window)
    checks.expect_types((("q", q), ("k", k), ("v", v)), (kv_lens, q_start, kv_start), scale)
    return torch.ops.fdattn.attention(
        q, k, v, kv_lens, q_start, kv_start, causal=causal, window_left=left, window_right=right,
        kv_block=kv_block, kv_stride=kv_stride, scale=scale,
    )  # fmt: skip


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_lens: Tensor | None = None, *,
    causal: bool = True, window: tuple[int, int] | None = None, scale: float | None = None,
    q_start: Tensor | None = None, kv_start: Tensor | None = None,
    kv_block: int = 0, kv_stride: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of 1 to 16 new tokens a sequence over its preallocated cache.

    Args:
        q: queries (B, H, T, D), 1 <= T <= 16: by default the last T of the valid keys.
        k_cache, v_cache: (B, H_kv, capacity, D), taken as they are: slices and permuted views of a
            larger buffer are not copied.
        kv_lens: int32 (B,) on q's device: valid keys of each sequence, the T new ones included.

    The other arguments, the results and the errors are those of `attention`.

    Source: Flash-Decoding (split KV), with GQA groups packed into one tile.
    """
    left, right = window_bounds(window)
    tensors = ("q", q), ("k_cache", k_cache), ("v_cache", v_cache)
    checks.expect_types(tensors, (kv_lens, q_start, kv_start), scale)
    return torch.ops.fdattn.decode(
        q, k_cache, v_cache, kv_lens, q_start, kv_start, causal=causal, window_left=left,
        window_right=right, kv_block=kv_block, kv_stride=kv_stride, scale=scale,
    )  # fmt: skip


def merge_states(
    outs: Tensor, lses: Tensor, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over a union of disjoint key sets from the partial results.

    Args:
        outs: (N, B, H, S, D) partial outputs, each normalised over its own keys.
        lses: (N, B, H, S) float32 natural log-sum-exp of each part, -inf where a part saw no key (its
            outs are then ignored, whatever they hold).
        dtype: of the merged output; default outs' dtype.

    Returns:
        out (B, H, S, D) and lse (B, H, S) float32 (float64 like lses); 0 and -inf where no part saw a key. Differentiable.

    Source: arXiv:2501.01005, section 2.2.
    """
    checks.expect_types((("outs", outs), ("lses", lses)))
    return torch.ops.fdattn.merge_states(outs, lses, dtype=dtype)


def window_bounds(window: tuple[int, int] | None) -> tuple[int, int]:
    if window is None:
        return -1, -1
    try:
        left, right = window
        return operator.index(left), operator.index(right)
    except (TypeError, ValueError):
        raise TypeError(f"window must be two ints (left, right) or None, got {window!r}") from None
