"""scaled_dot_product_attention held to one of torch's backends, with enable_gqa."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..decode_inputs import DecodeInputs
from ..shapes import AttentionCase, DecodeCase
from .base import Attention, DecodeCall, Implementation


class Sdpa(Implementation):
    def __init__(self, name: str, backend: SDPBackend) -> None:
        self.name = name
        self._backend = backend

    def session(self) -> contextlib.AbstractContextManager:
        return sdpa_kernel(self._backend)

    def attention(self, case: AttentionCase, device: torch.device) -> Attention:
        gqa = case.heads != case.kv_heads
        return lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=case.causal, enable_gqa=gqa
        )

    def decode(self, case: DecodeCase, copies: Sequence[DecodeInputs]) -> list[DecodeCall]:
        self.refuse(case, paged=True, ragged=True, cache=True)
        gqa = case.heads != case.kv_heads
        sdpa = F.scaled_dot_product_attention
        return [functools.partial(sdpa, x.q, x.k, x.v, enable_gqa=gqa) for x in copies]
