"""Checks of prompts and what requests ask for on the host, before anything runs."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Sequence

from torch_fdattn.engine.sampling_params import SamplingParams
from torch_fdattn.models import ModelError, Tokenizer


class PromptError(ValueError):
    """A prompt that cannot be generated from: empty, too long for the cache, unknown tokens.

    Examples:
        >>> config = torch_fdattn.models.ModelConfig("qwen3", 64, 32, 48, 1, 4, 2, 16, 128)
        >>> llm = torch_fdattn.engine.LLM(torch_fdattn.models.Transformer(config), pages=4)
        >>> llm.generate([[5, 99]])
        Traceback (most recent call last):
            ...
        torch_fdattn.engine.prompts.PromptError: prompts[0] must hold token ids from 0 to 63, got 5 to 99
    """


def prompt_tokens(
    prompt: str | Sequence[int], tokenizer: Tokenizer | None, vocab_size: int, name: str
) -> list[int]:
    """The token ids of one of `LLM`'s prompts, all of them known; name is what errors call it."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise TypeError(f"{name} must be token ids where LLM has no tokenizer, got a str")
        prompt = tokenizer.encode(prompt)
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise TypeError(f"{name} must be a str or a list of token ids, got {type(prompt).__name__}")
    if wrong := [x for x in prompt if type(x) is not int]:
        raise TypeError(f"{name} must hold integer token ids, got {wrong[0]!r}")
    if not prompt:
        raise PromptError(f"{name} must have at least one token, got none")
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise PromptError(
            f"{name} must hold token ids from 0 to {vocab_size - 1}, got {min(prompt)} to {max(prompt)}"
        )
    return list(prompt)


def longest_length(
    tokens: Sequence[int], params: SamplingParams, max_model_len: int, capacity: int, name: str
) -> int:
    """Tokens at which a completion of this prompt ends, the prompt included; capacity: tokens that an `LLM`'s pages hold."""
    if len(tokens) >= max_model_len:
        raise PromptError(
            f"{name} must have fewer than max_model_len = {max_model_len} tokens, got {len(tokens)}"
        )
    longest = max_model_len
    if params.max_tokens is not None:
        longest = min(longest, len(tokens) + params.max_tokens)
    if longest - 1 > capacity:  # the last token is not stored
        raise PromptError(
            f"{name} of {len(tokens)} tokens and max_tokens = {params.max_tokens} need {longest - 1} places, the "
            f"cache has {capacity}: give LLM more pages, or the request a smaller max_tokens"
        )
    return longest


def check_params(
    params: SamplingParams, vocab_size: int, eos_ids: Collection[int], has_tokenizer: bool
) -> None:
    """That a request's parameters suit the model and its tokenizer."""
    if params.stop_token_ids and not (
        0 <= min(params.stop_token_ids) <= max(params.stop_token_ids) < vocab_size
    ):
        raise ValueError(
            f"stop_token_ids must be from 0 to {vocab_size - 1}, got {params.stop_token_ids}"
        )
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
    if params.min_tokens and len(ends) >= vocab_size:
        raise ValueError(
            f"stop_token_ids must leave a token to draw before min_tokens = {params.min_tokens}, got all "
            f"{vocab_size}: leave some out, or set min_tokens to 0"
        )
    if params.stop and not has_tokenizer:
        raise ValueError("stop needs a tokenizer: give LLM one")


def check_end_ids(eos_ids: Collection[int], vocab_size: int) -> None:
    """That a tokenizer's end tokens are of the model: to ban another before min_tokens is out of bounds.

    A model's vocabulary may be larger than the tokenizer's, which then may name any of it.
    """
    if wrong := sorted(i for i in eos_ids if not 0 <= i < vocab_size):
        raise ModelError(
            f"tokenizer.eos_ids must be from 0 to {vocab_size - 1}, the model's vocab_size being {vocab_size}, got "
            f"{reprlib.repr(wrong)}: the tokenizer is of another model, or its files name a wrong eos_token_id"
        )
