"""FlashAttention-2's functions of packed sequences (tokens, heads, head_dim), on `torch_fdattn.varlen_attention`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.dropins.flash_attn.arguments import (
    ScoreOptions,
    backward_order,
    check_qkv,
    dense_rows,
    expect_int32,
    expect_longest,
    expect_pages,
    expect_rank,
    expect_used_pages,
    host_values,
    raises_runtime_errors,
    score_options,
)
from torch_fdattn.dropins.flash_attn.attention_probs import varlen_probs
from torch_fdattn.dropins.flash_attn.functions import (
    OF_KV,
    OF_QKV,
    Result,
    drawn_seed,
    unpacked,
    unseen_to_inf,
)
from torch_fdattn.functional import varlen_attention


@raises_runtime_errors
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Result:  # fmt: skip
    """`flash_attn.flash_attn_varlen_func`: attention of packed sequences, or of keys on pages.

    Args:
        q: (T, H, D), the queries of all sequences one after the other.
        k, v: (T_k, H_k, D) and (T_k, H_k, D_v). With block_table: pages (P, page, H_k, D) and (P, page, H_k, D_v) of any
            size (theirs: multiples of 256), which get no gradient: a backward raises.
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1,) on q's device: where each sequence begins, and where the last ends.
        max_seqlen_q, max_seqlen_k: the longest lengths, ints or tensors of no dimension. Our grids do not follow from them; they size the
            probabilities of return_attn_probs.
        block_table: int32 (B, pages a sequence): key j of sequence b is slot j % page of page block_table[b, j // page].

    The other arguments, the results and the errors are those of `flash_attn_func`, with out (T, H, D_v), lse (H, T) and
    probabilities of (B, H, max_seqlen_q, max_seqlen_k), rounded.

    Source: flash_attn_interface.py of FlashAttention 2.8.

    Examples:
        >>> from torch_fdattn.dropins.flash_attn import flash_attn_varlen_func
        >>> q = torch.randn(10, 8, 64)  # a sequence of 3 tokens and one of 7
        >>> k, v = torch.randn(2, 10, 2, 64)
        >>> begins = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, begins, begins, 7, 7, causal=True).shape
        torch.Size([10, 8, 64])
    """
    expect_longest(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    begins, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    scores = softmax_scale, causal, window_size, softcap, alibi_slopes
    return _run(
        (q, k, v), ("q", "k", "v"), begins, longest, dropout_p, scores, deterministic, return_attn_probs, block_table
    )  # fmt: skip


def _run(
    qkv: tuple[Tensor, ...], names: tuple[str, str, str], begins: tuple[Tensor, Tensor], longest: tuple[int, int],
    dropout_p: float, scores: tuple, deterministic: bool, return_attn_probs: bool, block_table: Tensor | None = None,
) -> Result:  # fmt: skip
    """q, k and v under the names that the caller knows them by; scores: those arguments of `check_varlen`."""
    checks.expect_bool(return_attn_probs=return_attn_probs)
    (q, k, v), (cu_seqlens_q, cu_seqlens_k) = qkv, begins
    options = check_varlen(q, k, v, *begins, block_table, "block_table", *scores, names=names)
    seed = drawn_seed(q, dropout_p) if return_attn_probs else None
    drops = {"dropout_p": dropout_p, "dropout_seed": seed}
    pages, kv_lens = {"page_table": block_table}, None
    if block_table is not None:
        if cu_seqlens_k is None:
            raise TypeError("cu_seqlens_k must be a torch.Tensor, got NoneType")
        kv_lens = cu_seqlens_k.diff()
        capacity, lens = block_table.shape[1] * k.shape[1], host_values(kv_lens)
        if lens is not None and max(lens) > capacity:
            raise ValueError(
                f"cu_seqlens_k must give each sequence at most the {capacity} tokens of block_table, got lengths {lens}"
            )
        expect_used_pages("block_table", block_table, kv_lens, k)
        if seed is not None:
            raise NotImplementedError(
                "return_attn_probs with dropout_p must be False with block_table, got True"
            )
    packed = cu_seqlens_q, None if block_table is not None else cu_seqlens_k
    out, lse = attend_varlen(q, k, v, packed, options, deterministic, kv_lens=kv_lens, **pages, **drops)  # fmt: skip
    if not return_attn_probs:
        return out
    probs = q.new_empty(0)
    if seed is not None:
        sizes = tuple(map(int, longest))
        probs = varlen_probs(q, k, begins, sizes, options, dropout_p, seed)
    return out, unseen_to_inf(lse), probs


@raises_runtime_errors
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """`flash_attn.flash_attn_varlen_kvpacked_func`: `flash_attn_varlen_func` of kv (T_k, 2, H_k, D).

    Source: flash_attn_interface.py of FlashAttention 2.8.

    Examples:
        >>> from torch_fdattn.dropins.flash_attn import flash_attn_varlen_kvpacked_func
        >>> begins = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> q, kv = torch.randn(10, 8, 64), torch.randn(10, 2, 2, 64)
        >>> flash_attn_varlen_kvpacked_func(q, kv, begins, begins, 7, 7).shape
        torch.Size([10, 8, 64])
    """
    qkv = q, *unpacked("kv", kv, 2, 4)
    expect_longest(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    begins, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    scores = softmax_scale, causal, window_size, softcap, alibi_slopes
    return _run(qkv, OF_KV, begins, longest, dropout_p, scores, deterministic, return_attn_probs)


@raises_runtime_errors
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Sequence[int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """`flash_attn.flash_attn_varlen_qkvpacked_func`: `flash_attn_varlen_func` of qkv (T, 3, H, D).

    Source: flash_attn_interface.py of FlashAttention 2.8.

    Examples:
        >>> from torch_fdattn.dropins.flash_attn import flash_attn_varlen_qkvpacked_func
        >>> begins = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> flash_attn_varlen_qkvpacked_func(torch.randn(10, 3, 8, 64), begins, 7).shape
        torch.Size([10, 8, 64])
    """
    parts = unpacked("qkv", qkv, 3, 4)
    check_begins("cu_seqlens", cu_seqlens, parts[0], "qkv")
    expect_longest(max_seqlen=max_seqlen)
    begins, longest = (cu_seqlens, cu_seqlens), (max_seqlen, max_seqlen)
    scores = softmax_scale, causal, window_size, softcap, alibi_slopes
    return _run(parts, OF_QKV, begins, longest, dropout_p, scores, deterministic, return_attn_probs)


def check_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, table, table_name, softmax_scale, causal, window_size, softcap, alibi_slopes,
    names=("q", "k", "v"),
) -> ScoreOptions:  # fmt: skip
    """The arguments of a packed call, as our op's keywords. table: of pages, which the caller gives by this name."""
    expect_rank(names[0], q, 3)
    if table is not None:
        pages = "(pages, page, heads, head_dim)"
        expect_rank("k", k, 4, f"{pages} with {table_name}")
    check_qkv(q, k, v, 3 if table is None else 4, names)
    check_begins("cu_seqlens_q", cu_seqlens_q, q)
    if cu_seqlens_k is not None or table is None:
        expect_int32("cu_seqlens_k", cu_seqlens_k, tuple(cu_seqlens_q.shape), "cu_seqlens_q", q)
        expect_growing("cu_seqlens_k", cu_seqlens_k, k.shape[0] if table is None else None)
    batch = cu_seqlens_q.shape[0] - 1
    if table is not None:
        expect_pages(table_name, table, batch, k, q)
    return score_options(q, batch, softmax_scale, causal, window_size, softcap, alibi_slopes)


