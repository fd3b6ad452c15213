"""What a request of `LLM` gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


class Logprob(NamedTuple):
    """One token's log-probability by the model's own logits.

    Examples:
        >>> torch_fdattn.engine.Logprob(-0.5, 1, " Paris").rank
        1
    """

    logprob: float  # natural logarithm
    rank: int  # 1: the most likely token
    text: str  # of this token alone; "" without a tokenizer


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt, as far as it has come.

    Attributes:
        index: which of the request's n completions.
        text: without what may yet become a stop string, and without the stop string; "" without a tokenizer.
        token_ids: all tokens drawn, one that ended the completion included.
        logprobs: for each token, by token id, the drawn one and the most likely ones; None where not asked for.
        finish_reason: None while it goes on; "stop": an end token, a stop token or string, the end of a grammar;
            "length": max_tokens or the model's length; "abort": aborted; "error": it could not go on, other completions do.
        error: of "error", what the reason is; it begins with the parameter's name.

    Examples:
        >>> torch_fdattn.engine.CompletionOutput(index=0).finish_reason is None
        True
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """What there is of a request; text and token ids are cumulative.

    Attributes:
        prompt_logprobs: for each token of the prompt as `CompletionOutput.logprobs`, None for the first; None where
            not asked for, and shorter than the prompt until that is computed.
        outputs: n completions, by their index.
        finished: whether all of them have ended.
        num_cached_tokens: tokens of the prompt that the prefix cache had, for the first completion.

    Examples:
        >>> torch_fdattn.engine.RequestOutput(request_id="a", prompt_token_ids=[1, 2]).finished
        False
    """

    request_id: str
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an `LLM` does now and has done since it was made.

    Attributes:
        running, waiting: completions in the batch, and those that wait for a place in it.
        pages_used, pages_total: of the KV cache; pages that are only remembered for their prefix are not used.
        prompt_tokens, generated_tokens: of all requests so far, prefix hits among them, recomputed ones not.
        prefix_hit_tokens, prefix_query_tokens: tokens that admitted completions took from the prefix cache, of those that
            they looked for.
        preemptions: completions that lost their pages and were computed anew.
        proposed_tokens, accepted_tokens: of speculation: tokens proposed, and those of them that completions took, each of
            which spared a step.

    Examples:
        >>> config = torch_fdattn.models.ModelConfig("qwen3", 64, 32, 48, 1, 4, 2, 16, 128)
        >>> llm = torch_fdattn.engine.LLM(torch_fdattn.models.Transformer(config), pages=16)
        >>> llm.stats().pages_total
        16
    """

    running: int
    waiting: int
    pages_used: int
    pages_total: int
    prompt_tokens: int
    generated_tokens: int
    prefix_hit_tokens: int
    prefix_query_tokens: int
    preemptions: int
    proposed_tokens: int = 0
    accepted_tokens: int = 0
