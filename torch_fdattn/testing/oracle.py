"""Attention and merging as the textbook writes them, with gradients by torch.autograd.

Independent of `ops/*/reference.py` on purpose: no shared mask code, one sequence at a time, invalid keys
cut off instead of masked, no hand-written derivative. In fp64 it is the truth that errors are measured
against; at a lower dtype it is "torch at the dtype" of the error rule, in one of four FORMULATIONS: by formula
head by head, by formula with the heads of a group in one matmul, by torch's scaled_dot_product_attention, and,
since that one takes no features, by formula with the derivative that it has: weights from the lse, and their
mean gradient from the output. A dtype in place of a formulation is that derivative with the output rounded at this dtype
and nothing else: in fp64, what saving the output costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

FORMULATIONS = ("textbook", "grouped", "fused", "streamed")


def visible_keys(
    q_len: int, kv_len: int, *, q_start: int | None = None, kv_start: int = 0, kv_block: int = 0,
    kv_stride: int = 0, window: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    """The boolean [query, key] mask of one sequence of kv_len valid keys, by DESIGN.md's positions."""
    distance = distances(q_len, kv_len, q_start, kv_start, kv_block, kv_stride)
    left, right = window
    lowest = -left if left >= 0 else torch.iinfo(torch.int64).min
    highest = right if right >= 0 else torch.iinfo(torch.int64).max
    return (lowest <= distance) & (distance <= highest)


def distances(
    q_len: int, kv_len: int, q_start: int | None, kv_start: int, kv_block: int, kv_stride: int
) -> Tensor:
    """Position of the key minus position of the query, [query, key]."""
    j = torch.arange(kv_len)
    keys = kv_start + (
        j.div(kv_block, rounding_mode="floor") * kv_stride + j % kv_block if kv_block else j
    )
    first = kv_start + kv_len - q_len if q_start is None else q_start
    return keys[None, :] - torch.arange(first, first + q_len)[:, None]


