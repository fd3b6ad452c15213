"""The Python entry of merge_states."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.ops.layout import Layout, check_layout, from_bhsd


def merge_states(
    outs: Tensor, lses: Tensor, *, dtype: torch.dtype | None = None, layout: Layout = "bhsd"
) -> tuple[Tensor, Tensor]:
    """Attention over a union of disjoint key sets from the partial results.

    Args:
        outs: (N, B, H, S, D) partial outputs, each normalised over its own keys.
        lses: (N, B, H, S) float32 natural log-sum-exp of each part, -inf where a part saw no key (its
            outs are then ignored, whatever they hold).
        dtype: of the merged output; default outs' dtype.
        layout: "bshd": outs are (N, B, S, H, D), and out (B, S, H, D); the lses stay as they are.

    Returns:
        out (B, H, S, D) and lse (B, H, S) float32 (float64 like lses); 0 and -inf where no part saw a key. Differentiable
        once, in either mode.

    Source: arXiv:2501.01005, section 2.2.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 4, 32, 16)
        >>> halves = [torch_fdattn.attention(q, k[:, :, s], v[:, :, s]) for s in (slice(0, 16), slice(16, 32))]
        >>> out, lse = torch_fdattn.merge_states(*map(torch.stack, zip(*halves)))
        >>> torch.allclose(out, torch_fdattn.attention(q, k, v)[0], atol=1e-5)
        True
    """
    checks.expect_types((("outs", outs), ("lses", lses)))
    if layout == "bhsd":
        return torch.ops.fdattn.merge_states(outs, lses, dtype=dtype)
    check_layout(layout)
    if outs.dim() != 5:
        shape = tuple(outs.shape)
        raise ValueError(
            f"outs must be (parts, batch, sequence, heads, head_dim), got shape {shape}"
        )
    state = torch.ops.fdattn.merge_states(outs.transpose(2, 3), lses, dtype=dtype)
    return from_bhsd(state)
