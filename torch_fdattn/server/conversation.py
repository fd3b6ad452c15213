"""From a chat request's messages to a prompt, and how its reply is to be read.

What a template cannot express is refused by the field's name. Source of the two forms that are read:
Qwen's and Hermes' `<tool_call>{"name": …, "arguments": …}</tool_call>`, and `<think>…</think>`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any

from torch_fdattn.models import ModelError, Tokenizer
from torch_fdattn.models.chat_template import GIVEN_VARIABLES, template_variables
from torch_fdattn.server.errors import APIError
from torch_fdattn.server.schemas import ChatMessage, Tool

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
THINK, THINK_END = "<think>", "</think>"


@dataclass(frozen=True)
class Conversation:
    """A prompt as text, and what its reply may hold besides text."""

    prompt: str
    has_tools: bool  # tool calls are read out of the reply
    has_reasoning: bool  # <think>…</think> at its beginning is reasoning_content
    in_reasoning: bool  # the prompt has opened it already


async def read_conversation(
    tokenizer: Tokenizer, messages: list[ChatMessage], tools: list[Tool] | None = None,
    variables: dict[str, Any] | None = None,
) -> Conversation:  # fmt: skip
    """The prompt of a conversation by the tokenizer's chat template, up to where the reply begins; made outside of the event
    loop, which a long conversation would hold up."""
    return await asyncio.to_thread(_read, tokenizer, messages, tools, variables)


def _read(
    tokenizer: Tokenizer, messages: list[ChatMessage], tools: list[Tool] | None,
    variables: dict[str, Any] | None,
) -> Conversation:  # fmt: skip
    template = tokenizer.chat_template
    if template is None:
        raise APIError(
            400,
            "messages need a chat template, which this model has not: use /v1/completions",
            param="messages",
        )
    if tools:
        _check_tools(template)
    if variables:
        _check_variables(template, variables, {*GIVEN_VARIABLES, *tokenizer.special_texts})
    try:
        text = tokenizer.chat_text(
            [_as_template(message, f"messages[{i}]") for i, message in enumerate(messages)],
            [tool.model_dump(exclude_none=True) for tool in tools] if tools else None,
            **(variables or {}),
        )
    except ModelError as error:
        raise APIError(400, str(error), param="messages") from None
    opened = text.rstrip().endswith(THINK)
    closed = text.rstrip().endswith(THINK_END)  # as enable_thinking=False has it
    return Conversation(
        prompt=text,
        has_tools=bool(tools),
        has_reasoning=THINK in template and not closed,
        in_reasoning=opened,
    )


def _check_tools(template: str) -> None:
    if "tools" not in _variables_of(template):
        raise APIError(400, "this model's chat template takes no tools: leave them out", param="tools")  # fmt: skip
    if TOOL_CALL not in template or "<function=" in template:
        raise APIError(
            400, "this model's chat template writes tool calls in a form that the server does not read "
            f"(it reads {TOOL_CALL} with JSON): leave the tools out",
            param="tools",
        )  # fmt: skip


def _check_variables(template: str, given: Iterable[str], reserved: Set[str]) -> None:
    free = _variables_of(template) - reserved
    for name in given:
        field = f"chat_template_kwargs.{name}"
        if name in reserved:
            names = ", ".join(sorted(reserved))
            raise APIError(
                400, f"{field} is what the server itself gives the chat template ({names}): take it out",
                param=field,
            )  # fmt: skip
        if name not in free:
            names = ", ".join(sorted(free)) or "it has none"
            raise APIError(
                400, f"{field} is no variable of this model's chat template ({names}): take it out", param=field
            )  # fmt: skip


def _variables_of(template: str) -> Set[str]:
    try:
        return template_variables(template)
    except ModelError as error:
        raise APIError(400, str(error), param="messages") from None


def _as_template(message: ChatMessage, where: str) -> dict[str, Any]:
    """A message as templates take it: text in one run, the arguments of calls as an object."""
    given = message.model_dump(exclude_none=True)
    if given["role"] == "developer":  # the later name of the first role
        given["role"] = "system"
    if isinstance(message.content, list):
        given["content"] = "".join(part.text for part in message.content)
    for i, call in enumerate(given.get("tool_calls", ())):
        name = f"{where}.tool_calls[{i}].function.arguments"
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        except (ValueError, RecursionError):
            raise APIError(400, f"{name} must be JSON, as text", param=name) from None
    if given.get("content") is None and not given.get("tool_calls"):
        raise APIError(400, f"{where}.content must be given", param=f"{where}.content")
    return given
