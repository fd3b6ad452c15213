"""Completions in a language: which tokens a JSON schema or a grammar allows next, by the package llguidance."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from torch_fdattn.engine.sampling_params import SamplingParams
from torch_fdattn.models import Tokenizer
from torch_fdattn.models.encoding import BPETokenizer
from torch_fdattn.models.errors import require


class Matcher:
    """What a grammar allows after the tokens that it has accepted."""

    def __init__(self, inner, vocab_size: int) -> None:  # inner: llguidance's LLMatcher
        self._inner, self._vocab_size = inner, vocab_size

    def allowed(self) -> Tensor:
        """bool (vocab,) on the host. At the end of a text end tokens are allowed too."""
        bias = torch.frombuffer(bytearray(self._inner.compute_logit_bias()), dtype=torch.uint8)
        allowed = torch.zeros(self._vocab_size, dtype=torch.bool)
        allowed[: len(bias)] = bias[: self._vocab_size] > 0
        return allowed

    def accept(self, token: int) -> bool:
        """Whether nothing can follow this token, which was allowed."""
        self._inner.consume_token(token)
        return self._inner.is_stopped() or self.has_failed

    @property
    def has_failed(self) -> bool:
        """Whether llguidance cannot go on, the grammar being beyond its limits: `allowed` are end tokens then."""
        return self._inner.is_error()


class Grammars:
    """Makes the matchers of a tokenizer's vocabulary.

    Raises:
        NotImplementedError: the tokenizer is not one of `tokenizer.json` or a GGUF file's byte-level BPE.
        ModelError: llguidance is not there; it says how to install it.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._library = require("llguidance", "json_schema and grammar", "structured")
        if not isinstance(tokenizer, BPETokenizer):
            raise NotImplementedError(
                "json_schema and grammar need a tokenizer of the package tokenizers, got "
                f"{type(tokenizer).__name__}: convert it with transformers (tokenizer.json)"
            )
        self._vocab_size = vocab_size
        self._tokenizer = self._library.LLTokenizer(
            tokenizer.to_json(), n_vocab=vocab_size, eos_token=sorted(tokenizer.eos_ids)
        )

    def matcher(self, params: SamplingParams) -> Matcher:
        """A new one for params.json_schema or params.grammar.

        Raises:
            ValueError: which of them it is, and what llguidance says of it.
        """
        library, name = self._library.LLMatcher, "grammar"
        schema = None
        if params.json_schema is not None:
            name, schema = "json_schema", _schema(params.json_schema)
        try:
            if schema is not None:
                text = library.grammar_from_json_schema(schema)
            else:
                text = library.grammar_from_lark(params.grammar)
        except ValueError as error:  # numbers and characters that it does not read
            raise ValueError(f"{name} must be one that llguidance takes: {error}") from None
        inner = library(self._tokenizer, text, log_level=0)
        matcher = Matcher(inner, self._vocab_size)
        if not matcher.has_failed:
            matcher.allowed()  # in a language without texts this fails
        if matcher.has_failed:
            raise ValueError(f"{name} must be one that llguidance takes: {inner.get_error()}")
        return matcher


def _schema(text: str) -> dict:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"json_schema must be a JSON text: {error}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"json_schema must be a JSON object, got {type(schema).__name__}")
    return schema
