"""Rotary position embeddings (Su et al., 2021), in the half-split layout of Hugging Face checkpoints.

Element i of a head's first half turns with element i of its second half, by position x frequency i.
`linear` divides all frequencies by a factor; `llama3` divides the slow ones, keeps the fast ones, and
blends between (Llama 3.1's model card code); `divisors` names a divisor for each frequency; `none` turns nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_fdattn.models.config import ModelConfig, RopeConfig


def frequencies(rope: RopeConfig, head_dim: int, device: torch.device | str) -> Tensor:
    """Radians per position of each pair of elements: (head_dim / 2,) fp32; 0 for a layer without positions."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_positions * plain / (2 * math.pi)  # in the original context
        span = rope.high_freq_factor - rope.low_freq_factor
        keep = ((turns - rope.low_freq_factor) / span).clamp(0, 1)
        return plain * (keep + (1 - keep) / rope.factor)
    if rope.kind == "none":
        return torch.zeros_like(plain)
    if rope.kind == "divisors":
        return plain / torch.tensor(rope.divisors, dtype=torch.float32, device=device)
    return plain


class Rotary(torch.nn.Module):
    """cos and sin of positions (B, T) for one of `config.ropes`: fp32, (B, 1, T, head_dim / 2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("frequencies", self._of_all_ropes("cpu"), persistent=False)

    def _of_all_ropes(self, device: torch.device | str) -> Tensor:
        config = self.config
        return torch.stack([frequencies(x, config.head_dim, device) for x in config.ropes])

    def _apply(self, fn, recurse: bool = True):
        # .to(bfloat16) would round the frequencies and to_empty() would lose them: compute them anew.
        super()._apply(fn, recurse)
        self.frequencies = self._of_all_ropes(self.frequencies.device)
        return self

    def forward(self, positions: Tensor, rope: int = 0) -> tuple[Tensor, Tensor]:
        angles = positions[:, None, :, None].float() * self.frequencies[rope]
        return angles.cos(), angles.sin()
