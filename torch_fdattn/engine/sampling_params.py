"""How one request's tokens are drawn, and when it ends."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

#: Alternatives that a token's log-probabilities may list.
MAX_LOGPROBS = 64
#: Of `stop` and `stop_token_ids`, which every step looks through.
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1000  # of one string
MAX_STOP_TOKEN_IDS = 1024
#: What is drawn from logits that are no distribution.
NO_TOKEN = -1


class LogitsError(ValueError):
    """Logits from which no token can be drawn.

    Examples:
        >>> issubclass(torch_fdattn.engine.LogitsError, ValueError)
        True
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn, and when it ends.

    The order is that of vLLM and transformers: penalties, temperature, min_p, top_k, top_p, and a draw. Log-probabilities
    are those of the model's own logits, before all of these.

    Args:
        n: completions of the prompt, each with random numbers of its own.
        max_tokens: tokens of a completion; None: as many as the model's length allows.
        min_tokens: before so many tokens nothing but max_tokens ends a completion: end tokens and stop_token_ids are
            not drawn, stop strings are not looked for. A grammar that is at its end ends it all the same.
        temperature: 0 takes the most likely token.
        top_k: draws among the k most likely tokens; 0: among all.
        top_p: draws among the most likely tokens that together hold top_p of the probability, at least one.
        min_p: drops tokens less likely than min_p times the most likely one.
        seed: with it a token depends on the seed, the completion's number, the token's index and the logits alone. None:
            another one for each request.
        repetition_penalty: divides positive logits of tokens that the prompt or the completion has, and multiplies negative
            ones (arXiv:1909.05858); from 0.001 to 1000, so that no logit becomes infinite.
        presence_penalty, frequency_penalty: taken from logits of tokens that the completion has: once, and once for each
            time (OpenAI's definition).
        stop: strings that end a completion, at most 64 of 1,000 characters. They are no part of its text.
        stop_token_ids: tokens that end a completion, beside the tokenizer's end tokens; at most 1,024.
        ignore_eos: whether the tokenizer's end tokens are tokens like others.
        logprobs: how many most likely tokens to list for each drawn one, which is listed anyway; None: nothing.
        prompt_logprobs: the same for the tokens of the prompt. The prompt is then computed whole, without prefix hits.
        json_schema: the completion is JSON that this schema (a JSON text) accepts. Needs the extra `structured`.
        grammar: the completion is in this language, a Lark grammar of llguidance's. Needs the extra `structured`.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.

    Examples:
        >>> torch_fdattn.engine.SamplingParams(temperature=0.7, top_p=0.9, max_tokens=32, stop=("\\n",)).top_k
        0
        >>> torch_fdattn.engine.SamplingParams(top_p=0)
        Traceback (most recent call last):
            ...
        ValueError: top_p must be above 0 and at most 1, got 0
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        _expect_int("n", self.n, 1)
        _expect_int("max_tokens", self.max_tokens, 1, optional=True)
        _expect_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens, {self.max_tokens}, got {self.min_tokens}"
            )
        _expect_number(
            "temperature", self.temperature, _value(self.temperature) >= 0, "at least 0 and finite"
        )
        _expect_int("top_k", self.top_k, 0)
        _expect_number("top_p", self.top_p, 0 < _value(self.top_p) <= 1, "above 0 and at most 1")
        _expect_number("min_p", self.min_p, 0 <= _value(self.min_p) <= 1, "from 0 to 1")
        _expect_int("seed", self.seed, -(2**63), 2**63 - 1, optional=True)
        penalty = self.repetition_penalty
        fits = 1e-3 <= _value(penalty) <= 1e3
        _expect_number("repetition_penalty", penalty, fits, "from 0.001 to 1000")
        for name in ("presence_penalty", "frequency_penalty"):
            _expect_number(name, value := getattr(self, name), abs(_value(value)) <= 2, "-2 to 2")
        _expect_at_most("stop", self.stop, MAX_STOP_STRINGS, "strings")
        _expect_tuple("stop", self.stop, str)
        if "" in self.stop:
            raise ValueError("stop must hold strings of at least one character, got ''")
        if (longest := max(map(len, self.stop), default=0)) > MAX_STOP_CHARACTERS:
            raise ValueError(
                f"stop must hold strings of at most {MAX_STOP_CHARACTERS} characters, got one of {longest}: "
                "give its first characters"
            )
        _expect_at_most("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS, "token ids")
        _expect_tuple("stop_token_ids", self.stop_token_ids, int)
        if type(self.ignore_eos) is not bool:
            raise TypeError(f"ignore_eos must be a bool, got {self.ignore_eos!r}")
        for name in ("logprobs", "prompt_logprobs"):
            _expect_int(name, getattr(self, name), 0, MAX_LOGPROBS, optional=True)
        for name in ("json_schema", "grammar"):
            if not isinstance(value := getattr(self, name), str | None):
                raise TypeError(f"{name} must be a str or None, got {type(value).__name__}")
        if self.json_schema is not None and self.grammar is not None:
            raise ValueError("grammar must be None where json_schema is given: one of the two")

    @property
    def has_penalties(self) -> bool:
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return penalties != (1.0, 0.0, 0.0)

    @property
    def is_structured(self) -> bool:
        return self.json_schema is not None or self.grammar is not None


def _value(value: object) -> float:
    """For a comparison: NaN, which fails it, where this is no number."""
    return value if type(value) in (int, float) else math.nan


def _expect_number(name: str, value: object, fits: bool, expected: str) -> None:
    if type(value) not in (int, float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (fits and abs(value) <= sys.float_info.max):  # isfinite fails for large ints
        raise ValueError(f"{name} must be {expected}, got {shown(value)}")


def _expect_int(
    name: str, value: object, low: int, high: int = 2**31 - 1, optional: bool = False
) -> None:
    if optional and value is None:
        return
    if type(value) is not int:
        raise TypeError(f"{name} must be an int{' or None' if optional else ''}, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be from {low} to {high}, got {shown(value)}")


def shown(number: float) -> str:
    """For an error: Python writes no int of more than 4,300 digits, and nobody reads a tenth of that."""
    if type(number) is int and number.bit_length() > 128:
        return f"an int of {number.bit_length()} bits"
    return str(number)


def _expect_at_most(name: str, values: object, limit: int, what: str) -> None:
    if isinstance(values, tuple) and len(values) > limit:
        raise ValueError(
            f"{name} must hold at most {limit} {what}, got {len(values)}: leave some out"
        )


def _expect_tuple(name: str, value: object, kind: type) -> None:
    if not isinstance(value, tuple) or not all(type(x) is kind for x in value):
        raise TypeError(f"{name} must be a tuple of {kind.__name__}, got {value!r}")
