"""A rung as the attention of a real model: a cache that the model attends through, and greedy decoding.

The model is torch_fdattn's own, untouched: it stores and attends through whatever cache it is given
(`torch_fdattn.models.transformer.KVCache`). The cache here is the plain one that inference codes have:
an array of `capacity` tokens a layer, filled from the front. What attention sees of it is a slice, which
is never contiguous: the heads of a token lie side by side, so a head's tokens are H_kv · D elements apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.timing import Timer
from torch_fdattn.models import ModelConfig, Transformer

from . import reference

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

#: Logits this many units in the last place apart are a tie, which rounding may decide either way.
TIE = 8


class SlicedCache:
    """K and V of one sequence, (layers, capacity, H_kv, D) each; `attention` may be exchanged at any time."""

    def __init__(
        self, config: ModelConfig, layers: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:  # fmt: skip
        shape = (layers, capacity, config.num_kv_heads, config.head_dim)
        self.k, self.v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.lengths = torch.zeros(1, dtype=torch.int32, device=device)
        self.held = 0
        self.queries: list[Tensor] = [torch.empty(0)] * layers  # of the last step
        self.attention: Attend | None = None

    def reset(self) -> None:
        self.lengths.zero_()
        self.held = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k and v (1, H_kv, T, D) behind what is stored."""
        end = self.held + k.shape[2]
        self.k[layer, self.held : end] = k[0].transpose(0, 1)
        self.v[layer, self.held : end] = v[0].transpose(0, 1)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        self.queries[layer] = q
        return self.attention(q, *slices(self.k[layer], self.v[layer], self.held + q.shape[2]))

    def advance(self, tokens: int) -> None:
        self.lengths += tokens
        self.held += tokens


def slices(k: Tensor, v: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The first tokens of one layer's cache as (1, H_kv, tokens, D): views, no copies."""
    return k[None, :tokens].transpose(1, 2), v[None, :tokens].transpose(1, 2)


def copied_first(attend: Attend) -> Attend:
    """`attend` behind .contiguous(), as a kernel without strides would have to be called."""
    return lambda q, k, v: attend(q, k.contiguous(), v.contiguous())


def shown(attend: Attend, say: Callable[[str], None]) -> Attend:
    """`attend`, telling of each call what it was given and how far its output is from fp64's."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(q, k, v)
        error = (out.double() - reference.attend(q.double(), k.double(), v.double())).abs().max()
        say(
            f"  q {tuple(q.shape)} strides {q.stride()}, k and v {tuple(k.shape)} strides {k.stride()}: "
            f"largest error {error.item():.1e}"
        )
        return out

    return call


def truncated(model: Transformer, layers: int | None) -> Transformer:
    """The model's first layers alone: not its text any more, but its shapes and its kind of numbers."""
    if layers is not None:
        model.layers = nn.ModuleList(list(model.layers)[:layers])
    return model


@dataclass(frozen=True)
class Generation:
    tokens: list[int]
    logits: list[Tensor]  # (vocab,) each
    prefill_ms: float
    token_ms: float  # of each further token


def generate(
    model: Transformer, cache: SlicedCache, prompt: Tensor, new_tokens: int, timer: Timer
) -> Generation:
    """Greedy: the prompt (1, P) in one step, which gives the first token, then one token a step."""
    cache.reset()
    timer.synchronize()
    begin = timer.clock()
    logits = [model(prompt, cache, last_only=True)[0, -1]]
    timer.synchronize()
    prefilled = timer.clock()
    for _ in range(new_tokens - 1):
        logits.append(model(logits[-1].argmax()[None, None], cache)[0, -1])
    timer.synchronize()
    end = timer.clock()
    tokens = torch.stack(logits).argmax(-1).tolist()
    token_ms = 1e3 * (end - prefilled) / max(new_tokens - 1, 1)
    return Generation(tokens, logits, 1e3 * (prefilled - begin), token_ms)


def difference(found: Generation, expected: Generation) -> tuple[bool, str]:
    """Whether the tokens are the expected ones, or part at a tie; and that in words."""
    pairs = enumerate(zip(found.tokens, expected.tokens, strict=True))
    at = next((i for i, (a, b) in pairs if a != b), None)
    if at is None:
        apart = (torch.stack(found.logits) - torch.stack(expected.logits)).abs().max().item()
        return True, f"the reference's {len(expected.tokens)} tokens, logits within {apart:.1e}"
    logits = expected.logits[at]
    best, other = (logits[tokens[at]].item() for tokens in (expected.tokens, found.tokens))
    tie = best - other <= TIE * torch.finfo(logits.dtype).eps * abs(best)
    kind = "a tie" if tie else "not a tie: WRONG"
    return tie, (
        f"tokens differ from number {at + 1} on, where the reference gives {best:.5g} to its own and "
        f"{other:.5g} to this one: {kind}"
    )
