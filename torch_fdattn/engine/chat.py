"""A conversation on an engine: history, and what no longer fits.

Each turn renders the chat template over the whole history; of its tokens the LLM's prefix cache has the pages that earlier
turns have filled. A template may write an earlier turn otherwise than the model did, and is followed then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

from torch_fdattn.engine.llm import LLM
from torch_fdattn.engine.prompts import PromptError
from torch_fdattn.engine.sampling_params import SamplingParams
from torch_fdattn.engine.streaming import stream_text

Message = dict[str, str]


class Chat:
    """Turns of a user and the model, after an optional system message.

    Args:
        llm: with a tokenizer; nobody else uses it meanwhile.
        system: what the system message says; None: there is none.
        params: of each reply, one completion of up to max_tokens. None: greedy, 512 tokens. With a seed, the whole conversation
            follows from it.
        note: called with a sentence where turns are dropped.

    Attributes:
        messages: the history, as the template is given it.

    Raises:
        ValueError: no tokenizer, or params of several completions or without max_tokens.

    Examples:
        >>> model = torch_fdattn.models.load_model("smollm2")
        >>> tokenizer = torch_fdattn.models.load_tokenizer("smollm2")
        >>> llm = torch_fdattn.engine.LLM(model, tokenizer, max_num_seqs=1, max_model_len=256)
        >>> params = torch_fdattn.engine.SamplingParams(max_tokens=16, temperature=0)
        >>> chat = torch_fdattn.engine.Chat(llm, params=params)
        >>> "".join(chat.reply("What is the capital of Japan?"))
        'The capital of Japan is Tokyo.'
    """

    def __init__(
        self, llm: LLM, *, system: str | None = None, params: SamplingParams | None = None,
        note: Callable[[str], None] = lambda sentence: None,
    ) -> None:  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=512) if params is None else params
        if llm.tokenizer is None:
            raise ValueError("llm must have a tokenizer, got one without: give it to LLM")
        if params.n != 1 or params.max_tokens is None:
            raise ValueError(
                f"params must ask for one completion with max_tokens, got n={params.n} and max_tokens={params.max_tokens}"
            )
        self._llm, self._tokenizer, self._params, self._note = llm, llm.tokenizer, params, note
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        """Forgets all turns. The prefix cache stays, for a beginning that comes again."""
        self.messages: list[Message] = list(self._system)
        # Every turn draws anew, but the first after a reset as the first of all.
        self._seeds = random.Random(self._params.seed)

    def reply(self, text: str, should_stop: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """The model's answer to `text`, in parts as they are made; all ranks must iterate to the end.

        should_stop: asked after each part, on all ranks with the same answer; True ends the reply there. Turn and
            reply are part of the history then, as far as they came. Where the iterator is closed instead, neither is.

        Raises:
            PromptError: the turn does not fit even alone; it is not part of the history then.
        """
        turn = {"role": "user", "content": text}
        prompt, params = self._fitting_prompt(turn), self._params
        if params.seed is not None:
            params = replace(params, seed=self._seeds.getrandbits(63))
        texts = []
        # Closed here, not when the interpreter drops it, which under Python 3.12.3 came too late once.
        with closing(stream_text(self._llm, prompt, params, should_stop=should_stop)) as parts:
            for part in parts:
                texts.append(part)
                yield part
        self.messages += [turn, {"role": "assistant", "content": "".join(texts)}]

    def _fitting_prompt(self, turn: Message) -> list[int]:
        """Token ids of the history and the new turn, without the oldest turns where they do not fit."""
        oldest, dropped = len(self._system), 0
        # A reply's last token is not stored.
        stored = self._llm.stats().pages_total * self._llm.page_size
        context, new = min(self._llm.max_model_len, stored + 1), self._params.max_tokens
        while len(prompt := self._tokenizer.chat([*self.messages, turn])) + new > context:
            if len(self.messages) == oldest:
                raise PromptError(
                    f"prompt of {len(prompt)} tokens and a reply of up to {new} take {len(prompt) + new} tokens, the "
                    f"context has {context}"
                )
            del self.messages[oldest : oldest + 2]
            dropped += 1
        if dropped:
            turns = "turn" if dropped == 1 else f"{dropped} turns"
            self._note(f"dropped the oldest {turns}: the conversation no longer fits the context")
        return prompt
