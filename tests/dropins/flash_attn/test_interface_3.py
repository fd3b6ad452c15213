"""FlashAttention-3's names: their results, unused tokens, sinks, and what is refused by name."""

from __future__ import annotations

import math

import pytest
import torch

from tests.dropins.flash_attn.formula import (
    CLOSE,
    attend,
    attend_batch,
    equal_with_gradients,
    made,
)
from torch_fdattn.dropins import flash_attn
from torch_fdattn.dropins.flash_attn import interface_3 as fa3


def test_dense_with_sinks() -> None:
    q, k, v = (made(2, 9, h, 16).requires_grad_() for h in (4, 2, 2))
    sinks = torch.rand(4)
    out, lse = fa3.flash_attn_func(
        q, k, v, causal=True, window_size=(4, 0), sinks=sinks, return_attn_probs=True
    )
    expected, expected_lse = attend_batch(q, k, v, causal=True, window=(4, 0), sinks=sinks)
    torch.testing.assert_close(lse, expected_lse, **CLOSE)
    equal_with_gradients(out, expected, [q, k, v])


def test_rows_without_keys_have_minus_infinity() -> None:
    q, kv = made(1, 3, 2, 16), made(1, 1, 2, 16)
    _, lse = fa3.flash_attn_func(q, kv, kv, causal=True, return_attn_probs=True)
    assert (lse[..., :2] == -math.inf).all()


@pytest.mark.parametrize("merged_heads", [False, True])
def test_qkvpacked(merged_heads: bool) -> None:
    shape = (2, 9, 8, 16) if merged_heads else (2, 9, 3, 4, 16)
    qkv = made(*shape).requires_grad_()
    q, k, v = qkv.split((4, 2, 2), 2) if merged_heads else qkv.unbind(2)
    out = fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=4 if merged_heads else None, softcap=2.0)
    equal_with_gradients(out, attend_batch(q, k, v, softcap=2.0)[0], [qkv])


def test_unused_tokens() -> None:
    """seqused: the first tokens of each sequence, aligned at their own ends; the rest is zero and has no gradient."""
    of_q, of_k, used_q, used_k = [6, 5], [8, 4], [4, 5], [7, 2]
    q, k, v = (made(sum(n), 2, 16).requires_grad_() for n in (of_q, of_k, of_k))
    begins = [torch.tensor([0, *n]).cumsum(0).int() for n in (of_q, of_k)]
    used = [torch.tensor(n, dtype=torch.int32) for n in (used_q, used_k)]
    out, lse = fa3.flash_attn_varlen_func(
        q, k, v, *begins, 6, 8, *used, causal=True, return_attn_probs=True
    )
    parts = []
    split = (q.split(of_q), k.split(of_k), v.split(of_k), used_q, used_k)
    for own_q, own_k, own_v, m, n in zip(*split, strict=True):
        part, _ = attend(own_q[:m], own_k[:n], own_v[:n], causal=True)
        parts.append(torch.cat((part, torch.zeros_like(own_q[m:]))))
    assert (lse[:, 4:6] == -math.inf).all()
    equal_with_gradients(out, torch.cat(parts), [q, k, v])


def test_combine() -> None:
    q, k, v = made(3, 2, 6, 4, 16).unbind()
    parts = [attend_batch(q, k[:, s], v[:, s]) for s in (slice(0, 2), slice(2, 6))]
    outs = torch.stack([x[0] for x in parts])
    lses = torch.stack([x[1].transpose(1, 2) for x in parts])
    given = torch.empty_like(q)
    out, lse = fa3.flash_attn_combine(outs, lses, out=given)
    expected, expected_lse = attend_batch(q, k, v)
    assert out is given
    torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(lse, expected_lse.transpose(1, 2), **CLOSE)


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ({"qv": torch.ones(1)}, "qv=None only, got Tensor"),
        ({"q_descale": torch.ones(1)}, "q_descale=None only"),
        ({"k_descale": torch.ones(1)}, "k_descale=None only"),
        ({"v_descale": torch.ones(1)}, "v_descale=None only"),
        ({"attention_chunk": 4}, "attention_chunk=0 only, got 4"),
    ],
)
def test_refusals(named: dict, told: str) -> None:
    q = made(2, 3, 2, 16)
    begins = torch.tensor([0, 3], dtype=torch.int32)
    calls = (
        lambda: fa3.flash_attn_func(q, q, q, **named),
        lambda: fa3.flash_attn_varlen_func(*3 * [q[0]], begins, begins, 3, 3, **named),
        lambda: fa3.flash_attn_with_kvcache(q, q, q, **named),
    )
    for call in calls:
        with pytest.raises(NotImplementedError, match=told):
            call()


def test_arguments_without_effect() -> None:
    q, k, v = made(3, 2, 6, 4, 16).unbind()
    plain = fa3.flash_attn_func(q, k, v)
    assert torch.equal(plain, fa3.flash_attn_func(q, k, v, num_splits=3, pack_gqa=True, sm_margin=2))  # fmt: skip
    metadata = fa3.get_scheduler_metadata(2, 6, 6, 4, 4, 16, torch.tensor([6, 6]))
    assert torch.equal(
        fa3.flash_attn_with_kvcache(q[:, :1], k, v, scheduler_metadata=metadata, num_splits=2),
        fa3.flash_attn_with_kvcache(q[:, :1], k, v),
    )


def test_results_are_contiguous() -> None:
    """As theirs, whatever the memory of q: callers take views of them."""
    q, k, v = (x.transpose(1, 2) for x in made(3, 2, 4, 6, 16).unbind())
    begins = torch.tensor([0, 6], dtype=torch.int32)
    for out in (
        fa3.flash_attn_func(q, k, v),
        fa3.flash_attn_varlen_func(q[0], k[0], v[0], begins, begins, 6, 6),
        fa3.flash_attn_with_kvcache(q, k, v),
        fa3.flash_attn_with_kvcache(q[:, :1], k, v),
    ):
        assert out.is_contiguous()


def test_results_of_interface_2_are_dense_in_the_last_dimension() -> None:
    """Theirs have q's memory, or that of a copy where q's last dimension has strides."""
    q, k, v = (x.permute(0, 1, 3, 2) for x in made(3, 2, 6, 16, 4).unbind())
    begins = torch.tensor([0, 6], dtype=torch.int32)
    for out in (
        flash_attn.flash_attn_func(q, k, v),
        flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], begins, begins, 6, 6),
        flash_attn.flash_attn_with_kvcache(q, k, v),
    ):
        assert out.stride(-1) == 1
