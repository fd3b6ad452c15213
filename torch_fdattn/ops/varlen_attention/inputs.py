"""What varlen_attention asks of its inputs; metadata only, the same for real and fake tensors."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.ops.options import AttentionOptions
from torch_fdattn.ops.packed import Packed
from torch_fdattn.ops.positions import FAR, Mask


def check_varlen(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, options: AttentionOptions
) -> None:
    """q (T, H, D), k (T_k, H_kv, D), v (T_k, H_kv, DV), or pages (P, H_kv, page, D) behind page_table."""
    mask, scores, dropout = options.mask, options.scores, options.dropout
    checks.expect_packed("q", q)
    checks.expect_float("q", q)
    tokens, heads, head_dim = q.shape
    _check_cu_seqlens("cu_seqlens_q", packed.cu_seqlens_q, q, tokens)
    batch = packed.sequences
    table = packed.page_table
    checks.expect_head_dim("q", head_dim)
    for name, x in (("k", k), ("v", v)):
        (checks.expect_packed if table is None else checks.expect_4d)(name, x)
    checks.expect_head_dim("v", v.shape[-1])
    kv_heads = k.shape[1]
    checks.expect_shape("k", k, (*k.shape[:-1], head_dim), "q")
    checks.expect_shape("v", v, (*k.shape[:-1], v.shape[-1]), "k")
    checks.expect_groups(heads, kv_heads, "q", "k")
    for name, x in (("k", k), ("v", v)):
        checks.expect_dtype(name, x, q.dtype, "q")
        checks.expect_device(name, x, q.device, "q")
    capacity = _check_keys(q, k, packed)
    for name, count, what, most in (("q", tokens, "tokens", FAR), ("k", capacity, "keys", 2 * FAR)):
        # Symbolic lengths are checked when the compiled op runs.
        if isinstance(count, int) and count >= most:
            raise ValueError(
                f"{name} must hold fewer than 2**{most.bit_length() - 1} {what}, got {count}"
            )
    checks.check_lengths("kv_lens", mask.kv_lens, q, bound=capacity, batch=batch)
    checks.check_window(mask.window_left, mask.window_right)
    positions = mask.window_left >= 0 or mask.window_right >= 0 or scores.alibi_slopes is not None
    checks.check_positions(
        mask.q_start, mask.kv_start, mask.kv_block, mask.kv_stride, q, capacity,
        positions or dropout.p > 0, batch,
    )  # fmt: skip
    checks.check_scale(options.scale)
    checks.check_scores(scores.softcap, scores.alibi_slopes, scores.sinks, q, batch)
    checks.check_attn_mask(scores.attn_mask, q, (batch, heads, None, None))
    _check_mask_covers(scores.attn_mask, packed, mask, capacity)
    checks.check_dropout(dropout.p, dropout.seed, q)


def _check_keys(q: Tensor, k: Tensor, packed: Packed) -> int:
    """Where the keys lie; returns how many a sequence can have."""
    _, cu_seqlens_k, table = packed
    if table is not None:
        if cu_seqlens_k is not None:
            raise ValueError(
                "cu_seqlens_k must be None where page_table is given: kv_lens counts the keys on pages, "
                f"got shape {tuple(cu_seqlens_k.shape)}"
            )
        checks.expect_page_table(table, packed.sequences, "the sequences of cu_seqlens_q", q.device)
        checks.expect_pages("k", k.shape[2])
        return table.shape[1] * k.shape[2]
    if cu_seqlens_k is None:
        if k.shape[0] != q.shape[0]:
            raise ValueError(
                f"cu_seqlens_k must be given where k has other tokens than q, got None with {k.shape[0]} "
                f"tokens of k and {q.shape[0]} of q"
            )
    else:
        _check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q, k.shape[0])
        checks.expect_shape("cu_seqlens_k", cu_seqlens_k, packed.cu_seqlens_q.shape, "cu_seqlens_q")
    return k.shape[0]


def _check_cu_seqlens(name: str, cu_seqlens: Tensor, q: Tensor, tokens: int) -> None:
    checks.expect_tensor(name, cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 (or int64), got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(
            f"{name} must have shape (sequences + 1,): where each sequence begins, and where the last ends, "
            f"got {tuple(cu_seqlens.shape)}"
        )
    checks.expect_device(name, cu_seqlens, q.device, "q")
    if not checks.readable(cu_seqlens):
        return
    values = cu_seqlens.tolist()
    if values[0] != 0 or values[-1] > tokens or any(a > b for a, b in itertools.pairwise(values)):
        raise ValueError(f"{name} must grow from 0 to at most {tokens}, got {values}")


def _check_mask_covers(attn_mask: Tensor | None, packed: Packed, mask: Mask, capacity: int) -> None:
    """That the longest sequence has entries; where lengths are asked for, or lie on the host anyway."""
    begins = packed.cu_seqlens_q
    on_host = type(begins) is Tensor and begins.device.type == "cpu"
    if attn_mask is None or not (on_host or checks.readable(begins)):
        return
    cu_seqlens_k = packed.begins_of_keys
    keys = cu_seqlens_k.diff()
    if packed.page_table is not None:
        keys = torch.full_like(keys, capacity)
    if mask.kv_lens is not None:
        keys = keys.minimum(mask.kv_lens.to(keys.dtype))
    sizes = (1,) * (2 - attn_mask.dim()) + tuple(attn_mask.shape[-2:])
    for size, lengths, what in zip(sizes, (packed.cu_seqlens_q.diff(), keys), ("queries", "keys"), strict=True):  # fmt: skip
        longest = int(lengths.max()) if lengths.numel() else 0
        if 1 < size < longest:
            raise ValueError(
                f"attn_mask must have entries for the longest sequence's {longest} {what}, got shape "
                f"{tuple(attn_mask.shape)}"
            )
