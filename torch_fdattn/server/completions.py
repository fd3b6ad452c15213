"""`/v1/completions`: one prompt or several, as text or token ids, in; what follows them out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

from torch_fdattn.engine.outputs import CompletionOutput
from torch_fdattn.server.answers import AnswerFrame, Outputs, Progress, check_stream_options
from torch_fdattn.server.errors import APIError
from torch_fdattn.server.logprobs import completion_logprobs
from torch_fdattn.server.sampling import completion_params
from torch_fdattn.server.schemas import CompletionRequest
from torch_fdattn.server.service import Service


class Completion:
    """One request, checked; `chunks` or `answer` runs it. Prompt p's choice k has the index p·n + k."""

    def __init__(
        self, outputs: Outputs, frame: AnswerFrame, num_prompts: int, n: int, top: int | None
    ) -> None:
        self._outputs, self._frame, self._n = outputs, frame, n
        self._choices = [_Choice(i, top) for i in range(num_prompts * n)]

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """What a stream's events hold."""
        async with aclosing(self._outputs) as outputs:
            async for prompt_index, output in outputs:
                self._frame.saw(prompt_index, output)
                for sequence in output.outputs:
                    choice = self._choices[prompt_index * self._n + sequence.index]
                    for part in choice.chunks(sequence):
                        yield self._frame.chunk(part)
        for chunk in self._frame.last_chunks():
            yield chunk

    async def answer(self) -> dict[str, Any]:
        """The answer in one."""
        last: dict[int, CompletionOutput] = {}
        async with aclosing(self._outputs) as outputs:
            async for prompt_index, output in outputs:
                self._frame.saw(prompt_index, output)
                last |= {prompt_index * self._n + x.index: x for x in output.outputs}
        return self._frame.answer([self._choices[i].take(last[i]) for i in sorted(last)])


class _Choice:
    def __init__(self, index: int, top: int | None) -> None:
        self._index, self._top = index, top
        self._progress = Progress()

    def chunks(self, output: CompletionOutput) -> Iterator[dict[str, Any]]:
        if self._progress.is_finished:
            return
        choice = self.take(output)
        if choice["text"] or choice["logprobs"] or choice["finish_reason"]:
            yield choice

    def take(self, output: CompletionOutput) -> dict[str, Any]:
        """What this output adds."""
        offset = self._progress.num_characters
        text, places = self._progress.take(output)
        has_logprobs = self._top is not None and places
        return {
            "index": self._index,
            "text": text,
            "logprobs": completion_logprobs(places, self._top, offset) if has_logprobs else None,
            "finish_reason": output.finish_reason,
        }


async def make_completion(request: CompletionRequest, service: Service) -> Completion:
    """Checks a request; what is wrong with it is an APIError."""
    service.check_model(request.model)
    check_stream_options(request)
    prompts = _prompts(request.prompt)
    service.check_count(request.n, len(prompts))
    ids = [
        await service.encode(prompt, name) if isinstance(prompt, str) else prompt
        for name, prompt in prompts.items()
    ]
    for name, prompt in zip(prompts, ids, strict=True):
        service.check_prompt(prompt, name)
    params = [completion_params(request, len(prompt), service.max_model_len) for prompt in ids]
    frame = AnswerFrame("text_completion", request, service.options.model_name)
    outputs = service.generate(ids, params, frame.id, {})
    return Completion(outputs, frame, len(ids), params[0].n, request.logprobs)


def _prompts(given: str | list) -> dict[str, str | list[int]]:
    """Each prompt, by what errors call it."""
    if given == []:
        raise APIError(400, "prompt must hold at least one prompt or token id, got none", param="prompt")  # fmt: skip
    if isinstance(given, str) or isinstance(given[0], int):
        return {"prompt": given}
    return {f"prompt[{i}]": prompt for i, prompt in enumerate(given)}
