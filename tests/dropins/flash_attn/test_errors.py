"""Wrong calls: each error names argument, expectation and value, and is a RuntimeError as theirs is."""

from __future__ import annotations

import re

import pytest
import torch

from torch_fdattn.dropins import flash_attn as fa

Q, K = torch.randn(2, 5, 4, 16), torch.randn(2, 7, 2, 16)
TOKENS, BEGINS = torch.randn(7, 2, 16), torch.tensor([0, 3, 7], dtype=torch.int32)
TABLE, PAGES = torch.zeros(2, 1, dtype=torch.int32), torch.randn(3, 4, 2, 16)
LENS, ANGLES = torch.tensor([2, 3], dtype=torch.int32), torch.rand(7, 8)

#: of flash_attn_func(Q, K, K, …): what is given, the type of the error, what it says.
DENSE = [
    (dict(q=Q[0]), ValueError, "q must have 4 dimensions (batch, sequence, heads, head_dim), got shape (5, 4, 16)"),
    (dict(q=None), TypeError, "q must be a torch.Tensor, got NoneType"),
    (dict(q=Q.int()), TypeError, "q must be bfloat16, float16, float32 (or float64 on CPU), got torch.int32"),
    (dict(k=K[..., :8]), ValueError, "k must have shape (2, 7, 2, 16) like q, got (2, 7, 2, 8)"),
    (dict(k=K[:1], v=K[:1]), ValueError, "k must have 2 sequences like q, got shape (1, 7, 2, 16)"),
    (dict(v=K[:, :6]), ValueError, "v must have shape (2, 7, 2, 16) like k, got (2, 6, 2, 16)"),
    (dict(k=K.half()), TypeError, "k must have dtype torch.float32 like q, got torch.float16"),
    (dict(q=Q[:, :, :3]), ValueError, "q's head count must be a positive multiple of k's, got 3 query heads and 2 key heads"),
    (dict(q=torch.randn(2, 5, 4, 520), k=torch.randn(2, 7, 2, 520), v=torch.randn(2, 7, 2, 520)), ValueError, "q's head_dim must be from 1 to 512, got 520"),
    (dict(softmax_scale=0.0), ValueError, "softmax_scale must be a positive finite number or None, got 0.0"),
    (dict(softmax_scale="x"), TypeError, "softmax_scale must be a number, got str"),
    (dict(causal="x"), TypeError, "causal must be a bool, got str"),
    (dict(window_size=None), TypeError, "window_size must be two ints (left, right), -1 where unbounded, got None"),
    (dict(window_size=(1,)), TypeError, "window_size must be two ints (left, right), -1 where unbounded, got (1,)"),
    (dict(window_size=(1.5, 0)), TypeError, "window_size must be two ints (left, right), -1 where unbounded, got (1.5, 0)"),
    (dict(softcap="x"), TypeError, "softcap must be a number, got str"),
    (dict(alibi_slopes=torch.rand(3)), ValueError, "alibi_slopes must have shape (4,) or (2, 4), got (3,)"),
    (dict(alibi_slopes=torch.rand(4).half()), TypeError, "alibi_slopes must be float32, got torch.float16"),
    (dict(deterministic="x"), TypeError, "deterministic must be a bool, got str"),
    (dict(dropout_p=1.5), ValueError, "dropout_p must be from 0 to 1, got 1.5"),
    (dict(dropout_p="x"), TypeError, "dropout_p must be a number, got str"),
]  # fmt: skip
VARLEN = [
    (dict(q=Q), ValueError, "q must have 3 dimensions (tokens, heads, head_dim), got shape (2, 5, 4, 16)"),
    (dict(cu_seqlens_q=BEGINS.long()), TypeError, "cu_seqlens_q must be int32, got torch.int64"),
    (dict(cu_seqlens_q=BEGINS[:1]), ValueError, "cu_seqlens_q must have shape (sequences + 1,) with at least one sequence, got (1,)"),
    (dict(cu_seqlens_k=BEGINS[:2]), ValueError, "cu_seqlens_k must have shape (3,) like cu_seqlens_q, got (2,)"),
    (dict(cu_seqlens_k=None), TypeError, "cu_seqlens_k must be a torch.Tensor, got NoneType"),
    (dict(max_seqlen_q="x"), TypeError, "max_seqlen_q must be an int, got str"),
    (dict(block_table=TABLE), ValueError, "k must have 4 dimensions (pages, page, heads, head_dim) with block_table, got shape (7, 2, 16)"),
    (dict(k=PAGES, v=PAGES, block_table=TABLE[:1]), ValueError, "block_table must have shape (2, 1) like the sequences of q, got (1, 1)"),
    (dict(k=PAGES, v=PAGES, block_table=TABLE[0]), ValueError, "block_table must have shape (2, pages a sequence), got (1,)"),
    (dict(k=PAGES, v=PAGES, block_table=TABLE.long()), TypeError, "block_table must be int32, got torch.int64"),
    (dict(alibi_slopes=torch.rand(3, 2)), ValueError, "alibi_slopes must have shape (2,) or (2, 2), got (3, 2)"),
]  # fmt: skip
KVCACHE = [
    (dict(q=Q[0]), ValueError, "q must have 4 dimensions"),
    (dict(k_cache=K.half(), v_cache=K.half()), TypeError, "k_cache must have dtype torch.float32 like q, got torch.float16"),
    (dict(k_cache=K[:1], v_cache=K[:1]), ValueError, "k_cache must have a row for each of q's 2 sequences, got shape (1, 7, 2, 16)"),
    (dict(k=Q[:, :1, :2], v=None), ValueError, "k and v must be given together, got k and no v"),
    (dict(k=Q[:, :1, :3], v=Q[:, :1, :3]), ValueError, "k must have shape (2, 1, 2, 16) like q and k_cache, got (2, 1, 3, 16)"),
    (dict(k=Q[:, :1, :2], v=Q[:, :1, :2], cache_seqlens=None), ValueError, "cache_seqlens must be given where k and v are, got None"),
    (dict(cache_seqlens=LENS.long()), TypeError, "cache_seqlens must be int32, got torch.int64"),
    (dict(cache_seqlens=2.5), TypeError, "cache_seqlens must be an int or an int32 tensor (2,), got float"),
    (dict(cache_seqlens=LENS[:1]), ValueError, "cache_seqlens must have shape (2,) like the sequences of q, got (1,)"),
    (dict(cache_seqlens=8), ValueError, "cache_seqlens must lie in [0, 7] with the new tokens, in a cache of 7 positions"),
    (dict(k=Q[:, :5, :2], v=Q[:, :5, :2]), ValueError, "(those of block_table where it has pages), got [2, 3], and [7, 8] with them"),
    (dict(cache_batch_idx=LENS[:1]), ValueError, "cache_batch_idx must have shape (2,) like the sequences of q, got (1,)"),
    (dict(cache_batch_idx=LENS, block_table=TABLE), NotImplementedError, "cache_batch_idx must be None with block_table, got a tensor"),
    (dict(cache_leftpad=LENS, block_table=TABLE), NotImplementedError, "cache_leftpad must be None with block_table, got a tensor"),
    (dict(cache_leftpad=LENS.long()), TypeError, "cache_leftpad must be int32, got torch.int64"),
    (dict(rotary_cos=ANGLES), ValueError, "rotary_sin must be given where rotary_cos is, got None"),
    (dict(rotary_cos=ANGLES, rotary_sin=ANGLES), ValueError, "k and v must be given where rotary_cos and rotary_sin are, got None"),
    (dict(rotary_cos=ANGLES[:6], rotary_sin=ANGLES[:6]), ValueError, "rotary_cos must have a row for each of the cache's 7 positions, got 6"),
    (dict(rotary_cos=ANGLES.half(), rotary_sin=ANGLES.half()), TypeError, "rotary_cos must have dtype torch.float32 like q, got torch.float16"),
    (dict(rotary_cos=torch.rand(7, 9), rotary_sin=torch.rand(7, 9)), ValueError, "rotary_cos must have shape (positions, rotary_dim / 2) with rotary_dim from 2 to q's head_dim 16, got (7, 9)"),
    (dict(num_splits="x"), TypeError, "num_splits must be an int, got str"),
]  # fmt: skip


