"""What happens to a score between q·k and the softmax, and the sink beside it (torch, readable).

    s = scale · q·k                      (k times its scale where the cache is quantised)
    s = softcap · tanh(s / softcap)      where softcap > 0 (Gemma 2)
    s = s - slope · |q_pos - k_pos|      ALiBi, one slope a head (arXiv:2108.12409)
    s = s + mask, or -inf where a boolean mask is False      an explicit mask, broadcast to the scores
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
    attn_mask: Tensor | None = None  # broadcastable to the scores

    @property
    def is_plain(self) -> bool:
        return self.softcap == 0.0 and all(x is None for x in self[1:])

    @property
    def changes_tiles(self) -> bool:
        """Whether every score is changed; sinks join the softmax at its end."""
        return not self._replace(sinks=None).is_plain


#: What changes nothing.
NO_SCORES = Scores()
#: Entries of an additive mask are at most this, +inf included, and those below its negative hide their keys as
#: -inf does: beyond it a score times log2(e) would leave fp32.
MASK_LIMIT = 1e38


def modify_scores(scores: Tensor, distance: Tensor, options: Scores) -> Tensor:
    """Scores (B, H, M, N) with all that changes them; distance (B or 1, M, N) = k_pos - q_pos.

    The explicit mask is expected as broadcast to the scores.
    """
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes.to(scores.dtype)
        slopes = slopes.expand(scores.shape[0], -1) if slopes.dim() == 1 else slopes
        scores = scores - slopes[:, :, None, None] * distance.abs()[:, None]
    entries = options.attn_mask
    if entries is None:
        return scores
    if entries.dtype == torch.bool:
        return scores.masked_fill(~entries, float("-inf"))
    entries = entries.to(scores.dtype)
    hidden = entries < -MASK_LIMIT
    return (scores + entries.clamp(max=MASK_LIMIT)).masked_fill(hidden, float("-inf"))


def sum_to(x: Tensor, shape: torch.Size) -> Tensor:
    """The sum of x over the dims by which `shape` was broadcast to x's."""
    padded = (1,) * (x.dim() - len(shape)) + tuple(shape)
    over = [i for i, size in enumerate(padded) if size == 1]
    return (x.sum(over, keepdim=True) if over else x).reshape(shape)


def cap_slope(scores: Tensor, options: Scores) -> Tensor | float:
    """The derivative of capped scores with respect to those before the cap."""
    if not options.softcap:
        return 1.0
    return 1.0 - torch.tanh(scores / options.softcap).square()


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """(H,): a sink is a key whose score is the sink and whose value is zero; lse and delta (B, H, M).

    delta = rowsum(dout ∘ out) - dlse, 0 where lse is -inf.
    """
    return -(sink_weights(sinks, lse) * delta).sum((0, 2))


def sink_weights(sinks: Tensor, lse: Tensor) -> Tensor:
    """(B, H, M): what a sink takes of each row; 0 where lse is -inf."""
    finite = lse.masked_fill(lse == float("-inf"), float("inf"))
    return torch.exp(sinks.to(lse.dtype)[None, :, None] - finite)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out (B, H, M, D), lse (B, H, M)) after each head's sink joined the softmax."""
    if sinks is None:
        return out, lse
    sinks = sinks.to(lse.dtype)[None, :, None]
    joined = torch.logaddexp(lse, sinks)
    # Not exp(lse - joined): joined is rounded.
    weight = torch.sigmoid(lse - sinks).masked_fill(joined == float("-inf"), 0.0)
    return out * weight[..., None], joined
