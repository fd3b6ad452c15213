"""`/v1/chat/completions`: a conversation in, a message or its deltas out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

from torch_fdattn.engine.outputs import CompletionOutput
from torch_fdattn.server.answers import AnswerFrame, Outputs, Progress, check_stream_options
from torch_fdattn.server.conversation import Conversation, read_conversation
from torch_fdattn.server.logprobs import Place, chat_logprobs
from torch_fdattn.server.reply_parser import Delta, ReplyParser
from torch_fdattn.server.sampling import CHAT_NAMES, chat_params
from torch_fdattn.server.schemas import ChatRequest
from torch_fdattn.server.service import Service


class ChatAnswer:
    """One request, checked; `chunks` or `answer` runs it."""

    def __init__(self, outputs: Outputs, frame: AnswerFrame, choices: list[Choice]) -> None:
        self._outputs, self._frame, self._choices = outputs, frame, choices

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """What a stream's events hold."""
        async with aclosing(self._outputs) as outputs:
            async for prompt_index, output in outputs:
                self._frame.saw(prompt_index, output)
                for sequence in output.outputs:
                    for choice in self._choices[sequence.index].chunks(sequence):
                        yield self._frame.chunk(choice)
        for chunk in self._frame.last_chunks():
            yield chunk

    async def answer(self) -> dict[str, Any]:
        """The answer in one."""
        async with aclosing(self._outputs) as outputs:
            async for prompt_index, output in outputs:
                self._frame.saw(prompt_index, output)
        return self._frame.answer([self._choices[x.index].answer(x) for x in output.outputs])


class Choice:
    """One of a request's n messages.

    Args:
        parser: takes its text apart.
        top: how many alternatives each token's log-probability comes with; None: no log-probabilities.
    """

    def __init__(self, index: int, parser: ReplyParser, top: int | None) -> None:
        self._index, self._parser, self._top = index, parser, top
        self._progress = Progress()
        self._places: list[Place] = []  # of tokens whose text is held back
        self._has_begun = False

    def chunks(self, output: CompletionOutput) -> Iterator[dict[str, Any]]:
        """The choices of the chunks that this output adds."""
        if self._progress.is_finished:
            return
        if not self._has_begun:
            self._has_begun = True
            yield self._chunk({"role": "assistant", "content": ""})
        for delta in self._take(output):
            # A call comes in one delta, its arguments complete.
            value = [delta.value] if delta.field == "tool_calls" else delta.value
            yield self._chunk({delta.field: value}, self._logprobs())
        if self._progress.is_finished:
            yield self._chunk({}, self._logprobs(), self._finish_reason(output))

    def answer(self, output: CompletionOutput) -> dict[str, Any]:
        """The choice of an answer that comes in one."""
        fields: dict[str, str] = {}
        calls = []
        for field, value in self._take(output):
            if field == "tool_calls":
                calls.append({key: value[key] for key in ("id", "type", "function")})
            else:
                fields[field] = fields.get(field, "") + value
        content = fields.pop("content", None if calls else "")
        message = {"role": "assistant", "content": content, **fields}
        return {
            "index": self._index,
            "message": message | ({"tool_calls": calls} if calls else {}),
            "logprobs": self._logprobs(),
            "finish_reason": self._finish_reason(output),
        }

    def _take(self, output: CompletionOutput) -> list[Delta]:
        text, places = self._progress.take(output)
        self._places += places
        deltas = self._parser.push(text)
        return deltas + self._parser.finish() if self._progress.is_finished else deltas

    def _logprobs(self) -> dict[str, Any] | None:
        """Of the tokens that have had none yet."""
        places, self._places = self._places, []
        return chat_logprobs(places, self._top) if self._top is not None and places else None

    def _finish_reason(self, output: CompletionOutput) -> str | None:
        if output.finish_reason == "stop" and self._parser.num_calls:
            return "tool_calls"
        return output.finish_reason

    def _chunk(
        self, delta: dict[str, Any], logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }


async def make_chat(request: ChatRequest, service: Service) -> ChatAnswer:
    """Checks a request; what is wrong with it is an APIError."""
    service.check_model(request.model)
    check_stream_options(request)
    service.check_count(request.n)
    conversation = await read_conversation(
        service.tokenizer,
        request.messages,
        None if request.tool_choice == "none" else request.tools,
        request.chat_template_kwargs,
    )
    ids = await service.encode(conversation.prompt, "messages", add_special_tokens=False)
    service.check_prompt(ids, "messages")
    params = chat_params(request, len(ids), service.max_model_len)
    # What a grammar decides from its first token on has no parts to be told apart.
    is_plain = params.json_schema is not None or params.grammar is not None
    top = params.logprobs
    choices = [Choice(i, _parser(conversation, is_plain), top) for i in range(params.n)]
    frame = AnswerFrame("chat.completion", request, service.options.model_name)
    return ChatAnswer(service.generate([ids], [params], frame.id, CHAT_NAMES), frame, choices)


def _parser(conversation: Conversation, is_plain: bool) -> ReplyParser:
    if is_plain:
        return ReplyParser()
    return ReplyParser(
        has_reasoning=conversation.has_reasoning,
        in_reasoning=conversation.in_reasoning,
        has_tools=conversation.has_tools,
    )
