"""The Python entry of varlen_attention. (Defaults of softcap and dropout_p: see attention's.)"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.ops import library
from torch_fdattn.ops.layout import Layout
from torch_fdattn.ops.options import (
    AttentionOptions,
    default_scale,
    options_to_mask,
    window_bounds,
)
from torch_fdattn.ops.packed import Packed
from torch_fdattn.ops.scores import Scores
from torch_fdattn.ops.varlen_attention import op


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, *,
    page_table: Tensor | None = None, kv_lens: Tensor | None = None,
    causal: bool = False, window: tuple[int, int] | None = None, scale: float | None = None,
    q_start: Tensor | None = None, kv_start: Tensor | None = None,
    kv_block: int = 0, kv_stride: int = 0,
    softcap: float = 0, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    attn_mask: Tensor | None = None, dropout_p: float = 0, dropout_seed: Tensor | None = None,
    layout: Layout = "bhsd",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`attention` of packed sequences: tokens one after the other, without padding, lengths on the device.

    Sequence b has the queries ``q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]]`` and sees its own keys alone. No longest
    length is asked for: grids follow from the number of tokens and of sequences.

    Args:
        q: queries (T, H, D) of all sequences, of `attention`'s dtypes and head dims, any strides.
        k, v: keys (T_k, H_kv, D) and values (T_k, H_kv, DV), packed as cu_seqlens_k says, any strides. With
            page_table: pages (P, H_kv, page, D) and (P, H_kv, page, DV), the caches of `paged_append_kv` and
            `paged_decode`.
        cu_seqlens_q: int32 (B + 1,) on q's device: where each sequence's queries begin, and where the last
            one's end. It grows from 0 to at most T; tokens behind its end belong to no sequence. Not checked
            (TORCH_FDATTN_CHECK=1 does), but whatever it holds, nothing outside of the tensors is touched.
        cu_seqlens_k: the same for keys and values. Default: as cu_seqlens_q.
        page_table: int32 (B, pages a sequence) on q's device: key j of sequence b is slot j % page of page
            page_table[b, j // page]. Entries beyond a sequence's keys, or before all that its window lets it
            see, may be anything; keys on a page outside [0, P) are masked. For chunked prefill: a backward raises.
        kv_lens: int32 (B,) on q's device; how many keys of each sequence are valid, clamped to what it has.
            Default: all (with page_table, all slots of its row).
        q_start, kv_start: int32 (B,), as in `attention`. Default: a sequence's queries are the last of its keys.
        alibi_slopes: (H,) or (B, H).
        attn_mask: as in `attention`, broadcastable to (B, H, M, N): query i and key j of sequence b, both counted
            from the sequence's own first, take the entry [b, h, i, j]. M and N are 1 or at least the longest
            sequence's queries and keys (with page_table, valid keys), which is checked where lengths lie on the
            host, or with TORCH_FDATTN_CHECK=1; beyond it nothing outside of the mask is read.
        dropout_p, dropout_seed: as in `attention`, of batch b for sequence b.
        layout: of pages; "bshd": (P, page, H_kv, D). Packed tensors are (T, H, D) in both.

    The other arguments are those of `attention`, the errors too.

    Returns:
        out (T, H, DV) in q's dtype and memory layout, and lse (H, T) float32 (float64 for float64 inputs). A
        query that sees no key has out 0 and lse -inf (or its head's sink), and so has a token of no sequence
        (never a sink). Both are differentiable in q, k, v, alibi_slopes, sinks and an additive attn_mask, as
        `attention`'s are; tangents read the lengths on the host.

    Source: flash_attn_varlen_func of FlashAttention-2, arXiv:2307.08691; torch.nn.attention.varlen.

    Examples:
        >>> q = torch.randn(10, 8, 64)  # a sequence of 3 tokens and one of 7
        >>> k, v = torch.randn(2, 10, 2, 64)
        >>> begins = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> out, lse = torch_fdattn.varlen_attention(q, k, v, begins, causal=True)
        >>> out.shape, lse.shape
        (torch.Size([10, 8, 64]), torch.Size([8, 10]))
    """
    scale = checks.number("scale", scale)
    left, right = window_bounds(window)
    tensors = ("q", q), ("k", k), ("v", v), ("cu_seqlens_q", cu_seqlens_q)
    checks.expect_types(
        tensors, (kv_lens, q_start, kv_start), scale, softcap, dropout_p, cu_seqlens_k=cu_seqlens_k,
        page_table=page_table, alibi_slopes=alibi_slopes, sinks=sinks, attn_mask=attn_mask, dropout_seed=dropout_seed,
    )  # fmt: skip
    checks.expect_int64(kv_block=kv_block, kv_stride=kv_stride)
    checks.expect_bool(causal=causal)
    k, v = op.pages_to_bhsd(layout, k, v, page_table)
    given = cu_seqlens_q, cu_seqlens_k, page_table, kv_lens, q_start, kv_start
    unseen = library.can_bypass_dispatcher(q, k, v, *given, alibi_slopes, sinks, attn_mask)
    if unseen and dropout_seed is None and dropout_p == 0:
        strided = checks.plain_int("kv_block", kv_block), checks.plain_int("kv_stride", kv_stride)
        mask = options_to_mask(*given[3:], causal, left, right, *strided)
        scores = Scores(checks.plain_float("softcap", softcap), alibi_slopes, sinks, attn_mask)
        scale = checks.plain_float("scale", default_scale(q, scale))
        return op.attend_eagerly(q, k, v, Packed(*given[:3]), AttentionOptions(mask, scale, scores))
    return torch.ops.fdattn.varlen_attention(
        q, k, v, *given, causal=causal, window_left=left, window_right=right, kv_block=kv_block,
        kv_stride=kv_stride, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        attn_mask=attn_mask, dropout_p=dropout_p, dropout_seed=dropout_seed,
    )  # fmt: skip
