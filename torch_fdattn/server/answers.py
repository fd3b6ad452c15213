"""What chat and plain completions have in common: a sequence's progress, the usage, the frame of an answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterable
from typing import Any

from torch_fdattn.engine.outputs import CompletionOutput, RequestOutput
from torch_fdattn.server.errors import APIError
from torch_fdattn.server.logprobs import Place
from torch_fdattn.server.schemas import SamplingFields

Outputs = AsyncIterator[tuple[int, RequestOutput]]


class Progress:
    """How much of a sequence's cumulative output has been taken."""

    def __init__(self) -> None:
        self.num_characters = self.num_tokens = 0
        self.is_finished = False

    def take(self, output: CompletionOutput) -> tuple[str, list[Place]]:
        """The text since the last call, and the log-probabilities of its tokens where there are any."""
        text = output.text[self.num_characters :]
        places: list[Place] = []
        if output.logprobs is not None:
            new = slice(self.num_tokens, None)
            places = list(zip(output.token_ids[new], output.logprobs[new], strict=False))
        self.num_characters = max(self.num_characters, len(output.text))
        self.num_tokens = len(output.token_ids)
        self.is_finished = output.finish_reason is not None
        if output.finish_reason == "abort":
            raise APIError(503, "the request was ended before its answer was complete")
        return text, places


class AnswerFrame:
    """The fields that are the same in all chunks of an answer, and its usage."""

    def __init__(self, kind: str, request: SamplingFields, model_name: str) -> None:
        prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._kind, self._model, self._created = kind, model_name, int(time.time())
        self._has_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._last: dict[int, RequestOutput] = {}

    def saw(self, prompt_index: int, output: RequestOutput) -> None:
        self._last[prompt_index] = output

    def answer(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head(self._kind), "choices": choices, "usage": self._usage()}

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._kind == "chat.completion" else self._kind
        usage = {"usage": None} if self._has_usage else {}
        return {**self._head(kind), "choices": [choice], **usage}

    def last_chunks(self) -> Iterable[dict[str, Any]]:
        """The usage, where it was asked for."""
        if self._has_usage:
            yield {**self.chunk({}), "choices": [], "usage": self._usage()}

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self._created, "model": self._model}
        return {**head, "system_fingerprint": None}

    def _usage(self) -> dict[str, Any]:
        outputs = self._last.values()
        prompt = sum(len(x.prompt_token_ids) for x in outputs)
        new = sum(len(choice.token_ids) for x in outputs for choice in x.outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(x.num_cached_tokens for x in outputs)},
        }


def check_stream_options(request: SamplingFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise APIError(400, "stream_options needs stream true", param="stream_options")
