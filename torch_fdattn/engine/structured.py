"""Completions in a language: which tokens a JSON schema or a grammar allows next, by the package llguidance.

What a request may cost is limited in operations, not in time, so that every rank comes to the same end: what a grammar
is by `grammar_limits.py`, the rest by llguidance's limits. A grammar beyond them is refused where it is made, or ends its own
completion ("error") where a text leads there.
"""

from __future__ import annotations

import json
import re
import threading

import torch
from torch import Tensor

from torch_fdattn.engine.grammar_limits import (
    MAX_GRAMMAR_CHARACTERS,
    MAX_SCHEMA_CHARACTERS,
    check_lark,
    check_length,
    check_schema,
)
from torch_fdattn.engine.sampling_params import SamplingParams
from torch_fdattn.models import Tokenizer
from torch_fdattn.models.encoding import BPETokenizer
from torch_fdattn.models.errors import require

#: Below llguidance's own (50,000, 200,000 and 250,000), with which steps of an ambiguous grammar take seconds and its
#: states half a gigabyte. At most about 50 ms (half a second for a step that comes to the limit) and 40 MB of a completion.
#: Within are JSON schemas of 500 optional properties.
_LIMITS = {"step_max_items": 5000, "step_lexer_fuel": 50_000, "max_lexer_states": 20_000}


class Matcher:
    """What a grammar allows after the tokens that it has accepted.

    name: the parameter that has the grammar.
    """

    def __init__(self, inner, vocab_size: int, name: str) -> None:  # inner: llguidance's LLMatcher
        self._inner, self._vocab_size, self._name = inner, vocab_size, name

    def copy(self) -> Matcher:
        """Another one, as if it had accepted the same tokens."""
        return Matcher(self._inner.deep_copy(), self._vocab_size, self._name)

    def allowed(self) -> Tensor:
        """bool (vocab,) on the host. At the end of a text end tokens are allowed too."""
        bias = torch.frombuffer(bytearray(self._inner.compute_logit_bias()), dtype=torch.uint8)
        allowed = torch.zeros(self._vocab_size, dtype=torch.bool)
        allowed[: len(bias)] = bias[: self._vocab_size] > 0
        return allowed

    def accept(self, token: int) -> bool:
        """Whether nothing can follow this token, which was allowed."""
        self._inner.consume_token(token)
        return self._inner.is_stopped() or self.error is not None

    @property
    def error(self) -> str | None:
        """Why llguidance cannot go on, the grammar being beyond its limits or without a next token: `allowed` are end tokens then."""
        if not self._inner.is_error():
            return None
        if _is_dead_end(self._inner):
            return (
                f"{self._name} has led to a text that no token of the model continues as it wants: "
                "let it allow other characters there, or the end"
            )
        return f"{self._name} is beyond llguidance's limits: {_reason(self._inner)}"


class Grammars:
    """Makes matchers for one tokenizer, on any thread.

    tokenizer: None, where the first matcher is an error.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._made, self._lock = None, threading.Lock()

    def matcher(self, params: SamplingParams) -> Matcher:
        """A new one for params.json_schema or params.grammar.

        Raises:
            ValueError: which of them it is, and what llguidance says of it; or that there is no tokenizer.
            NotImplementedError: a tokenizer that llguidance does not know.
            ModelError: llguidance is not there; it says how to install it.
        """
        name = "grammar" if params.json_schema is None else "json_schema"
        text = getattr(params, name)
        if self._tokenizer is None:
            raise ValueError(f"{name} needs a tokenizer: give LLM one")
        schema = None
        if name == "json_schema":
            check_length(name, text, MAX_SCHEMA_CHARACTERS)
            check_schema(name, schema := _schema(text))
        else:
            check_length(name, text, MAX_GRAMMAR_CHARACTERS)
            check_lark(name, text)
        library = require("llguidance", "json_schema and grammar", "structured")
        tokenizer = self._of_llguidance(library)
        try:
            if schema is not None:
                text = library.LLMatcher.grammar_from_json_schema(schema)
            else:
                text = library.LLMatcher.grammar_from_lark(text)
        except ValueError as error:  # numbers and characters that it does not read
            raise ValueError(f"{name} must be one that llguidance takes: {error}") from None
        limits = library.LLParserLimits(verbose_errors=False, **_LIMITS)
        inner = library.LLMatcher(tokenizer, text, log_level=0, limits=limits)
        matcher = Matcher(inner, self._vocab_size, name)
        if matcher.error is None:
            matcher.allowed()  # in a language without texts this fails
        if matcher.error is not None and _is_dead_end(inner):
            raise ValueError(
                f"{name} must allow texts that the model's tokens can write, got one whose texts no token begins: "
                "let it allow other characters"
            )
        if matcher.error is not None:
            raise ValueError(f"{name} must be one that llguidance takes: {_reason(inner)}")
        return matcher

    def _of_llguidance(self, library):
        with self._lock:
            if self._made is not None:
                return self._made
            if not isinstance(self._tokenizer, BPETokenizer):
                raise NotImplementedError(
                    "json_schema and grammar need a tokenizer of the package tokenizers, got "
                    f"{type(self._tokenizer).__name__}: convert it with transformers (tokenizer.json)"
                )
            self._made = library.LLTokenizer(
                self._tokenizer.to_json(),
                n_vocab=self._vocab_size,
                eos_token=sorted(self._tokenizer.eos_ids),
            )
            return self._made


def _is_dead_end(inner) -> bool:
    """Whether its error is that the grammar wants more, and that no token of the model is a part of it."""
    return _reason(inner) == "NoExtensionBias"


def _reason(inner) -> str:
    """What llguidance says, without the state and the addresses that some of its errors have."""
    return re.split(r"\s*<(?:state|backtrace|non-verbose)\b", inner.get_error())[0]


def _schema(text: str) -> dict:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"json_schema must be a JSON text: {error}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"json_schema must be a JSON object, got {type(schema).__name__}")
    return schema
