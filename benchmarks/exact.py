"""Attention in fp64 on one KV head of one sequence: what errors are measured against.

A whole 16k case in fp64 would take more memory than the GPU has; the last sequence's last KV head,
with all its query heads and all its rows, takes milliseconds and meets every tile position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK_BYTES = 2**28  # of one fp64 matrix of scores; six of them live at once


@dataclass(frozen=True)
class HeadSlice:
    """Where a KV head and its query heads lie in (B, H, S, D) tensors: the last of both."""

    group: int

    def queries(self, x: Tensor) -> Tensor:
        return x[-1, -self.group :]

    def keys(self, x: Tensor) -> Tensor:
        return x[-1, -1]


@dataclass(frozen=True)
class Exact:
    """out and dq (group, S, D), dk and dv (S_kv, D); gradients only where dout was given."""

    out: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None, *, causal: bool = False,
    added: Tensor | None = None, softcap: float = 0.0, sinks: Tensor | None = None,
) -> Exact:  # fmt: skip
    """q, dout (group, S, D), k, v (S_kv, D), any float dtype; causal is bottom-right aligned.

    added (group or 1, S, S_kv): to the scores, after the softcap; sinks (group,).
    """
    queries, keys, scale = q.shape[1], k.shape[0], q.shape[2] ** -0.5
    k, v = k.double(), v.double()
    position = torch.arange(keys, device=k.device)
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    dq = torch.empty_like(out) if dout is not None else None
    dk, dv = (torch.zeros_like(k), torch.zeros_like(v)) if dout is not None else (None, None)
    block = max(1, _BLOCK_BYTES // (8 * keys))
    for head in range(q.shape[0]):
        for begin in range(0, queries, block):
            rows = slice(begin, min(begin + block, queries))
            q_rows = q[head, rows].double()
            scores = (q_rows @ k.T).mul_(scale)
            if softcap:
                scores.div_(softcap).tanh_().mul_(softcap)
                slope = 1 - (scores / softcap).square()
            if added is not None:
                scores += added[head % added.shape[0], rows]
            if causal:
                last = position[rows.start : rows.stop, None] + (keys - queries)
                scores.masked_fill_(position[None, :] > last, float("-inf"))
            if sinks is not None:
                sink = sinks[head].double().expand(scores.shape[0], 1)
                weights = torch.cat([scores, sink], 1).softmax(-1)[:, :-1]
            else:
                weights = scores.softmax(-1)
            out[head, rows] = weights @ v
            if dout is not None:
                dout_rows = dout[head, rows].double()
                dv += weights.T @ dout_rows
                delta = (dout_rows * out[head, rows]).sum(-1, keepdim=True)
                dscores = (dout_rows @ v.T).sub_(delta).mul_(weights).mul_(scale)
                if softcap:
                    dscores *= slope
                dq[head, rows] = dscores @ k
                dk += dscores.T @ q_rows
    return Exact(out, dq, dk, dv)


def max_abs_err(value: Tensor, exact: Tensor) -> float:
    """The largest absolute difference; NaN where `value` holds any."""
    return (value.double() - exact).abs().max().item()
