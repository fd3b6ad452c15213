"""FlashAttention-3 where its wheel is installed: forward only, in its own (B, S, H, D) memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..decode_inputs import DecodeInputs
from ..shapes import AttentionCase, DecodeCase
from .base import Attention, DecodeCall, Implementation, first, missing


class FlashAttention3(Implementation):
    name = "fa3"
    memory = "BSHD"
    differentiable = False

    def available(self, device: torch.device) -> str | None:
        return missing("flash_attn_interface") or super().available(device)

    def attention(self, case: AttentionCase, device: torch.device) -> Attention:
        from flash_attn_interface import flash_attn_func

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return first(flash_attn_func(q, k, v, causal=case.causal)).transpose(1, 2)

        return call

    def decode(self, case: DecodeCase, copies: Sequence[DecodeInputs]) -> list[DecodeCall]:
        from flash_attn_interface import flash_attn_with_kvcache

        self.refuse(case, cache=True)  # its fp8 caches need fp8 queries
        return [
            functools.partial(
                flash_attn_with_kvcache,
                *(t.transpose(1, 2) for t in (x.q, x.k, x.v)),
                cache_seqlens=x.kv_lens,
                page_table=x.page_table,
            )
            for x in copies
        ]
