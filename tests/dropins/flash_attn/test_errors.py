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
    (dict(return_attn_probs="False"), TypeError, "return_attn_probs must be a bool, got str"),
    (dict(softcap=float("nan")), ValueError, "softcap must be a positive number, or 0 or less for none, got nan"),
    (dict(softmax_scale=10**40), ValueError, "softmax_scale must be a positive finite number or None, got 1e+40"),
]  # fmt: skip
VARLEN = [
    (dict(q=Q), ValueError, "q must have 3 dimensions (tokens, heads, head_dim), got shape (2, 5, 4, 16)"),
    (dict(cu_seqlens_q=BEGINS.long()), TypeError, "cu_seqlens_q must be int32, got torch.int64"),
    (dict(cu_seqlens_q=BEGINS[:1]), ValueError, "cu_seqlens_q must have shape (sequences + 1,) with at least one sequence, got (1,)"),
    (dict(cu_seqlens_k=BEGINS[:2]), ValueError, "cu_seqlens_k must have shape (3,) like cu_seqlens_q, got (2,)"),
    (dict(cu_seqlens_k=None), TypeError, "cu_seqlens_k must be a torch.Tensor, got NoneType"),
    (dict(cu_seqlens_q=BEGINS + 1), ValueError, "cu_seqlens_q must grow from 0 to at most 7, got [1, 4, 8]"),
    (dict(cu_seqlens_k=BEGINS * 2), ValueError, "cu_seqlens_k must grow from 0 to at most 7, got [0, 6, 14]"),
    (dict(cu_seqlens_k=BEGINS.flip(0)), ValueError, "cu_seqlens_k must grow from 0 to at most 7, got [7, 3, 0]"),
    (dict(k=PAGES, v=PAGES, block_table=TABLE, cu_seqlens_k=-BEGINS), ValueError, "cu_seqlens_k must grow from 0, got [0, -3, -7]"),
    (dict(max_seqlen_q="x"), TypeError, "max_seqlen_q must be an int, got str"),
    (dict(max_seqlen_q=-1), ValueError, "max_seqlen_q must be at least 0, got -1"),
    (dict(max_seqlen_k=LENS), TypeError, "max_seqlen_k must be an int, or a tensor of one, got torch.int32 of shape (2,)"),
    (dict(max_seqlen_q=3, dropout_p=0.5, return_attn_probs=True), ValueError, "max_seqlen_q must be at least the longest sequence's length 4 with return_attn_probs, got 3"),
    (dict(k=PAGES, v=PAGES, block_table=TABLE, cu_seqlens_k=None), TypeError, "cu_seqlens_k must be a torch.Tensor, got NoneType"),
    (dict(return_attn_probs="x"), TypeError, "return_attn_probs must be a bool, got str"),
    (dict(block_table=TABLE), ValueError, "k must have 4 dimensions (pages, page, heads, head_dim) with block_table, got shape (7, 2, 16)"),
    (dict(k=PAGES, v=PAGES, block_table=TABLE, cu_seqlens_k=BEGINS * 2), ValueError, "cu_seqlens_k must give each sequence at most the 4 tokens of block_table, got lengths [6, 8]"),
    (dict(k=PAGES, v=PAGES, block_table=TABLE + 3), ValueError, "block_table must hold numbers in [0, 3), the pages of k, where a sequence has keys, got [[3], [3]]"),
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
    (dict(cache_batch_idx=LENS), ValueError, "cache_batch_idx must lie in [0, 2), the rows of the cache, got [2, 3]"),
    (dict(cache_batch_idx=LENS, block_table=TABLE), NotImplementedError, "cache_batch_idx must be None with block_table, got a tensor"),
    (dict(k_cache=PAGES, v_cache=PAGES, block_table=TABLE - 1), ValueError, "block_table must hold numbers in [0, 3), the pages of k, where a sequence has keys, got [[-1], [-1]]"),
    (dict(cache_leftpad=LENS, block_table=TABLE), NotImplementedError, "cache_leftpad must be None with block_table, got a tensor"),
    (dict(cache_leftpad=LENS.long()), TypeError, "cache_leftpad must be int32, got torch.int64"),
    (dict(rotary_cos=ANGLES), ValueError, "rotary_sin must be given where rotary_cos is, got None"),
    (dict(rotary_cos=ANGLES, rotary_sin=ANGLES), ValueError, "k and v must be given where rotary_cos and rotary_sin are, got None"),
    (dict(rotary_cos=ANGLES[:6], rotary_sin=ANGLES[:6]), ValueError, "rotary_cos must have a row for each of the cache's 7 positions, got 6"),
    (dict(rotary_cos=ANGLES.half(), rotary_sin=ANGLES.half()), TypeError, "rotary_cos must have dtype torch.float32 like q, got torch.float16"),
    (dict(rotary_cos=torch.rand(7, 9), rotary_sin=torch.rand(7, 9)), ValueError, "rotary_cos must have shape (positions, rotary_dim / 2) with rotary_dim from 2 to q's head_dim 16, got (7, 9)"),
    (dict(num_splits="x"), TypeError, "num_splits must be an int, got str"),
    (dict(return_softmax_lse="x"), TypeError, "return_softmax_lse must be a bool, got str"),
    (dict(cache_seqlens=2**40), ValueError, "cache_seqlens must be an int32 of 0 or more, got 1099511627776"),
    (dict(cache_seqlens=-1), ValueError, "cache_seqlens must be an int32 of 0 or more, got -1"),
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
    refuses(
        lambda: fa.flash_attn_kvpacked_func(Q, torch.randn(2, 7, 2, 2, 8)),
        ValueError,
        "kv's k must have shape (2, 7, 2, 16) like q, got (2, 7, 2, 8)",
    )
    refuses(
        lambda: fa.flash_attn_varlen_kvpacked_func(
            TOKENS, torch.randn(7, 2, 2, 16).half(), BEGINS, BEGINS, 4, 4
        ),
        TypeError,
        "kv's k must have dtype torch.float32 like q, got torch.float16",
    )
    refuses(
        lambda: fa.flash_attn_varlen_qkvpacked_func(torch.randn(7, 3, 2, 16), BEGINS, -4),
        ValueError,
        "max_seqlen must be at least 0, got -4",
    )


#: Of FlashAttention-3's functions: what has no effect is of its type; packed heads; the page table by its own name.
INTERFACE_3 = [
    ("func", dict(num_splits="x"), TypeError, "num_splits must be an int, got str"),
    ("func", dict(sm_margin=1.5), TypeError, "sm_margin must be an int, got float"),
    ("func", dict(pack_gqa="x"), TypeError, "pack_gqa must be a bool, got str"),
    ("func", dict(return_attn_probs="x"), TypeError, "return_attn_probs must be a bool, got str"),
    ("varlen_func", dict(max_seqlen_k=-2), ValueError, "max_seqlen_k must be at least 0, got -2"),
    ("varlen_func", dict(return_attn_probs="x"), TypeError, "return_attn_probs must be a bool, got str"),
    ("qkvpacked_func", dict(num_heads_q=0), ValueError, "num_heads_q must be positive and leave as many heads of k as of v in qkv (batch, sequence, heads, head_dim), got 0 of 4 heads"),
    ("qkvpacked_func", dict(qkv=Q.int(), num_heads_q=2), TypeError, "qkv must be bfloat16, float16, float32 (or float64 on CPU), got torch.int32"),
    ("qkvpacked_func", dict(num_heads_q=2, v_descale=LENS), NotImplementedError, "flash_attn_qkvpacked_func takes v_descale=None only, got Tensor"),
    ("with_kvcache", dict(max_seqlen_q="x"), TypeError, "max_seqlen_q must be an int, got str"),
    ("with_kvcache", dict(scheduler_metadata=1), TypeError, "scheduler_metadata must be a torch.Tensor, got int"),
    ("with_kvcache", dict(return_softmax_lse="x"), TypeError, "return_softmax_lse must be a bool, got str"),
    ("with_kvcache", dict(page_table=TABLE, cache_seqlens=LENS + 2), ValueError, "(those of page_table where it has pages), got [4, 5]"),
    ("combine", dict(out_partial=Q[None].int()), TypeError, "out_partial must be bfloat16, float16, float32 (or float64 on CPU), got torch.int32"),
    ("combine", dict(lse_partial=torch.rand(1, 2, 5, 4).half()), TypeError, "lse_partial must be torch.float32 where out_partial is torch.float32, got torch.float16"),
    ("combine", dict(out="x"), TypeError, "out must be a torch.Tensor, got str"),
    ("combine", dict(out=Q.to("meta")), ValueError, "out must be on cpu like out_partial, got meta"),
    ("combine", dict(out=Q.half(), out_dtype=torch.float32), TypeError, "out must have dtype torch.float32 like out_dtype, got torch.float16"),
    ("combine", dict(out_dtype="x"), TypeError, "out_dtype must be bfloat16, float16, float32 or float64, or None, got 'x'"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "wrong", "kind", "told"), INTERFACE_3)
def test_interface_3(function: str, wrong: dict, kind: type, told: str) -> None:
    pages = wrong.keys() & {"page_table"}
    given = {
        "func": dict(q=Q, k=K, v=K),
        "varlen_func": dict(q=TOKENS, k=TOKENS, v=TOKENS, cu_seqlens_q=BEGINS, cu_seqlens_k=BEGINS, max_seqlen_q=4, max_seqlen_k=4),
        "qkvpacked_func": dict(qkv=Q),
        "with_kvcache": dict(q=Q, k_cache=PAGES if pages else K, v_cache=PAGES if pages else K),
        "combine": dict(out_partial=Q[None], lse_partial=torch.rand(1, 2, 5, 4)),
    }[function]  # fmt: skip
    refuses(lambda: getattr(fa.interface_3, f"flash_attn_{function}")(**{**given, **wrong}), kind, told)  # fmt: skip


HIDDEN, SHOWN = torch.randn(2, 4, 8), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
ROWS = torch.tensor([0, 1, 4])
PADDING = [
    ("unpad_input", (HIDDEN, SHOWN + 1), ValueError, "attention_mask, with unused_mask where that is given, must hold 0 and 1 alone, got values from 1 to 2"),
    ("unpad_input", (HIDDEN, SHOWN, SHOWN), ValueError, "must hold 0 and 1 alone, got values from 0 to 2"),
    ("unpad_input", (HIDDEN.to("meta"), SHOWN), ValueError, "attention_mask must be on meta like hidden_states, got cpu"),
    ("unpad_input_for_concatenated_sequences", (HIDDEN, SHOWN * 3), ValueError, "attention_mask_in_length must hold lengths of 0 or more, of at most 4 a row together like hidden_states, got lengths from 0 on and up to 9 a row"),
    ("pad_input", (HIDDEN[0, :3], ROWS, 2, 2), ValueError, "indices must lie in [0, 4), the rows that there are, got values from 0 to 4"),
    ("pad_input", (HIDDEN[0, :3], ROWS.half(), 2, 4), TypeError, "indices must be int64 or int32 of shape (rows,), got torch.float16 of shape (3,)"),
    ("pad_input", (HIDDEN[0, :3], ROWS, "2", 4), TypeError, "batch must be an int, got str"),
    ("pad_input", (HIDDEN[0, :3], ROWS, 2, -4), ValueError, "seqlen must be an int32 of 0 or more, got -4"),
    ("index_first_axis", (HIDDEN[0], None), TypeError, "indices must be a torch.Tensor, got NoneType"),
    ("index_first_axis_residual", (HIDDEN[0], ROWS), ValueError, "indices must lie in [0, 4), the rows that there are, got values from 0 to 4"),
    ("index_put_first_axis", (HIDDEN[0], ROWS, 5), ValueError, "indices must have shape (4,) like values, got (3,)"),
    ("index_put_first_axis", (HIDDEN[0, :3], ROWS, 5.0), TypeError, "first_axis_dim must be an int, got float"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "given", "kind", "told"), PADDING)
def test_padding(function: str, given: tuple, kind: type, told: str) -> None:
    refuses(lambda: getattr(fa.bert_padding, function)(*given), kind, told)


def test_a_refused_call_writes_nothing() -> None:
    cache = K.clone()
    with pytest.raises(ValueError, match="cache_seqlens must lie in"):
        fa.flash_attn_with_kvcache(Q, cache, cache, Q[:, :5, :2], Q[:, :5, :2], cache_seqlens=LENS)
    assert torch.equal(cache, K)
