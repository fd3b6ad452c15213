"""The ways to attend that are compared: ours, and torch's scaled_dot_product_attention by backend."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

#: attend(q, k, v, causal, bias) -> out; bias (1, H, S, S_kv) is added to the scores and may want a gradient.
Attend = Callable[[Tensor, Tensor, Tensor, bool, Tensor | None], Tensor]

#: "again" is torch's own choice once more: its backwards on GPUs add up in any order.
_BACKENDS = {
    "sdpa": None,
    "sdpa/again": None,
    "sdpa/math": SDPBackend.MATH,
    "sdpa/efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa/flash": SDPBackend.FLASH_ATTENTION,
    "sdpa/cudnn": SDPBackend.CUDNN_ATTENTION,
}
#: torch's own choice, from weights that were nudged by a rounding, each by other draws.
NUDGED = ("sdpa/nudged1", "sdpa/nudged2", "sdpa/nudged3")
_BACKENDS |= dict.fromkeys(NUDGED)
WAYS = ("fdattn", *_BACKENDS)


def way(name: str) -> Attend:
    if name == "fdattn":
        return _ours
    if name not in _BACKENDS:
        raise ValueError(f"--attention must be of {', '.join(WAYS)}, got {name!r}")
    return _torchs(_BACKENDS[name])


def _ours(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None) -> Tensor:
    import torch_fdattn

    return torch_fdattn.attention(q, k, v, causal=causal, attn_mask=bias)[0]


def _torchs(backend: SDPBackend | None) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None) -> Tensor:
        if bias is not None and causal:  # is_causal beside a mask is an error
            hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
            bias, causal = bias.masked_fill(hidden, float("-inf")), False
        with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal)

    return attend
