"""What the engine knows of a request: its completions, each a sequence of tokens that it runs for itself."""

from __future__ import annotations

from collections.abc import Collection

from torch_fdattn.engine.detokenizer import TextStream
from torch_fdattn.engine.ngram_speculation import NgramProposer
from torch_fdattn.engine.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
from torch_fdattn.engine.random_numbers import seed_of_completion
from torch_fdattn.engine.sampling_params import NO_TOKEN, LogitsError, SamplingParams
from torch_fdattn.engine.structured import Matcher

TokenLogprobs = dict[int, Logprob]


class Sequence:
    """One completion of a request: the prompt and the tokens behind it.

    Attributes:
        tokens: those that the host has: the prompt, and what was drawn and read back.
        in_flight: whether a step on its way draws for it: 0 or 1.
        num_computed: tokens whose K and V are in the cache, those of steps on their way included, proposals too.
        max_length: tokens at which it ends, prompt included.
        pages: of the cache, in the order of its tokens; hashes: names of its full pages, as far as they were asked for.
        num_registered: pages that the prefix cache was told of.
        row: of `SequenceRows`, while it runs.
        matcher: what the grammar allows next; None without one.
        proposer: what may come next, for speculation; None: it does not speculate.
    """

    def __init__(
        self, request: Request, index: int, seed: int, max_length: int, text: TextStream | None,
        matcher: Matcher | None, proposer: NgramProposer | None = None,
    ) -> None:  # fmt: skip
        self.request, self.index = request, index
        self.seed = seed_of_completion(seed, index)
        self.max_length, self.matcher, self.proposer = max_length, matcher, proposer
        self.tokens = list(request.prompt)
        self.in_flight = self.num_computed = self.num_registered = self.preemptions = 0
        self.pages: list[int] = []
        self.hashes: list[bytes] = []
        self.row: int | None = None
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None  # why it could not go on
        self._text = text
        self._logprobs: list[TokenLogprobs] | None = None if self.params.logprobs is None else []

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def length(self) -> int:
        """Tokens that it has, the one in flight included."""
        return len(self.tokens) + self.in_flight

    def accept(
        self, drawn: list[int], proposals: tuple[int, ...], logprobs: list[TokenLogprobs | None]
    ) -> int:
        """What a step has drawn for it is read back: a token behind its last one, and one behind each proposal. It takes
        them as far as the proposals before them were drawn, or up to its end: how many.

        Raises:
            LogitsError: one that it takes is NO_TOKEN.
        """
        self.in_flight -= 1
        taken = 0
        for token, values, proposal in zip(drawn, logprobs, (*proposals, NO_TOKEN), strict=True):
            self._append(token, values)
            taken += 1
            if self.finish_reason is not None or token != proposal:
                break
        # K and V of the proposals behind are of no token of its own: computed anew, and stored over them.
        self.num_computed -= len(drawn) - taken
        return taken

    def _append(self, token: int, logprobs: TokenLogprobs | None) -> None:
        if token == NO_TOKEN:
            raise LogitsError(
                "logits must be finite to draw from them, got NaN, inf or -inf alone for new token "
                f"{len(self.tokens) - self.prompt_length} of request {self.request.request_id!r}: look at the "
                "weights and their dtype (float16 ends at 65504)"
            )
        self.tokens.append(token)
        if self._logprobs is not None:
            self._logprobs.append(logprobs)
        if self._ends_with(token):
            self.error = None if self.matcher is None else self.matcher.error
            self.finish("stop" if self.error is None else "error")
        elif len(self.tokens) >= self.max_length:
            self.finish("length")

    def finish(self, reason: FinishReason) -> None:
        """Its end; text that was held back is handed out."""
        if self._text is not None and self._text.flush() and reason == "length":
            reason = "stop"  # what was held back has become a stop string
        self.finish_reason = reason

    def _ends_with(self, token: int) -> bool:
        if token in self.request.end_ids:
            return True
        stops = len(self.tokens) - self.prompt_length >= self.params.min_tokens
        if self._text is not None and self._text.push(token, stops):
            return True
        return self.matcher is not None and self.matcher.accept(token)

    def output(self) -> CompletionOutput:
        return CompletionOutput(
            self.index,
            "" if self._text is None else self._text.text,
            self.tokens[self.prompt_length :],
            None if self._logprobs is None else list(self._logprobs),
            self.finish_reason,
            self.error,
        )


class Request:
    """A prompt and its n sequences.

    Attributes:
        prompt_logprobs: of the prompt's tokens, as far as they are computed; None where not asked for.
        num_cached: what the prefix cache had for the first sequence.
        end_ids: tokens that end a sequence; banned_ids: the same before min_tokens, in order, which each draw asks for.
    """

    def __init__(
        self, request_id: str, prompt: list[int], params: SamplingParams, eos_ids: Collection[int] = (),
    ) -> None:  # fmt: skip
        self.request_id, self.prompt, self.params = request_id, prompt, params
        self.sequences: list[Sequence] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )
        self.num_cached = 0
        self.end_ids = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)))
        self.banned_ids = sorted(self.end_ids) if params.min_tokens else []

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    def add_prompt_logprobs(self, start: int, logprobs: list[TokenLogprobs]) -> None:
        """Those of the tokens from position `start` on; what is there already, from before a preemption or by another
        sequence of this prompt, stays."""
        have = len(self.prompt_logprobs)
        self.prompt_logprobs += logprobs[max(have - start, 0) :]

    def output(self) -> RequestOutput:
        """What there is now; it does not change with the request."""
        return RequestOutput(
            self.request_id,
            self.prompt,
            None if self.prompt_logprobs is None else list(self.prompt_logprobs),
            [sequence.output() for sequence in self.sequences],
            self.finished,
            self.num_cached,
        )
