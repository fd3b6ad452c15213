"""What greedy completions must be, by the plain model over the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fdattn.engine import CompletionOutput
from torch_fdattn.models import Transformer

#: Logits closer than this may change places in fp32.
TIE = 1e-3
#: Log-probabilities of some tokens at each place.
Listed = list[dict[int, float]]


class GreedyReference:
    """Compares completions with the plain model, which scores each sequence of tokens once."""

    def __init__(self, model: Transformer) -> None:
        self._model, self._scored = model, []

    @torch.no_grad()
    def logprobs(self, tokens: list[int]) -> Tensor:
        """(tokens, vocab): of what follows each of them. Tokens that begin a sequence scored before cost nothing."""
        for scored, rows in self._scored:
            if scored[: len(tokens)] == tokens:
                return rows[: len(tokens)]
        device = self._model.norm.weight.device
        rows = self._model(torch.tensor([tokens], device=device))[0].float().log_softmax(-1)
        self._scored.append((tokens, rows))
        return rows

    def expect(
        self, prompt: Sequence[int], tokens: list[int], logprobs: Listed | None = None
    ) -> None:
        """Every token is the most likely one after those before it, or within TIE of it: equal to the reference up to its
        first tie, and teacher-forced behind that. Log-probabilities, where there are any, are the model's to TIE."""
        assert tokens
        rows = self.logprobs([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        drawn = rows.gather(1, torch.tensor(tokens, device=rows.device)[:, None])[:, 0]
        short = rows.amax(-1) - drawn
        assert short.max() < TIE, (int(short.argmax()), float(short.max()))
        if logprobs is not None:
            expect_logprobs(rows, logprobs)

    def expect_prompt(self, prompt: list[int], logprobs: Listed) -> None:
        """The log-probabilities of all tokens but the first."""
        expect_logprobs(self.logprobs(prompt)[:-1], logprobs)


def expect_logprobs(rows: Tensor, logprobs: Listed) -> None:
    for row, listed in zip(rows, logprobs, strict=True):
        assert listed
        for token, logprob in listed.items():
            assert abs(float(row[token]) - logprob) < TIE


def expect_greedy(model: Transformer, prompt: Sequence[int], output: CompletionOutput) -> None:
    """As `GreedyReference.expect`."""
    GreedyReference(model).expect(prompt, output.token_ids, by_token(output.logprobs))


def by_token(logprobs: list[dict] | None) -> Listed | None:
    """A completion's log-probabilities as numbers."""
    if logprobs is None:
        return None
    return [{token: entry.logprob for token, entry in listed.items()} for listed in logprobs]
