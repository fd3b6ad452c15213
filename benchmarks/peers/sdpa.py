"""scaled_dot_product_attention, held to one of torch's backends where one is named, with enable_gqa.

A feature of a case is written out as one mask, where SDPA has no argument for it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..decode_inputs import DecodeInputs
from ..features import DROPOUT, Extras, added, extras_of
from ..runner import DTYPES
from ..shapes import AttentionCase, DecodeCase
from .base import Attention, DecodeCall, Implementation

#: Features for which causal SDPA needs no mask, and its dropout there.
NO_MASK = {None: 0.0, "plain": 0.0, "dropout": DROPOUT}
#: Keys that a written-out sink adds: SDPA wants masks whose rows are multiples of 16 bytes.
SINK_KEYS = 8


class Sdpa(Implementation):
    """backend None: torch's choice, on any device. masks: what needs no mask is given one all the same, and nothing else."""

    def __init__(self, name: str, backend: SDPBackend | None = None, masks: bool = False) -> None:
        self.name, self._backend, self._masks = name, backend, masks

    def available(self, device: torch.device) -> str | None:
        return None if self._backend is None else super().available(device)

    def session(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self._backend is None else sdpa_kernel(self._backend)

    def attention(self, case: AttentionCase, device: torch.device) -> Attention:
        extras = extras_of(case, device)
        sdpa = functools.partial(
            F.scaled_dot_product_attention, enable_gqa=case.heads != case.kv_heads,
            dropout_p=NO_MASK.get(case.feature, 0.0),
        )  # fmt: skip
        if self._masks and case.feature not in NO_MASK:
            raise NotImplementedError("sdpa itself has a mask here")
        if case.feature == "softcap":
            raise NotImplementedError("sdpa has no softcap")
        if case.feature in NO_MASK and not self._masks:
            return functools.partial(sdpa, is_causal=case.causal)
        if extras.sinks is not None:
            return _with_a_sink_key(case, extras, sdpa)
        if not extras.trained:
            return functools.partial(sdpa, attn_mask=added(case, extras, DTYPES[case.dtype]))
        # Written out in each call, where a bias is trained.
        return lambda q, k, v: sdpa(q, k, v, attn_mask=added(case, extras, q.dtype))

    def decode(self, case: DecodeCase, copies: Sequence[DecodeInputs]) -> list[DecodeCall]:
        self.refuse(case, paged=True, ragged=True, cache=True)
        gqa = case.heads != case.kv_heads
        sdpa = F.scaled_dot_product_attention
        return [functools.partial(sdpa, x.q, x.k, x.v, enable_gqa=gqa) for x in copies]


def _with_a_sink_key(case: AttentionCase, extras: Extras, sdpa: Attention) -> Attention:
    """A key of zeros, whose score is the sink and whose value adds nothing."""
    sink = torch.full((case.heads, case.seq_len, SINK_KEYS), float("-inf"), device=extras.device)
    sink[..., 0] = extras.sinks[:, None]
    causal = added(case, extras, torch.float32)[0].expand(case.heads, -1, -1)
    mask = torch.cat([causal, sink], -1).to(DTYPES[case.dtype])[None]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (F.pad(x, (0, 0, 0, SINK_KEYS)) for x in (k, v))
        return sdpa(q, k, v, attn_mask=mask)

    return call
