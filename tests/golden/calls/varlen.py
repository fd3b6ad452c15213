"""`varlen_attention`: packed sequences, keys packed or on pages."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import torch_fdattn
from tests.golden.calls.common import Call, fp32, lengths, new, trained
from tests.golden.device import A100
from torch_fdattn.ops.determinism import ordered

B, H, KV, T, D = 8, 8, 2, 2048, 128


def begins(tokens: int = T) -> torch.Tensor:
    """Of sequences of equal length."""
    return torch.arange(0, tokens + 1, tokens // B, dtype=torch.int32)


def packed(d: int = D, dtype: torch.dtype = torch.bfloat16, keys: int = T) -> dict[str, object]:
    q, k, v = (new(t, heads, d, dtype=dtype) for t, heads in ((T, H), (keys, KV), (keys, KV)))
    return dict(q=q, k=k, v=v, cu_seqlens_q=begins())


def paged(page: int = 16) -> dict[str, object]:
    pages = dict(k=new(512, KV, page, D), v=new(512, KV, page, D))
    return packed() | pages | dict(page_table=lengths(B, 64), kv_lens=lengths(B), causal=True)


def forward(name: str, given: dict, **options) -> Call:
    return Call(f"varlen/{name}", torch_fdattn.varlen_attention, given, **options)


def training(name: str, given: dict, *wanted: str, **options) -> Call:
    q, v = given["q"], given["v"]
    dout = dict(dout=new(*q.shape[:2], v.shape[2], dtype=q.dtype))
    op = trained(torch_fdattn.varlen_attention, ("q", "k", "v", *wanted))
    return Call(f"varlen/{name}/backward", op, dout | given, **options)


def calls() -> Iterator[Call]:
    causal = dict(causal=True)
    yield training("full", packed())
    yield training("causal", packed() | causal)
    yield training("causal/ordered", packed() | causal, setting=ordered)
    yield training("causal/a100", packed() | causal, device=A100)
    yield training("window", packed() | dict(window=(511, 0)))
    yield training("keys", packed(keys=2 * T) | dict(cu_seqlens_k=begins(2 * T)))
    yield training("d64", packed(64) | causal)
    yield training("d256", packed(256) | causal)
    yield training("fp32", packed(64, torch.float32))
    yield training("dlse", packed() | dict(dlse=fp32(H, T)))
    bounds = dict(
        kv_lens=lengths(B), q_start=lengths(B), kv_start=lengths(B), kv_block=16, kv_stride=64
    )
    yield forward("positions", packed() | bounds | dict(window=(511, 0)))
    options = dict(softcap=30.0, alibi_slopes=fp32(B, H), sinks=new(H))
    yield training("sinks", packed() | causal | dict(sinks=new(H)), "sinks")
    yield training("softcap+alibi+sinks", packed() | causal | options, "alibi_slopes", "sinks")
    mask = dict(attn_mask=new(H, 256, 256))
    yield training("mask/float", packed() | mask, "attn_mask")
    yield training("mask/float/own", packed() | dict(attn_mask=new(B, H, 256, 256)), "attn_mask")
    row = dict(attn_mask=new(B, 1, 1, 256, dtype=torch.bool))
    yield training("mask/bool/row", packed() | row)
    seed = dict(dropout_p=0.1, dropout_seed=torch.zeros(2, dtype=torch.int64))
    yield training("dropout", packed() | seed)
    k = new(T, 2 * KV, D)
    q = new(H, T, D).transpose(0, 1)
    strided = dict(q=q, k=k[:, ::2], v=k[:, 1::2], cu_seqlens_q=begins().repeat_interleave(2)[::2])
    yield forward("layout/strided", strided | causal)
    yield forward("paged", paged())
    yield forward("paged/64", paged(64))
    yield forward("paged/window", paged() | dict(window=(511, 0), causal=False))
    pages = dict(k=new(512, 16, KV, D).transpose(1, 2), v=new(512, 16, KV, D).transpose(1, 2))
    table = dict(page_table=lengths(64, B).t())
    yield forward("paged/layout", paged() | pages | table)
    yield forward("paged/scores", paged() | dict(softcap=30.0, alibi_slopes=fp32(H), sinks=new(H)))
