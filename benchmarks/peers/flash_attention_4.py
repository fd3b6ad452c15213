"""FlashAttention-4 where its wheel is installed: prefill, forward and backward, in its own (B, S, H, D) memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ..shapes import AttentionCase
from .base import Attention, Implementation, first, missing


class FlashAttention4(Implementation):
    name = "fa4"
    memory = "BSHD"

    def available(self, device: torch.device) -> str | None:
        # Its package holds other versions' modules too, and may be there without them.
        why = missing("flash_attn") or missing("flash_attn.cute")
        return why or super().available(device)

    def attention(self, case: AttentionCase, device: torch.device) -> Attention:
        from flash_attn.cute import flash_attn_func

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return first(flash_attn_func(q, k, v, causal=case.causal)).transpose(1, 2)

        return call
