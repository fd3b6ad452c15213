"""What greedy completions must be, by the plain model over the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_fdattn.engine import CompletionOutput
from torch_fdattn.models import Transformer

#: Logits closer than this may change places in fp32.
TIE = 1e-3


@torch.no_grad()
def expect_greedy(model: Transformer, prompt: Sequence[int], output: CompletionOutput) -> None:
    """Every token is the most likely one after those before it, or within TIE of it: equal to the reference up to its first
    tie, and teacher-forced behind that. Log-probabilities, where there are any, are the model's to TIE."""
    tokens, first = output.token_ids, len(prompt) - 1
    assert tokens
    device = model.norm.weight.device
    logits = model(torch.tensor([[*prompt, *tokens[:-1]]], device=device))[0, first:].float()
    drawn = logits.gather(1, torch.tensor(tokens, device=device)[:, None])[:, 0]
    short = logits.amax(-1) - drawn
    assert short.max() < TIE, (int(short.argmax()), float(short.max()))
    if output.logprobs is not None:
        expected = logits.log_softmax(-1)
        for row, listed in zip(expected, output.logprobs, strict=True):
            for token, entry in listed.items():
                assert abs(float(row[token]) - entry.logprob) < TIE
