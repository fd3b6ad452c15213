"""`flash_attn_interface`: FlashAttention-3's functions, on the same ops.

What changes no result is taken and has no effect: num_splits, pack_gqa, sm_margin, scheduler_metadata. What ours cannot
do is refused by name: float8 and its descales, qv, attention_chunk. The lse of a query that sees no key is -inf,
as theirs, and out is contiguous whatever q's memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.dropins.flash_attn.arguments import (
    check_qkv,
    expect_int32,
    expect_longest,
    expect_rank,
    raises_runtime_errors,
    refuse,
    score_options,
)
from torch_fdattn.dropins.flash_attn.cache import CacheCall, checked_cache, places, run_over_cache
from torch_fdattn.dropins.flash_attn.functions import OF_QKV, attend_dense, check_dense, unpacked
from torch_fdattn.dropins.flash_attn.rotation import Rotation
from torch_fdattn.dropins.flash_attn.varlen import (
    attend_varlen,
    check_begins,
    check_varlen,
    expect_growing,
)
from torch_fdattn.functional import merge_states

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]
_FLOAT8 = "our float8 form is torch_fdattn.attention_fp8, with scales of its own"


def _refuse_unsupported(where: str, qv, q_descale, k_descale, v_descale, attention_chunk) -> None:
    refuse(
        where,
        qv=(qv, None, "ours have no second part of queries and keys"),
        q_descale=(q_descale, None, _FLOAT8),
        k_descale=(k_descale, None, _FLOAT8),
        v_descale=(v_descale, None, _FLOAT8),
        attention_chunk=(attention_chunk, 0, "ours have no chunks; window_size has windows"),
    )


def _check_unused(
    num_splits: object = 0, sm_margin: object = 0, pack_gqa: object = None, **longest: object
) -> None:
    """What changes no result is still of its type."""
    checks.expect_int64(num_splits=num_splits, sm_margin=sm_margin)
    checks.expect_bool(pack_gqa=pack_gqa)
    expect_longest(**{name: x for name, x in longest.items() if x is not None})


@raises_runtime_errors
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False, qv: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """FlashAttention-3's `flash_attn_func`: out, or (out, lse) with return_attn_probs.

    sinks: (H,), a logit that joins each row's softmax. The other arguments and the errors are those of
    FlashAttention-2's (`functions.py`); qv, descales and attention_chunk are refused.

    Source: hopper/flash_attn_interface.py of FlashAttention, and vLLM's forks of it for sinks.

    Examples:
        >>> from torch_fdattn.dropins.flash_attn.interface_3 import flash_attn_func
        >>> q, k, v = torch.randn(3, 2, 10, 8, 64)
        >>> out, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 10, 8, 64]), torch.Size([2, 8, 10]))
    """
    _refuse_unsupported("flash_attn_func", qv, q_descale, k_descale, v_descale, attention_chunk)
    _check_unused(num_splits, sm_margin, pack_gqa)
    scores = softmax_scale, causal, window_size, softcap
    return _run((q, k, v), ("q", "k", "v"), scores, deterministic, return_attn_probs, sinks)


def _run(
    qkv: tuple[Tensor, ...], names: tuple[str, str, str], scores: tuple, deterministic: bool, return_attn_probs: bool,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """q, k and v under the names that the caller knows them by; scores: those arguments of `check_dense`."""
    checks.expect_bool(return_attn_probs=return_attn_probs)
    options = check_dense(*qkv, *scores, None, names=names)
    out, lse = attend_dense(*qkv, options, deterministic, sinks=sinks)
    return (out.contiguous(), lse) if return_attn_probs else out.contiguous()


@raises_runtime_errors
def flash_attn_qkvpacked_func(
    qkv: Tensor, softmax_scale: float | None = None, causal: bool = False, q_descale: Tensor | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None, window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, deterministic: bool = False, num_heads_q: int | None = None,
    sm_margin: int = 0, return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`flash_attn_func` of qkv (B, S, 3, H, D), or (B, S, num_heads_q + 2 · H_k, D); the gradient is one tensor.

    Source: hopper/flash_attn_interface.py of FlashAttention.

    Examples:
        >>> from torch_fdattn.dropins.flash_attn.interface_3 import flash_attn_qkvpacked_func
        >>> flash_attn_qkvpacked_func(torch.randn(2, 10, 12, 64), num_heads_q=8).shape
        torch.Size([2, 10, 8, 64])
    """
    _refuse_unsupported(
        "flash_attn_qkvpacked_func", None, q_descale, k_descale, v_descale, attention_chunk
    )
    _check_unused(sm_margin=sm_margin)
    if num_heads_q is None:
        parts = unpacked("qkv", qkv, 3, 5)
    else:
        expect_rank("qkv", qkv, 4)
        checks.expect_float("qkv", qkv)
        checks.expect_int64(num_heads_q=num_heads_q)
        kv_heads, odd = divmod(qkv.shape[2] - num_heads_q, 2)
        if odd or kv_heads < 1 or num_heads_q < 1:
            raise ValueError(
                "num_heads_q must be positive and leave as many heads of k as of v in qkv (batch, sequence, heads, head_dim), got "
                f"{num_heads_q} of {qkv.shape[2]} heads"
            )
        parts = qkv.split((num_heads_q, kv_heads, kv_heads), 2)
    scores = softmax_scale, causal, window_size, softcap
    return _run(parts, OF_QKV, scores, deterministic, return_attn_probs)


