"""The formula in plain torch: scores in memory, softmax in fp32."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..decode_inputs import DecodeInputs
from ..shapes import AttentionCase, DecodeCase
from .base import Attention, DecodeCall, Implementation


class Eager(Implementation):
    name = "eager"

    def available(self, device: torch.device) -> str | None:
        return None

    def attention(self, case: AttentionCase, device: torch.device) -> Attention:
        scores = case.batch * case.heads * case.seq_len**2
        # Scores, fp32 softmax, probabilities and their gradients, as counted on one forward +
        # backward.
        needed = scores * 16
        if device.type == "cuda" and needed > torch.cuda.mem_get_info(device)[0]:
            raise MemoryError(f"the N×N scores need about {needed / 2**30:.0f} GiB")
        mask = None
        if case.causal:
            ones = torch.ones(case.seq_len, case.seq_len, dtype=torch.bool, device=device)
            mask = ones.triu(1)
        return lambda q, k, v: _formula(q, k, v, mask)

    def decode(self, case: DecodeCase, copies: Sequence[DecodeInputs]) -> list[DecodeCall]:
        return [functools.partial(_decode, x, case.ragged is not None) for x in copies]


def _decode(x: DecodeInputs, ragged: bool) -> Tensor:
    k, v = (
        _dequantised(_gathered(cache, x.page_table), scale, x.q.dtype)
        for cache, scale in ((x.k, x.k_scale), (x.v, x.v_scale))
    )
    mask = None
    if ragged or x.page_table is not None:
        beyond = torch.arange(k.shape[2], device=k.device) >= x.kv_lens[:, None]
        mask = beyond[:, None, None, None]
    return _formula(x.q, k, v, mask)


def _gathered(cache: Tensor, page_table: Tensor | None) -> Tensor:
    if page_table is None:
        return cache
    pages = cache[page_table.long()]  # (B, pages, H_kv, page, D)
    return pages.transpose(1, 2).flatten(2, 3)


def _dequantised(cache: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    return cache if scale is None else (cache.float() * scale[..., None]).to(dtype)


def _formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    batch, _, queries, head_dim = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, queries, head_dim)
    scores = (grouped @ k.unsqueeze(2).transpose(-1, -2)) * head_dim**-0.5
    if mask is not None:
        scores = scores.masked_fill(mask, float("-inf"))
    weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
    return (weights @ v.unsqueeze(2)).reshape(q.shape)
