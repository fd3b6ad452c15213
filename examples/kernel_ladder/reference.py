"""reference: attention as the formula says it, in plain PyTorch.

Mapping  None of ours: two batched matmuls and a softmax, each a library kernel over all tokens and heads.
         The query heads of a group stand below each other as rows, so that K and V are not repeated.
Leaves   The scores (B, H, T, N) are written to memory and read back, several times, in fp32: for a prompt
         of 2048 tokens and 9 heads 151 MB where Q, K and V together are 4 MB. And with B > 1 matmul copies
         K and V first, because a cache's slices cannot be flattened to one batch dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Causal attention of the last T of N tokens: q (B, H, T, D), k and v (B, H_kv, N, D) -> like q."""
    _, heads, q_len, dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    if heads % kv_heads or q_len > kv_len:
        raise ValueError(f"needs H a multiple of H_kv and T <= N, got {q.shape} and {k.shape}")
    scale = dim**-0.5 if scale is None else scale

    rows = q.unflatten(1, (kv_heads, -1)).flatten(2, 3)  # (B, H_kv, group · T, D)
    scores = (rows @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
    token = torch.arange(q_len, device=q.device).repeat(heads // kv_heads)
    key = torch.arange(kv_len, device=q.device)
    scores.masked_fill_(key > (token + kv_len - q_len)[:, None], float("-inf"))
    out = scores.softmax(-1).to(v.dtype) @ v
    return out.unflatten(2, (-1, q_len)).flatten(1, 2)
