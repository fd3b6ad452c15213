"""The packed functions of `dropins.flash_attn` against the formula, sequence by sequence, and keys on pages."""

from __future__ import annotations

import math
import random

import pytest
import torch

from tests.dropins.flash_attn.formula import (
    CLOSE,
    attend,
    drawn_options,
    drawn_sizes,
    equal_with_gradients,
    made,
)
from torch_fdattn.dropins.flash_attn import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)


def begins(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def by_sequences(q, k, v, of_q, of_k, slopes=None, **options):
    """(out (T, H, D_v), lse (H, T)) of the formula."""
    rows = []
    for b, (own_q, own_k, own_v) in enumerate(zip(q.split(of_q), k.split(of_k), v.split(of_k), strict=True)):  # fmt: skip
        own = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        rows.append(attend(own_q, own_k, own_v, slopes=own, **options))
    return torch.cat([x[0] for x in rows]), torch.cat([x[1] for x in rows], 1)


@pytest.mark.parametrize("seed", range(30))
def test_drawn(seed: int) -> None:
    rng = random.Random(seed)
    of_q, of_k = ([rng.choice((0, 1, 5, 14)) for _ in range(4)] for _ in range(2))
    of_q[0], of_k[-1] = 3, 8
    heads, kv_heads, dim = drawn_sizes(rng)
    options, given = drawn_options(rng, heads, 4)
    q, kv = made(sum(of_q), heads, dim), made(sum(of_k), 2, kv_heads, dim)
    inputs = [x.requires_grad_() for x in (q, kv)]
    expected, expected_lse = by_sequences(q, kv[:, 0], kv[:, 1], of_q, of_k, **options)
    packed = begins(of_q), begins(of_k), max(of_q), max(of_k)
    if rng.random() < 0.5:
        out = flash_attn_varlen_kvpacked_func(q, kv, *packed, **given)
    else:
        out, lse, _ = flash_attn_varlen_func(
            q, kv[:, 0], kv[:, 1], *packed, **given, return_attn_probs=True
        )
        lse = torch.where(lse == math.inf, -math.inf, lse)
        torch.testing.assert_close(lse, expected_lse, **CLOSE)
    equal_with_gradients(out, expected, inputs)


def test_qkvpacked_has_one_gradient() -> None:
    lengths, qkv = [4, 9], made(13, 3, 4, 16).requires_grad_()
    expected, _ = by_sequences(*qkv.unbind(1), lengths, lengths, causal=True)
    out = flash_attn_varlen_qkvpacked_func(qkv, begins(lengths), 9, causal=True)
    equal_with_gradients(out, expected, [qkv])


def on_pages(k: torch.Tensor, lengths: list[int], page: int):
    """(pages, table) that hold k (T, H_k, D): pages in any order, two more than are needed, unused slots NaN."""
    per = max(1, max(-(-x // page) for x in lengths))
    order = torch.randperm(per * len(lengths) + 2)
    pages = torch.full((len(order), page, *k.shape[1:]), math.nan, dtype=k.dtype)
    table = order[: per * len(lengths)].view(len(lengths), per).int()
    for own, row in zip(k.split(lengths), table, strict=True):
        for j, x in enumerate(own):
            pages[row[j // page], j % page] = x
    return pages, table


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("dim", [16, 20])
def test_block_table(page: int, dim: int) -> None:
    of_q, of_k = [2, 1, 9], [10, 3, 9]
    q, k, v = made(12, 4, dim), made(22, 2, dim), made(22, 2, dim)
    torch.manual_seed(1)
    k_pages, table = on_pages(k, of_k, page)
    torch.manual_seed(1)
    v_pages, _ = on_pages(v, of_k, page)
    out, lse, _ = flash_attn_varlen_func(
        q, k_pages, v_pages, begins(of_q), begins(of_k), 9, 10, causal=True, block_table=table, return_attn_probs=True
    )  # fmt: skip
    expected, expected_lse = by_sequences(q, k, v, of_q, of_k, causal=True)
    torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(lse, expected_lse, **CLOSE)


def test_pages_have_no_gradient() -> None:
    """As theirs the forward takes inputs that require gradients; here a backward raises."""
    q = made(2, 4, 16).requires_grad_()
    pages, table = made(3, 4, 2, 16), torch.zeros(1, 1, dtype=torch.int32)
    out = flash_attn_varlen_func(q, pages, pages, begins([2]), begins([3]), 2, 3, block_table=table)
    with pytest.raises(NotImplementedError, match="no gradient"):
        out.sum().backward()


def test_dropout_of_each_sequence() -> None:
    """Signs of packed probabilities say what was dropped, sequence by sequence."""
    lengths, p = [6, 11], 0.3
    q, k, v = made(3, 17, 2, 16).unbind()
    packed = begins(lengths), begins(lengths), 11, 11
    out, _, probs = flash_attn_varlen_func(q, k, v, *packed, p, causal=True, return_attn_probs=True)
    assert probs.shape == (2, 2, 128, 128)
    parts = []
    for b, (own_q, own_k, own_v) in enumerate(zip(*(x.split(lengths) for x in (q, k, v)), strict=True)):  # fmt: skip
        signed = probs[b, :, : len(own_q), : len(own_q)]
        scores = torch.einsum("shd,nhd->hsn", own_q, own_k) / 4
        weights = torch.softmax(scores.masked_fill(signed == 0, -math.inf), -1)
        parts.append(torch.einsum("hsn,nhd->shd", weights * ~torch.signbit(signed) / (1 - p), own_v))  # fmt: skip
    torch.testing.assert_close(out, torch.cat(parts), rtol=1e-4, atol=1e-5)  # p is rounded to 2⁻¹⁶
