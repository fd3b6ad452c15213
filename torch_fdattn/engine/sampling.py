"""How the next token is drawn from the logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NO_TOKEN = -1


class LogitsError(ValueError):
    """Logits from which no token can be drawn.

    Examples:
        >>> issubclass(torch_fdattn.engine.LogitsError, ValueError)
        True
    """


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn: greedily at temperature 0, else from the top_p nucleus.

    Examples:
        >>> sampling = torch_fdattn.engine.Sampling(temperature=0.7, top_p=0.9, seed=1)
        >>> sampling.draw(torch.randn(2, 64), sampling.generator(torch.device("cpu"))).shape
        torch.Size([2, 1])
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None  # None: another one each time

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be at least 0 and finite, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must be from -2**63 to 2**64 - 1, got {self.seed}")

    def generator(self, device: torch.device) -> torch.Generator:
        generator = torch.Generator(device)
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator

    def draw(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """logits (B, vocab) -> token ids (B, 1).

        NO_TOKEN for a row with NaN, with inf, or of -inf alone, which is no distribution: the device could
        only abort, and the host sees the logits no sooner than the tokens. At temperature 0 such a row
        gives what argmax does.
        """
        if self.temperature == 0:
            return logits.argmax(-1, keepdim=True)
        logits = logits.float()
        largest = logits.amax(-1, keepdim=True)
        drawable = largest.isfinite()  # the maximum of what holds NaN is NaN
        # Relative to the largest, and never divided by what fp32 takes for 0: no inf - inf, no 0 / 0.
        logits = (logits - largest).where(drawable, 0) / max(self.temperature, 1e-30)
        weights = torch.softmax(logits, dim=-1)
        if self.top_p < 1:
            ordered, order = weights.sort(dim=-1, descending=True)
            # A token stays while those before it hold less than top_p: the first always does, even
            # where fp32 takes top_p for 0.
            outside = ordered.cumsum(-1) - ordered >= self.top_p
            outside[..., 0] = False
            weights = weights.scatter(-1, order, ordered.masked_fill(outside, 0))
        return torch.multinomial(weights, 1, generator=generator).where(drawable, NO_TOKEN)


GREEDY = Sampling()
