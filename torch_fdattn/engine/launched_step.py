"""What a step leaves on its way: drawn tokens and log-probabilities, which copies to the host may still fill."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn.engine.logprobs import TokenLogprobs
from torch_fdattn.engine.scheduler import Chunk


class LaunchedStep(NamedTuple):
    """A step on its way. Of the tensors, which copies to the host may still fill, `read` is the only reader."""

    samples: list[Chunk]
    tokens: Tensor  # a chunk's draws one behind the other, in the order of their positions
    logprobs: TokenLogprobs | None  # of the draws `with_logprobs`
    with_logprobs: dict[int, int]  # numbers of draws, and how many alternatives each asks for
    prompt_logprobs: list[tuple[Chunk, TokenLogprobs]]
    event: torch.cuda.Event | None

    def read(self) -> list[int]:
        """The drawn tokens; from then on the other tensors can be read too."""
        if self.event is not None:
            self.event.synchronize()
        return self.tokens.tolist()


def to_host(x: Tensor) -> Tensor:
    """A copy that the host does not wait for; x may be overwritten by the next step."""
    if x.device.type == "cpu":
        return x.clone()
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)


def all_to_host(logprobs: TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(*map(to_host, logprobs))