@raises_runtime_errors
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: Sequence[int] = (-1, -1), attention_chunk: int = 0,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
    sm_margin: int = 0, return_attn_probs: bool = False, sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """FlashAttention-3's `flash_attn_varlen_func`: out, or (out, lse) with return_attn_probs.

    seqused_q, seqused_k: int32 (B,), how many of each sequence's first tokens are used. Rows of unused queries are 0
    here, unwritten there. The other arguments are those of FlashAttention-2's (`varlen.py`) and of `flash_attn_func`.

    Source: hopper/flash_attn_interface.py of FlashAttention.

    Examples:
        >>> from torch_fdattn.dropins.flash_attn.interface_3 import flash_attn_varlen_func
        >>> begins = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> q, k, v = torch.randn(3, 10, 8, 64)
        >>> flash_attn_varlen_func(q, k, v, begins, begins, 7, 7, causal=True).shape
        torch.Size([10, 8, 64])
    """
    _refuse_unsupported(
        "flash_attn_varlen_func", qv, q_descale, k_descale, v_descale, attention_chunk
    )
    longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    _check_unused(num_splits, sm_margin, pack_gqa, **longest)
    checks.expect_bool(return_attn_probs=return_attn_probs)
    scores = softmax_scale, causal, window_size, softcap, None
    options = check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, None, "page_table", *scores)
    batch = cu_seqlens_q.shape[0] - 1
    for name, used in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if used is not None:
            expect_int32(name, used, (batch,), "the sequences of cu_seqlens_q", q)
    more = {"sinks": sinks, "kv_lens": seqused_k}
    if seqused_q is not None:  # the last used query is the last of the keys
        more["q_start"] = (cu_seqlens_k.diff() if seqused_k is None else seqused_k) - seqused_q
    out, lse = attend_varlen(q, k, v, (cu_seqlens_q, cu_seqlens_k), options, deterministic, **more)
    if seqused_q is not None:
        sequence, step, inside = places(cu_seqlens_q, len(q))
        unused = ~inside | (step >= seqused_q[sequence])
        out, lse = (
            out.masked_fill(unused[:, None, None], 0.0),
            lse.masked_fill(unused, float("-inf")),
        )
    return (out.contiguous(), lse) if return_attn_probs else out.contiguous()


