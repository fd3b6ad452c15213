"""What happens to a score between q·k and the softmax, and the sink beside it (torch, readable).

    s = scale · q·k                      (k times its scale where the cache is quantised)
    s = softcap · tanh(s / softcap)      where softcap > 0 (Gemma 2)
    s = s - slope · |q_pos - k_pos|      ALiBi, one slope a head (arXiv:2108.12409)
    P = exp(s - lse),  lse = log(exp(sink) + Σ exp(s))     an attention sink takes part of the weight
                                                           and adds nothing to the output (gpt-oss)

The Triton twin of this file is `ops/score_tiles.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Scores(NamedTuple):
    """The part of a schema that changes scores; the defaults change nothing."""

    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        return self.softcap == 0.0 and self.alibi_slopes is None and self.sinks is None


#: What changes nothing.
NO_SCORES = Scores()


def modify_scores(scores: Tensor, distance: Tensor, options: Scores) -> Tensor:
    """Scores (B, H, M, N) with the cap and the bias; distance (B or 1, M, N) = k_pos - q_pos."""
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes.to(scores.dtype)
        slopes = slopes.expand(scores.shape[0], -1) if slopes.dim() == 1 else slopes
        scores = scores - slopes[:, :, None, None] * distance.abs()[:, None]
    return scores


def cap_slope(scores: Tensor, options: Scores) -> Tensor | float:
    """The derivative of capped scores with respect to those before the cap."""
    if not options.softcap:
        return 1.0
    return 1.0 - torch.tanh(scores / options.softcap).square()


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """(H,): a sink is a key whose score is the sink and whose value is zero; lse and delta (B, H, M).

    delta = rowsum(dout ∘ out) - dlse, 0 where lse is -inf.
    """
    finite = lse.masked_fill(lse == float("-inf"), float("inf"))
    weights = torch.exp(sinks.to(lse.dtype)[None, :, None] - finite)
    return -(weights * delta).sum((0, 2))


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out (B, H, M, D), lse (B, H, M)) after each head's sink joined the softmax."""
    if sinks is None:
        return out, lse
    joined = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
    finite = joined.masked_fill(joined == float("-inf"), 0.0)
    return out * torch.exp(lse - finite)[..., None], joined
