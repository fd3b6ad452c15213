"""The text of one request as it comes, for a caller that has an `LLM` to itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from torch_fdattn.engine.llm import LLM
from torch_fdattn.engine.sampling_params import SamplingParams
from torch_fdattn.engine.stats import Stats

_REQUEST = "text"


def stream_text(
    llm: LLM, prompt: str | Sequence[int], params: SamplingParams, *,
    should_stop: Callable[[], bool] = lambda: False, stats: Stats | None = None,
) -> Iterator[str]:  # fmt: skip
    """The completion's text, in parts as they are made: "" where a token ends within a character.

    All ranks of the LLM must iterate, to the end or to the same token. An iterator that is closed aborts its request, whose
    pages are free then.

    Args:
        llm: with a tokenizer, and no other request.
        prompt: text, or token ids.
        params: of one completion.
        should_stop: asked after each part, on all ranks with the same answer; True ends the completion, with the text that was
            held back.
        stats: filled in as it goes.

    Raises:
        PromptError, ValueError, TypeError: as `LLM.add_request`, when the first part is asked for; nothing runs then.
        LogitsError, PeerTimeout: as `LLM.step`.

    Examples:
        >>> model = torch_fdattn.models.load_model("smollm2")
        >>> tokenizer = torch_fdattn.models.load_tokenizer("smollm2")
        >>> llm = torch_fdattn.engine.LLM(model, tokenizer, max_num_seqs=1, max_model_len=64)
        >>> params = torch_fdattn.engine.SamplingParams(max_tokens=2, temperature=0)
        >>> list(torch_fdattn.engine.stream_text(llm, "The capital of France is", params))
        [' Paris', '.']
    """
    if llm.tokenizer is None:
        raise ValueError("llm must have a tokenizer, got one without: give it to LLM")
    if params.n != 1:
        raise ValueError(f"params must ask for one completion (n=1), got n={params.n}")
    if llm.has_unfinished:
        raise ValueError("llm must have no other request: use add_request and step")
    stats = Stats() if stats is None else stats
    began, drawn, text = time.perf_counter(), 0, ""
    llm.add_request(_REQUEST, prompt, params)
    try:
        while True:
            for output in llm.step():  # one, or none while the prompt is computed
                (completion,), seconds = output.outputs, time.perf_counter() - began
                held, tokens = (
                    len(output.prompt_token_ids) + drawn,
                    len(completion.token_ids) - drawn,
                )
                if drawn:
                    stats.next(tokens, seconds, llm.step_bytes(held))
                else:
                    stats.prompt_tokens = held
                    stats.first(tokens, seconds)
                drawn += tokens
                part, text = completion.text[len(text) :], completion.text
                yield part
                if output.finished:
                    return
                if should_stop():
                    yield llm.abort(_REQUEST).outputs[0].text[len(text) :]
                    return
                began = time.perf_counter()  # what the caller does with a part is not our time
    finally:
        llm.abort(_REQUEST)
        while llm.has_unfinished:  # a step that was on its way
            llm.step()
