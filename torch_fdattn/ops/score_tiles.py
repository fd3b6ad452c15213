"""Softcap, ALiBi and sinks on tiles, in Triton; the torch twin, which defines them, is `ops/scores.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_fdattn.ops.online_softmax import LN2, LOG2E, finite_max


@triton.jit
def tanh(x):
    """To two units in the last place: Lambert's fraction below 1, where 1 - 2 / (exp(2x) + 1) cancels."""
    square = x * x
    above = 10395.0 + square * (1260.0 + square * 21.0)
    below = 10395.0 + square * (4725.0 + square * (210.0 + square))
    far = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    return tl.where(square < 1.0, x * (above / below), far)


@triton.jit
def modify_scores(scores, distance, softcap, slopes, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Scores (M, N) in natural units with the cap and the bias; slopes (M,), distance (M, N)."""
    if SOFTCAP:
        scores = softcap * tanh(scores / softcap)
    if ALIBI:
        scores -= slopes[:, None] * tl.abs(distance).to(tl.float32)
    return scores


@triton.jit
def add_sinks(out, lse, sinks):
    """(out (M, D), lse (M,)) after the rows' sinks joined the softmax, all in natural units."""
    high = finite_max(tl.maximum(lse, sinks))
    total = tl.exp2((lse - high) * LOG2E) + tl.exp2((sinks - high) * LOG2E)
    joined = high + tl.log2(tl.where(total == 0.0, 1.0, total)) * LN2
    weight = tl.exp2((lse - finite_max(joined)) * LOG2E)
    return out * weight[:, None], tl.where(total == 0.0, float("-inf"), joined)
