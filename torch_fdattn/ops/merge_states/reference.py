"""Merging partial attention states by explicit formulas in torch: the definition, and the CPU kernel.

    lse = log Σ_n exp(lse_n),   out = Σ_n w_n out_n,   w_n = exp(lse_n - lse)

    dout_n = w_n dout,   dlse_n = w_n (⟨dout, out_n - out⟩ + dlse)

and forward, with primes for tangents: lse' = Σ_n w_n lse_n',  out' = Σ_n w_n (out_n' + (lse_n' - lse') out_n)

(Flash-Decoding; FlashInfer's "recursive attention", arXiv:2501.01005, section 2.2.) A part that saw no
key has lse_n = -inf and weight zero, whatever its out_n holds; with no part at all out = 0, lse = -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.ops.attention.reference import accumulated


def merge_states_reference(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """(out (B, H, S, D), lse (B, H, S)) from stacks on dim 0, in the accumulation dtype."""
    lses = accumulated(lses)
    lse = (
        torch.logsumexp(lses, 0) if lses.shape[0] else lses.new_full(lses.shape[1:], float("-inf"))
    )
    return (_weights(lses, lse)[..., None] * _seen_parts(outs, lses)).sum(0), lse


def merge_states_backward_reference(
    dout: Tensor, dlse: Tensor | None, outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """(douts, dlses) in the accumulation dtype."""
    dout, lses = accumulated(dout), accumulated(lses)
    weights = _weights(lses, lse)
    inner = (dout * (_seen_parts(outs, lses) - accumulated(out))).sum(-1)
    if dlse is not None:
        inner = inner + dlse
    # Where no part saw a key, a loss's gradient at lse = -inf may be NaN; a weightless part has none.
    return weights[..., None] * dout, torch.where(weights == 0, 0.0, weights * inner)


def merge_states_tangent_reference(
    outs: Tensor, lses: Tensor, lse: Tensor, douts: Tensor | None, dlses: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Tangents of (out, lse) in the accumulation dtype."""
    lses = accumulated(lses)
    weights = _weights(lses, lse)
    changes = torch.zeros_like(_seen_parts(outs, lses))
    dlse = torch.zeros_like(lse)
    if dlses is not None:
        dlses = dlses.masked_fill(weights == 0, 0.0)
        dlse = (weights * dlses).sum(0)
        changes = (dlses - dlse)[..., None] * _seen_parts(outs, lses)
    if douts is not None:
        changes = changes + _seen_parts(douts, lses)
    return (weights[..., None] * changes).sum(0), dlse


def _weights(lses: Tensor, lse: Tensor) -> Tensor:
    return torch.exp(lses - lse.masked_fill(lse == float("-inf"), 0.0))


def _seen_parts(outs: Tensor, lses: Tensor) -> Tensor:
    return accumulated(outs).masked_fill((lses == float("-inf"))[..., None], 0.0)
