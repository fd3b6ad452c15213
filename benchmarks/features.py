"""What attention does besides plain causal masks: the tensors of a case that asks for it, and what it amounts to.

    plain, bias (1, H, S, S), bias-grad (with its gradient), alibi, softcap, windowW, sinks, dropout,
    lengths (the last quarter of the keys is padding), varlen (documents packed one after the other, each attending to
    itself)

Each peer has it the best way that it knows: ours through its keywords, FlexAttention through score and mask functions,
`sdpa` through scaled_dot_product_attention with what the feature amounts to written out as one additive or boolean
mask (dropout through its own argument), and `sdpa-mask` the same where `sdpa` needs no mask, being told that it is
causal.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .runner import DTYPES, generator
from .shapes import AttentionCase

DROPOUT, SOFTCAP = 0.1, 30.0
#: Where varlen's documents end, in parts of the whole.
DOCUMENTS = (0.4, 0.65, 0.85, 0.95, 1.0)


class Extras(NamedTuple):
    """A case's tensors beside q, k, v; None where its feature has none."""

    device: torch.device
    bias: Tensor | None = None  # (1, H, S, S), of q's dtype
    slopes: Tensor | None = None  # (H,) fp32
    sinks: Tensor | None = None  # (H,) fp32
    window: int | None = None
    cu_seqlens: Tensor | None = None  # (documents + 1,) int32
    kv_lens: Tensor | None = None  # (1,) int32

    @property
    def trained(self) -> tuple[Tensor, ...]:
        """What wants a gradient besides q, k, v."""
        return tuple(x for x in self[1:4] if x is not None and x.requires_grad)

    def documents(self, length: int) -> Tensor:
        """(length,): which document each position belongs to; 0 without documents."""
        position = torch.arange(length, device=self.device)
        if self.cu_seqlens is None:
            return torch.zeros_like(position)
        return torch.searchsorted(self.cu_seqlens[1:], position, right=True)


@functools.lru_cache(maxsize=1)  # every implementation of a case is given the same ones
def extras_of(case: AttentionCase, device: torch.device) -> Extras:
    made = generator(device, 1)
    heads, length, feature = case.heads, case.seq_len, case.feature or "plain"
    if feature.startswith("bias"):
        bias = torch.empty(1, heads, length, length, dtype=DTYPES[case.dtype], device=device)
        return Extras(device, bias.normal_(generator=made).requires_grad_(feature == "bias-grad"))
    if feature == "alibi":
        powers = torch.arange(1, heads + 1, device=device) / heads
        return Extras(device, slopes=2.0 ** (-8 * powers))
    if feature == "sinks":
        return Extras(device, sinks=torch.randn(heads, generator=made, device=device))
    if feature.startswith("window"):
        return Extras(device, window=int(feature.removeprefix("window")))
    if feature == "lengths":
        return Extras(
            device, kv_lens=torch.tensor([length * 3 // 4], dtype=torch.int32, device=device)
        )
    if feature == "varlen":
        ends = [0, *(round(part * length) for part in DOCUMENTS)]
        return Extras(device, cu_seqlens=torch.tensor(ends, dtype=torch.int32, device=device))
    if feature not in ("plain", "softcap", "dropout"):
        raise ValueError(f"feature must be one of those in cases.py, got {feature!r}")
    return Extras(device)


def added(case: AttentionCase, extras: Extras, dtype: torch.dtype) -> Tensor:
    """What the feature adds to scores, masks included: (1, H or 1, S, S)."""
    position = torch.arange(case.seq_len, device=extras.device)
    distance = position[:, None] - position[None, :]
    hidden = distance < 0
    if extras.window is not None:
        hidden |= distance >= extras.window
    if extras.kv_lens is not None:
        hidden |= position[None, :] >= extras.kv_lens
    document = extras.documents(case.seq_len)
    hidden |= document[:, None] != document[None, :]
    scores = torch.zeros(1, 1, 1, 1, dtype=dtype, device=extras.device)
    if extras.bias is not None:
        scores = extras.bias.to(dtype)
    elif extras.slopes is not None:
        scores = (-extras.slopes[:, None, None] * distance)[None].to(dtype)
    return scores.masked_fill(hidden, float("-inf"))


def exact_options(case: AttentionCase, extras: Extras, group: int) -> dict[str, object]:
    """Keywords of `exact_attention` for the last `group` heads."""
    scores = added(case, extras, torch.float32).detach()[0, -group:]
    sinks = None if extras.sinks is None else extras.sinks[-group:]
    softcap = SOFTCAP if case.feature == "softcap" else 0.0
    return dict(added=scores, softcap=softcap, sinks=sinks)
