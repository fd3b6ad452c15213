"""FlashAttention-3 where its wheel is installed: forward only, in its own (B, S, H, D) memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import features
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
        from flash_attn_interface import flash_attn_func, flash_attn_varlen_func

        extras = features.extras_of(case, device)
        options: dict[str, object] = {"causal": case.causal}
        if case.feature == "softcap":
            options["softcap"] = features.SOFTCAP
        elif extras.window is not None:
            options["window_size"] = (extras.window - 1, 0)
        elif case.feature not in (None, "plain", "varlen"):
            raise NotImplementedError(f"fa3's adapter has no form for {case.feature}")
        begins, length = extras.cu_seqlens, case.seq_len

        def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = (x[0].transpose(0, 1) for x in (q, k, v))
            out = first(flash_attn_varlen_func(*rows, begins, begins, length, length, **options))
            return out.transpose(0, 1)[None]

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return first(flash_attn_func(q, k, v, **options)).transpose(1, 2)

        return call if begins is None else packed

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
