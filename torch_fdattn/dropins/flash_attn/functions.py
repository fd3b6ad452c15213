"""FlashAttention-2's functions of dense tensors (batch, sequence, heads, head_dim), on `torch_fdattn.attention`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.dropins.flash_attn.arguments import (
    ScoreOptions,
    backward_order,
    check_qkv,
    dense_rows,
    expect_rank,
    raises_runtime_errors,
    score_options,
)
from torch_fdattn.dropins.flash_attn.attention_probs import dense_probs
from torch_fdattn.functional import attention

Result = Tensor | tuple[Tensor, Tensor, Tensor]
#: What the parts of packed tensors are called in errors.
OF_KV, OF_QKV = ("q", "kv's k", "kv's v"), ("qkv's q", "qkv's k", "qkv's v")


@raises_runtime_errors
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """`flash_attn.flash_attn_func`: attention of dense tensors.

    Args:
        q: (B, S, H, D), float16 or bfloat16 (float32 too, and float64 on the CPU); D from 1 to 512.
        k, v: (B, S_k, H_k, D) and (B, S_k, H_k, D_v), H a multiple of H_k.
        dropout_p: which weights are dropped is ours (`attention`): seeded by torch's generator, other than theirs.
        softmax_scale: default D ** -0.5.
        causal: aligned at the bottom right: query i sees keys up to i + S_k - S.
        window_size: (left, right): and keys from i + S_k - S - left to i + S_k - S + right; negative: unbounded.
        softcap: scores become softcap · tanh(score / softcap); 0 or less: none.
        alibi_slopes: float32 (H,) or (B, H): scores lose slope · |i + S_k - S - j|.
        deterministic: the backward sums in one order. Not in a compiled graph, which follows `set_deterministic`.
        return_attn_probs: also lse and probabilities.

    Returns:
        out (B, S, H, D_v), 0 where a query sees no key. With return_attn_probs (out, lse, probs): lse float32 (B, H, S),
        +inf for such queries as theirs, and of the scores above (theirs leaves slope · (i + S_k - S) out where causal
        and ALiBi meet, which changes no other result); probs empty without dropout, else (B, H, S, S_k) in q's dtype, S and S_k
        rounded up to multiples of 128: exp(score - the row's largest), negative where dropped. For tests alone: it
        takes the memory of all scores. out is differentiable; lse too, where theirs has no gradient.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came; RuntimeError too, as theirs.

    Source: flash_attn_interface.py of FlashAttention 2.8.

    Examples:
        >>> from torch_fdattn.dropins.flash_attn import flash_attn_func
        >>> q = torch.randn(2, 10, 8, 64)
        >>> k, v = torch.randn(2, 2, 10, 2, 64)
        >>> flash_attn_func(q, k, v, causal=True).shape
        torch.Size([2, 10, 8, 64])
    """
    scores = softmax_scale, causal, window_size, softcap, alibi_slopes
    return _run((q, k, v), ("q", "k", "v"), dropout_p, scores, deterministic, return_attn_probs)


def _run(
    qkv: tuple[Tensor, ...], names: tuple[str, str, str], dropout_p: float, scores: tuple, deterministic: bool,
    return_attn_probs: bool,
) -> Result:  # fmt: skip
    """q, k and v under the names that the caller knows them by; scores: those arguments of `check_dense`."""
    checks.expect_bool(return_attn_probs=return_attn_probs)
    q, k, v = qkv
    options = check_dense(q, k, v, *scores, names=names)
    seed = drawn_seed(q, dropout_p) if return_attn_probs else None
    drops = {"dropout_p": dropout_p, "dropout_seed": seed}
    out, lse = attend_dense(q, k, v, options, deterministic, **drops)
    if not return_attn_probs:
        return out
    probs = q.new_empty(0) if seed is None else dense_probs(q, k, options, dropout_p, seed)
    return out, unseen_to_inf(lse), probs


@raises_runtime_errors
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """`flash_attn.flash_attn_kvpacked_func`: `flash_attn_func` of kv (B, S_k, 2, H_k, D), whose gradient is one tensor.

    Source: flash_attn_interface.py of FlashAttention 2.8.

    Examples:
        >>> from torch_fdattn.dropins.flash_attn import flash_attn_kvpacked_func
        >>> flash_attn_kvpacked_func(torch.randn(2, 3, 8, 64), torch.randn(2, 10, 2, 2, 64)).shape
        torch.Size([2, 3, 8, 64])
    """
    qkv = q, *unpacked("kv", kv, 2, 5)
    scores = softmax_scale, causal, window_size, softcap, alibi_slopes
    return _run(qkv, OF_KV, dropout_p, scores, deterministic, return_attn_probs)


@raises_runtime_errors
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """`flash_attn.flash_attn_qkvpacked_func`: `flash_attn_func` of qkv (B, S, 3, H, D), whose gradient is one tensor.

    Source: flash_attn_interface.py of FlashAttention 2.8.

    Examples:
        >>> from torch_fdattn.dropins.flash_attn import flash_attn_qkvpacked_func
        >>> flash_attn_qkvpacked_func(torch.randn(2, 10, 3, 8, 64)).shape
        torch.Size([2, 10, 8, 64])
    """
    parts = unpacked("qkv", qkv, 3, 5)
    scores = softmax_scale, causal, window_size, softcap, alibi_slopes
    return _run(parts, OF_QKV, dropout_p, scores, deterministic, return_attn_probs)


def check_dense(
    q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, names=("q", "k", "v")
) -> ScoreOptions:
    """The arguments of a dense call, as our op's keywords."""
    expect_rank(names[0], q, 4)
    check_qkv(q, k, v, names=names)
    if k.shape[0] != q.shape[0]:
        raise ValueError(
            f"{names[1]} must have {q.shape[0]} sequences like {names[0]}, got shape {tuple(k.shape)}"
        )
    scores = softmax_scale, causal, window_size, softcap, alibi_slopes
    return score_options(q, q.shape[0], *scores)


def attend_dense(
    q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions, deterministic: bool, **more
) -> tuple[Tensor, Tensor]:
    """(out (B, S, H, D_v), lse (B, H, S)); more: further keywords of `attention`."""
    with backward_order(deterministic):
        return attention(dense_rows(q), k, v, **options, **more, layout="bshd")


def unpacked(name: str, packed: Tensor, parts: int, rank: int) -> tuple[Tensor, ...]:
    """The parts that lie side by side in the third last dim."""
    before = "batch, sequence" if rank == 5 else "tokens"
    expect_rank(name, packed, rank, f"({before}, {parts}, heads, head_dim)")
    if packed.shape[-3] != parts:
        raise ValueError(
            f"{name} must have shape ({before}, {parts}, heads, head_dim), got {tuple(packed.shape)}"
        )
    checks.expect_float(name, packed)
    return packed.unbind(-3)


def drawn_seed(q: Tensor, dropout_p: float) -> Tensor | None:
    """The seed of a call with dropout, where another than the op is to know it."""
    checks.expect_convertible("dropout_p", dropout_p)
    return torch.ops.fdattn.dropout_seed(q.detach()) if dropout_p > 0 else None


def unseen_to_inf(lse: Tensor) -> Tensor:
    """FlashAttention-2's lse of queries that see no key: +inf."""
    return torch.where(lse == -math.inf, math.inf, lse)