def attention_oracle(
    q: Tensor, k: Tensor, v: Tensor, kv_lens: Sequence[int] | None = None, *, causal: bool = False,
    window: tuple[int, int] | None = None, scale: float | None = None,
    q_start: Sequence[int] | None = None, kv_start: Sequence[int] | None = None,
    kv_block: int = 0, kv_stride: int = 0, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None, attn_mask: Tensor | None = None, kept: Tensor | None = None,
    formulation: str | torch.dtype = "textbook",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) at the inputs' own dtype, differentiable; lengths and positions as Python ints.

    softcap, slopes (H,) or (B, H), sinks (H,) and an explicit mask go by the formulas of `ops/scores.py`, never
    fused. kept (B, H, S, S_kv), dropout's, multiplies the weights.
    """
    batch, heads, q_len, head_dim = q.shape
    kv_heads, capacity, v_dim = k.shape[1], k.shape[2], v.shape[3]
    plain = (
        not softcap
        and alibi_slopes is None
        and sinks is None
        and attn_mask is None
        and kept is None
    )
    scale = head_dim**-0.5 if scale is None else scale
    left, right = window or (-1, -1)
    group = heads // kv_heads

    def matmul(x: Tensor, y: Tensor) -> Tensor:
        """x (H, M, C) by y (H_kv, C, N)."""
        if formulation != "grouped":
            return x @ y.repeat_interleave(group, 0)
        return (
            (x.unflatten(0, (kv_heads, group)).flatten(1, 2) @ y)
            .unflatten(1, (group, -1))
            .flatten(0, 1)
        )

    outs, lses = [], []
    for b in range(batch):
        kv_len = capacity if kv_lens is None else min(max(kv_lens[b], 0), capacity)
        positions = dict(
            q_start=q_start[b] if q_start else None, kv_start=kv_start[b] if kv_start else 0,
            kv_block=kv_block, kv_stride=kv_stride,
        )  # fmt: skip
        window_here = (left, 0 if causal else right)
        seen = visible_keys(q_len, kv_len, **positions, window=window_here).to(q.device)
        alive = seen.any(-1)
        keys, values = k[b, :, :kv_len], v[b, :, :kv_len]
        rows = alive.nonzero()[:, 0]
        queries, seen = q[b][:, rows], seen[rows]
        if not len(rows):
            out, lse = q.new_zeros(heads, 0, v_dim), q.new_zeros(heads, 0)
        else:
            scores = matmul(queries, keys.mT) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if alibi_slopes is not None:
                slopes = alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[b]
                away = distances(q_len, kv_len, **positions).abs().to(q.device)[rows]
                scores = scores - slopes.to(q)[:, None, None] * away
            dead = None  # rows of single heads from which the explicit mask hides everything
            if attn_mask is not None:
                entries = attn_mask.expand(batch, heads, q_len, capacity)[b][:, rows, :kv_len]
                hidden = ~entries if entries.dtype == torch.bool else entries == float("-inf")
                seen = seen & ~hidden
                dead = ~seen.any(-1, keepdim=True)
                if entries.dtype != torch.bool:
                    scores = scores + entries.to(q)
            scores = scores.masked_fill(~seen, float("-inf"))
            if (
                dead is not None and sinks is None
            ):  # finite stand-ins: autograd knows no -inf minus -inf
                scores = scores.masked_fill(dead, 0.0)
            if sinks is not None:  # one more key, whose value is zero
                sink = sinks.to(q)[:, None, None].expand(heads, len(rows), 1)
                scores = torch.cat([scores, sink], -1)
                values = torch.cat([values, values.new_zeros(kv_heads, 1, v_dim)], 1)
            lse = torch.logsumexp(scores, -1)
            if formulation == "fused" and plain:
                out = F.scaled_dot_product_attention(
                    queries[None], keys[None], values[None], seen, scale=scale, enable_gqa=True
                )[0]
            else:
                factors = None
                if kept is not None:
                    factors = kept[b].to(rows.device)[:, rows, :kv_len].to(q)
                    if sinks is not None:  # which has no value to drop
                        factors = F.pad(factors, (0, 1))
                if formulation == "streamed" or isinstance(formulation, torch.dtype):
                    each = values.repeat_interleave(group, 0)
                    saved = scores.dtype if formulation == "streamed" else formulation
                    out, lse = _Streamed.apply(scores, each, factors, saved)
                else:
                    weights = torch.softmax(scores, -1)
                    out = matmul(weights if factors is None else weights * factors, values)
            if dead is not None and sinks is None:
                out, lse = out.masked_fill(dead, 0.0), lse.masked_fill(dead[..., 0], float("-inf"))
        outs.append(q.new_zeros(heads, q_len, v_dim).index_copy(1, rows, out))
        nothing = q.new_full((heads, q_len), float("-inf"))
        if sinks is not None:
            nothing = sinks.to(q)[:, None].repeat(1, q_len)
        lses.append(nothing.index_copy(1, rows, lse))
    if not batch:
        return q.new_zeros(*q.shape[:-1], v_dim), q.new_zeros(q.shape[:-1])
    return torch.stack(outs), torch.stack(lses)


class _Streamed(torch.autograd.Function):
    """Softmax and its product with values (H, N, DV) as FlashAttention's backward has them (arXiv:2307.08691)."""

    @staticmethod
    def forward(ctx, scores, values, factors, saved):
        lse = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - lse[..., None])
        out = (weights if factors is None else weights * factors) @ values
        ctx.save_for_backward(scores, values, factors, out.to(saved), lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        scores, values, factors, out, lse = ctx.saved_tensors
        weights, dweights = torch.exp(scores - lse[..., None]), dout @ values.mT
        kept = weights
        if factors is not None:
            kept, dweights = weights * factors, dweights * factors
        mean = (dout * out).sum(-1) - dlse
        return weights * (dweights - mean[..., None]), kept.mT @ dout, None, None


def merge_oracle(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of merged partial states (N, B, H, S, D) and (N, B, H, S), differentiable."""
    empty = lses == float("-inf")
    # Finite stand-ins keep autograd free of -inf minus -inf; they weigh exactly nothing.
    logs = lses.masked_fill(empty, torch.finfo(lses.dtype).min / 4)
    lse = torch.logsumexp(logs, 0)
    weights = torch.exp(logs - lse).masked_fill(empty, 0.0).to(outs.dtype)
    out = (weights[..., None] * outs.masked_fill(empty[..., None], 0.0)).sum(0)
    nothing = empty.all(0)
    return out.masked_fill(nothing[..., None], 0.0), lse.masked_fill(nothing, float("-inf"))


def gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], output_gradients: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Gradients by torch.autograd, zeros where an input was not used."""
    pairs = [
        (output, gradient.to(output.dtype))
        for output, gradient in zip(outputs, output_gradients, strict=True)
        if gradient is not None and output.requires_grad
    ]
    if not pairs:
        return tuple(torch.zeros_like(x) for x in inputs)
    found = torch.autograd.grad(
        [output for output, _ in pairs], list(inputs), [g for _, g in pairs], allow_unused=True
    )
    return tuple(
        torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)
    )
