"""The backward's own formula in float64, from what the forward saved: out as it was rounded, and lse."""

from __future__ import annotations

import torch
from torch import Tensor


def gradients_of_saved(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor, window: tuple[int, int],
    lens: tuple[int, ...] | None, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
) -> dict[str, Tensor | tuple[Tensor, Tensor]]:  # fmt: skip
    """Of q (B, H, M, D), k and v (B, H_kv, N, D); of slopes and sinks with the same sum of absolute values.

    With the saved out in delta = rowsum(dout ∘ out) - dlse a kernel's error is that of its own arithmetic alone.
    """
    q, k, v, out, lse, dout, dlse = (x.detach().double() for x in (q, k, v, out, lse, dout, dlse))
    group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    of_heads = [x.repeat_interleave(group, 1) for x in (k, v)]
    queries, keys = torch.arange(q.shape[2], device=q.device), torch.arange(k.shape[2], device=q.device)  # fmt: skip
    ends = torch.tensor(lens or [k.shape[2]] * len(q), device=q.device)[:, None, None]
    away = keys - (queries[:, None] + ends - q.shape[2])
    left, right = window
    seen = (keys < ends) & ((away <= right) | (right < 0)) & ((away >= -left) | (left < 0))
    scores = scale * q @ of_heads[0].mT
    if alibi_slopes is not None:
        slopes = alibi_slopes.detach().double().expand(len(q), -1)[..., None, None]
        scores = scores - slopes * away.abs()[:, None]
    finite = lse.masked_fill(lse.isinf(), 0.0)
    p = (scores - finite[..., None]).exp().masked_fill(~seen[:, None], 0.0)
    delta = (dout * out).sum(-1) - dlse
    ds = p * (dout @ of_heads[1].mT - delta[..., None])
    found = dict(
        dq=scale * ds @ of_heads[0],
        dk=(scale * ds.mT @ q).unflatten(1, (-1, group)).sum(2),
        dv=(p.mT @ dout).unflatten(1, (-1, group)).sum(2),
    )
    if alibi_slopes is not None:
        parts = ds * away.abs()[:, None]
        over = (2, 3) if alibi_slopes.dim() == 2 else (0, 2, 3)
        found["alibi_slopes"] = -parts.sum(over), parts.abs().sum(over)
    if sinks is not None:
        weights = (sinks.detach().double()[:, None] - finite).exp().masked_fill(lse.isinf(), 0.0)
        found["sinks"] = -(weights * delta).sum((0, 2)), (weights * delta).abs().sum((0, 2))
    return found
