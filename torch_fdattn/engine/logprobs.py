"""Log-probabilities of drawn tokens and of a prompt's tokens, by the model's own logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn.engine.outputs import Logprob

#: Tokens whose logits are computed at a time: those of 16,384 tokens over a large vocabulary would take tens of gigabytes.
SLICE_TOKENS = 256


class TokenLogprobs(NamedTuple):
    """Of n tokens, on one device."""

    tokens: Tensor  # int64 (n,)
    logprobs: Tensor  # float32 (n,)
    ranks: Tensor  # int64 (n,); 1: the most likely
    top_tokens: Tensor  # int64 (n, k), the most likely first
    top_logprobs: Tensor  # float32 (n, k)


def logprobs_of(logits: Tensor, tokens: Tensor, count: int) -> TokenLogprobs:
    """Of tokens (n,) and of the `count` most likely ones, by logits (n, vocab). A token below 0 stands for token 0."""
    logprobs = torch.log_softmax(logits, -1, dtype=torch.float32)
    tokens = tokens.clamp(min=0)
    own = logprobs.gather(1, tokens[:, None])
    top = logprobs.topk(min(count, logits.shape[-1]), -1)
    ranks = (logprobs > own).sum(-1) + 1
    return TokenLogprobs(tokens, own[:, 0], ranks, top.indices, top.values)


def logprobs_in_slices(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, tokens: Tensor, count: int
) -> TokenLogprobs:
    """As `logprobs_of`, by the logits of the first n of the hidden states, of `SLICE_TOKENS` at a time."""
    slices = zip(hidden[: len(tokens)].split(SLICE_TOKENS), tokens.split(SLICE_TOKENS), strict=True)
    parts = [logprobs_of(logits_of(states), following, count) for states, following in slices]
    return TokenLogprobs(*map(torch.cat, zip(*parts, strict=True)))


def to_dicts(
    logprobs: TokenLogprobs, counts: Iterable[int], text_of: Callable[[int], str]
) -> list[dict[int, Logprob]]:
    """By token id, for each of n tokens: itself and its `counts` most likely ones; logprobs on the host."""
    listed = []
    for token, value, rank, top, values, count in zip(
        *(x.tolist() for x in logprobs), counts, strict=True
    ):
        entries = {token: Logprob(value, rank, text_of(token))}
        for i, (other, other_value) in enumerate(zip(top[:count], values[:count], strict=True)):
            if other != token:
                entries[other] = Logprob(other_value, i + 1, text_of(other))
        listed.append(entries)
    return listed
