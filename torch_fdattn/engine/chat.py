"""A conversation on an engine: history, the cache's reuse between turns, and what no longer fits.

Each turn renders the chat template over the whole history, keeps the longest prefix of its tokens that the
cache holds already, and prefills the rest: a template may write an earlier turn otherwise than the model
did, and is followed then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch_fdattn.engine.engine import Engine
from torch_fdattn.engine.prompts import PromptError
from torch_fdattn.engine.sampling import GREEDY, Sampling
from torch_fdattn.models import Tokenizer

Message = dict[str, str]


class Chat:
    """Turns of a user and the model, after an optional system message.

    Args:
        engine: of batch 1; nobody else uses it meanwhile.
        system: what the system message says; None: there is none.
        max_new_tokens: of one reply.
        sampling: with a seed, the whole conversation follows from it.
        note: called with a sentence where turns are dropped.

    Attributes:
        messages: the history, as the template is given it.

    Examples:
        >>> model = torch_fdattn.models.load_model("smollm2")
        >>> tokenizer = torch_fdattn.models.load_tokenizer("smollm2")
        >>> engine = torch_fdattn.engine.Engine(model, capacity=256)
        >>> chat = torch_fdattn.engine.Chat(engine, tokenizer, max_new_tokens=16)
        >>> "".join(chat.reply("What is the capital of Japan?"))
        'The capital of Japan is Tokyo.'
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, *, system: str | None = None,
        max_new_tokens: int = 512, sampling: Sampling = GREEDY,
        note: Callable[[str], None] = lambda sentence: None,
    ) -> None:  # fmt: skip
        self._engine, self._tokenizer, self._note = engine, tokenizer, note
        self._max_new_tokens, self._sampling = max_new_tokens, sampling
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._stored: list[int] = []  # the tokens in the cache
        self.reset()

    def reset(self) -> None:
        """Forgets all turns. What the cache holds stays, for a beginning that comes again."""
        self.messages: list[Message] = list(self._system)
        # Every turn draws anew, but the first after a reset as the first of all.
        self._seeds = random.Random(self._sampling.seed)

    def reply(self, text: str, should_stop: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """The model's answer to `text`, in parts as they are made; all ranks must iterate to the end.

        should_stop: asked after each token, on all ranks with the same answer; True ends the reply there. Turn and
            reply are part of the history then, as far as they came. Where the iterator is closed instead, neither is.

        Raises:
            PromptError: the turn does not fit even alone; it is not part of the history then.
        """
        turn = {"role": "user", "content": text}
        prompt = self._fitting_prompt(turn)
        sampling = self._sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=self._seeds.getrandbits(63))
        kept = _common_prefix(self._stored, prompt[:-1])  # the last token's logits must be computed
        self._engine.truncate(kept)
        self._stored = self._stored[:kept]
        tokens = self._engine.stream(
            prompt[kept:], self._max_new_tokens, sampling=sampling, eos_ids=self._tokenizer.eos_ids
        )
        decoder, answer, texts = self._tokenizer.stream(prompt), [], []
        for token in tokens:
            # Of the answer all is stored but the token just drawn.
            self._stored = [*prompt, *answer]
            answer.append(token)
            texts.append(decoder.push(token))
            yield texts[-1]
            if should_stop():
                break
        texts.append(decoder.flush())
        yield texts[-1]
        self.messages += [turn, {"role": "assistant", "content": "".join(texts)}]

    def _fitting_prompt(self, turn: Message) -> list[int]:
        """Token ids of the history and the new turn, without the oldest turns where they do not fit."""
        oldest, dropped = len(self._system), 0
        # a reply's last token is not stored
        budget = self._engine.capacity - self._max_new_tokens + 1
        while len(prompt := self._tokenizer.chat([*self.messages, turn])) > budget:
            if len(self.messages) == oldest:
                raise PromptError(
                    f"prompt of {len(prompt)} tokens and a reply of up to {self._max_new_tokens} need "
                    f"{len(prompt) + self._max_new_tokens - 1} places, the cache has "
                    f"{self._engine.capacity}"
                )
            del self.messages[oldest : oldest + 2]
            dropped += 1
        if dropped:
            turns = "turn" if dropped == 1 else f"{dropped} turns"
            self._note(f"dropped the oldest {turns}: the conversation no longer fits the context")
        return prompt


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens the two begin with in common."""
    for i, (a, b) in enumerate(zip(first, second)):  # noqa: B905  (of different lengths)
        if a != b:
            return i
    return min(len(first), len(second))