def refuses(call, kind: type, told: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(told)) as caught:
        call()
    assert isinstance(caught.value, kind)


@pytest.mark.parametrize(("wrong", "kind", "told"), DENSE)
def test_dense(wrong: dict, kind: type, told: str) -> None:
    refuses(lambda: fa.flash_attn_func(**{"q": Q, "k": K, "v": K, **wrong}), kind, told)


@pytest.mark.parametrize(("wrong", "kind", "told"), VARLEN)
def test_varlen(wrong: dict, kind: type, told: str) -> None:
    given = dict(q=TOKENS, k=TOKENS, v=TOKENS, cu_seqlens_q=BEGINS, cu_seqlens_k=BEGINS, max_seqlen_q=4, max_seqlen_k=4)  # fmt: skip
    refuses(lambda: fa.flash_attn_varlen_func(**{**given, **wrong}), kind, told)


@pytest.mark.parametrize(("wrong", "kind", "told"), KVCACHE)
def test_kvcache(wrong: dict, kind: type, told: str) -> None:
    given = dict(q=Q, k_cache=K.clone(), v_cache=K.clone(), cache_seqlens=LENS)
    refuses(lambda: fa.flash_attn_with_kvcache(**{**given, **wrong}), kind, told)


def test_packed_tensors() -> None:
    refuses(
        lambda: fa.flash_attn_qkvpacked_func(Q),
        ValueError,
        "qkv must have 5 dimensions (batch, sequence, 3, heads, head_dim), got shape (2, 5, 4, 16)",
    )
    refuses(
        lambda: fa.flash_attn_kvpacked_func(Q, torch.randn(2, 7, 3, 2, 16)),
        ValueError,
        "kv must have shape (batch, sequence, 2, heads, head_dim), got (2, 7, 3, 2, 16)",
    )
    refuses(
        lambda: fa.flash_attn_varlen_qkvpacked_func(torch.randn(7, 3, 2, 16), BEGINS.long(), 4),
        TypeError,
        "cu_seqlens must be int32, got torch.int64",
    )
    refuses(
        lambda: fa.flash_attn_qkvpacked_func(torch.zeros(2, 5, 3, 4, 16, dtype=torch.int32)),
        TypeError,
        "qkv must be bfloat16, float16, float32 (or float64 on CPU), got torch.int32",
    )


def test_a_refused_call_writes_nothing() -> None:
    cache = K.clone()
    with pytest.raises(ValueError, match="cache_seqlens must lie in"):
        fa.flash_attn_with_kvcache(Q, cache, cache, Q[:, :5, :2], Q[:, :5, :2], cache_seqlens=LENS)
    assert torch.equal(cache, K)