def check_begins(name: str, cu_seqlens: Tensor, q: Tensor, q_name: str = "q") -> None:
    """Where the sequences of q's tokens begin."""
    checks.expect_tensor(name, cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"{name} must have shape (sequences + 1,) with at least one sequence, got {tuple(cu_seqlens.shape)}"
        )
    expect_int32(name, cu_seqlens, tuple(cu_seqlens.shape), "itself", q, q_name)
    expect_growing(name, cu_seqlens, q.shape[0])


def expect_growing(name: str, cu_seqlens: Tensor, tokens: int | None = None) -> None:
    """From 0 to at most so many tokens, where values can be read; kernels clamp the others."""
    values = host_values(cu_seqlens)
    if values is None:
        return
    grows = values[0] == 0 and all(a <= b for a, b in pairwise(values))
    if not grows or (tokens is not None and values[-1] > tokens):
        end = "" if tokens is None else f" to at most {tokens}"
        raise ValueError(f"{name} must grow from 0{end}, got {values}")


def attend_varlen(
    q: Tensor, k: Tensor, v: Tensor, packed: tuple[Tensor, Tensor | None], options: ScoreOptions, deterministic: bool,
    **more,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out (T, H, D_v), lse (H, T)); packed: cu_seqlens of q and k; more: further keywords of `varlen_attention`."""
    with backward_order(deterministic):
        return varlen_attention(dense_rows(q), k, v, *packed, **options, **more, layout="bshd")
