"""Checks of prompts on the host, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

from torch_fdattn.engine.caches import Cache
from torch_fdattn.models import Tokenizer


class PromptError(ValueError):
    """A prompt that cannot be generated from: empty, too long for the cache, unknown tokens.

    Examples:
        >>> config = torch_fdattn.models.ModelConfig("qwen3", 64, 32, 48, 1, 4, 2, 16, 128)
        >>> engine = torch_fdattn.engine.Engine(torch_fdattn.models.Transformer(config), capacity=64)
        >>> engine.generate([[5, 99]], 8)
        Traceback (most recent call last):
            ...
        torch_fdattn.engine.prompts.PromptError: prompt must hold token ids from 0 to 63, got 5 to 99
    """


def check_prompts(
    prompts: Sequence[Sequence[int]], new_tokens: int, vocab_size: int, cache: Cache
) -> None:
    """One prompt for each sequence of the cache, of known tokens, that fits with what is to follow.

    new_tokens: how many will be drawn. The last of them needs no place.
    """
    if len(prompts) != len(cache.held):
        raise ValueError(
            f"prompts must be {len(cache.held)}, one for each sequence of the engine's batch, "
            f"got {len(prompts)}"
        )
    for i, (prompt, held) in enumerate(zip(prompts, cache.held, strict=True)):
        name = "prompt" if len(prompts) == 1 else f"prompts[{i}]"
        if not isinstance(prompt, Sequence):
            raise TypeError(f"{name} must be a sequence of token ids, got {type(prompt).__name__}")
        if not prompt:
            raise PromptError(f"{name} must have at least one token, got none")
        if wrong := [x for x in prompt if not isinstance(x, int) or isinstance(x, bool)]:
            raise TypeError(f"{name} must hold integer token ids, got {wrong[0]!r}")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise PromptError(
                f"{name} must hold token ids from 0 to {vocab_size - 1}, got "
                f"{min(prompt)} to {max(prompt)}"
            )
        if (needed := held + len(prompt) + max(new_tokens - 1, 0)) > cache.capacity:
            more = f" and {new_tokens} new ones" if new_tokens else ""
            raise PromptError(
                f"{name} of {len(prompt)} tokens{more}, after {held} held, need {needed} places, "
                f"the cache has {cache.capacity}"
            )
    lengths = [
        held + len(prompt) + max(new_tokens - 1, 0)
        for prompt, held in zip(prompts, cache.held, strict=True)
    ]
    if shortage := cache.shortage(lengths):
        raise PromptError(shortage)


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