@raises_runtime_errors
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    qv: Tensor | None = None, rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None, rotary_seqlens: Tensor | None = None, q_descale: Tensor | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: Sequence[int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    rotary_interleaved: bool = True, scheduler_metadata: object = None, num_splits: int = 0,
    pack_gqa: bool | None = None, sm_margin: int = 0, return_softmax_lse: bool = False, sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """FlashAttention-3's `flash_attn_with_kvcache`: out, or (out, lse) with return_softmax_lse.

    page_table: FlashAttention-2's block_table (`kvcache.py`), with cache_leftpad too, and with cache_batch_idx, which then
    chooses its rows. cu_seqlens_q, cu_seqlens_k_new:
    int32 (B + 1,), then q is packed, (T, H, D), or k and v are, (T_new, H_k, D). rotary_seqlens: int32 (B,), positions of
    the first new tokens, in place of cache_seqlens.

    Source: hopper/flash_attn_interface.py of FlashAttention.

    Examples:
        >>> from torch_fdattn.dropins.flash_attn.interface_3 import flash_attn_with_kvcache
        >>> k_pages, v_pages = torch.randn(2, 8, 16, 2, 64)
        >>> table = torch.tensor([[3, 1], [0, 7]], dtype=torch.int32)
        >>> lens = torch.tensor([20, 9], dtype=torch.int32)
        >>> flash_attn_with_kvcache(torch.randn(2, 1, 8, 64), k_pages, v_pages, cache_seqlens=lens, page_table=table).shape
        torch.Size([2, 1, 8, 64])
    """
    _refuse_unsupported(
        "flash_attn_with_kvcache", qv, q_descale, k_descale, v_descale, attention_chunk
    )
    _check_unused(num_splits, sm_margin, pack_gqa, max_seqlen_q=max_seqlen_q)
    if scheduler_metadata is not None:
        checks.expect_tensor("scheduler_metadata", scheduler_metadata)
    checks.expect_bool(return_softmax_lse=return_softmax_lse)
    batch = q.shape[0] if isinstance(q, Tensor) and q.dim() else 0
    if cu_seqlens_q is None:
        expect_rank("q", q, 4)
    else:
        expect_rank("q", q, 3, "(tokens, heads, head_dim) with cu_seqlens_q")
        check_begins("cu_seqlens_q", cu_seqlens_q, q)
        batch = cu_seqlens_q.shape[0] - 1
    check_qkv(q, k_cache, v_cache, 4, ("q", "k_cache", "v_cache"))
    at = cache_seqlens, cache_batch_idx, cache_leftpad, page_table, "page_table"
    cache = checked_cache(q, batch, k_cache, v_cache, *at)
    options = score_options(q, batch, softmax_scale, causal, window_size, softcap, None)
    for name, given in (("cu_seqlens_k_new", cu_seqlens_k_new), ("rotary_seqlens", rotary_seqlens)):
        if given is not None:
            expect_int32(
                name, given, (batch + (name == "cu_seqlens_k_new"),), "the sequences of q", q
            )
    if cu_seqlens_k_new is not None and isinstance(k, Tensor) and k.dim():
        expect_growing("cu_seqlens_k_new", cu_seqlens_k_new, k.shape[0])
    rotation = Rotation(rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens)
    packed = cu_seqlens_q, cu_seqlens_k_new
    out, lse = run_over_cache(CacheCall(q, cache, k, v, rotation, options, sinks, *packed))
    return (out.contiguous(), lse) if return_softmax_lse else out.contiguous()


@raises_runtime_errors
def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """FlashAttention-3's `flash_attn_combine`: attention over a union of keys from the results of its parts.

    Args:
        out_partial: (parts, B, S, H, D).
        lse_partial: float32 (parts, B, S, H), -inf where a part saw no key.
        out: (B, S, H, D), to write into.
        out_dtype: of the result; default out_partial's.

    Returns:
        out (B, S, H, D) and lse float32 (B, S, H).

    Source: hopper/flash_attn_interface.py of FlashAttention; arXiv:2501.01005, section 2.2.

    Examples:
        >>> from torch_fdattn.dropins.flash_attn.interface_3 import flash_attn_combine
        >>> out, lse = flash_attn_combine(torch.randn(3, 2, 10, 8, 64), torch.randn(3, 2, 10, 8))
        >>> out.shape, lse.shape
        (torch.Size([2, 10, 8, 64]), torch.Size([2, 10, 8]))
    """
    expect_rank("out_partial", out_partial, 5, "(parts, batch, sequence, heads, head_dim)")
    checks.expect_float("out_partial", out_partial)
    checks.expect_tensor("lse_partial", lse_partial)
    checks.expect_shape("lse_partial", lse_partial, tuple(out_partial.shape[:-1]), "out_partial")
    expected = torch.float64 if out_partial.dtype == torch.float64 else torch.float32
    if lse_partial.dtype != expected:
        raise TypeError(
            f"lse_partial must be {expected} where out_partial is {out_partial.dtype}, got {lse_partial.dtype}"
        )
    checks.expect_device("lse_partial", lse_partial, out_partial.device, "out_partial")
    if out_dtype is not None and out_dtype not in checks.DTYPES:
        raise TypeError(
            f"out_dtype must be bfloat16, float16, float32 or float64, or None, got {out_dtype!r}"
        )
    dtype = out_dtype
    if out is not None:
        checks.expect_tensor("out", out)
        checks.expect_float("out", out)
        checks.expect_shape("out", out, tuple(out_partial.shape[1:]), "out_partial")
        checks.expect_device("out", out, out_partial.device, "out_partial")
        dtype = out.dtype if dtype is None else dtype
        checks.expect_dtype("out", out, dtype, "out_dtype")
    merged, lse = merge_states(out_partial, lse_partial.transpose(2, 3), dtype=dtype, layout="bshd")
    if out is not None:
        merged = out.copy_(merged)
    return merged, lse.transpose(1, 2)


def get_scheduler_metadata(*arguments: object, **options: object) -> None:
    """FlashAttention-3's `get_scheduler_metadata`: None, for our launches follow from shapes.

    Examples:
        >>> from torch_fdattn.dropins.flash_attn.interface_3 import get_scheduler_metadata
        >>> get_scheduler_metadata(1, 1, 64, 8, 2, 64, torch.tensor([64]))
    """
