"""A reply's text as it streams, taken apart into reasoning, content and tool calls."""

from __future__ import annotations

import json
import uuid
from typing import Any, NamedTuple

from torch_fdattn.server.conversation import THINK, THINK_END, TOOL_CALL, TOOL_CALL_END


class Delta(NamedTuple):
    """What to append to a message's field: text, or one tool call."""

    field: str  # content, reasoning_content or tool_calls
    value: str | dict[str, Any]


class ReplyParser:
    """Text in, deltas out; what may be the beginning of a tag is held back until it is decided.

    A tool call that is not JSON with a name and arguments (as with NaN or 1e999), or that is not closed, is content as it stands.

    Args:
        has_reasoning: <think>…</think> at the reply's beginning is reasoning.
        in_reasoning: the prompt has opened it already.
        has_tools: <tool_call>…</tool_call> is a tool call.

    Examples:
        >>> from torch_fdattn.server.reply_parser import ReplyParser
        >>> parser = ReplyParser(has_reasoning=True)
        >>> parser.push("<think>Tok") + parser.push("yo?</think>Tokyo.") + parser.finish()
        [Delta(field='reasoning_content', value='Tok'), Delta(field='reasoning_content', value='yo?'), Delta(field='content', value='Tokyo.')]
    """

    def __init__(
        self, *, has_reasoning: bool = False, in_reasoning: bool = False, has_tools: bool = False
    ) -> None:
        self._has_tools = has_tools
        self._read = self._read_content
        if has_reasoning:
            self._read = self._read_reasoning if in_reasoning else self._read_start
        self._text = ""  # not yet decided
        self._trims = in_reasoning  # the white space behind a tag is no part of what follows
        self.num_calls = 0

    def push(self, text: str) -> list[Delta]:
        """The deltas that `text` completes."""
        self._text += text
        deltas: list[Delta] = []
        while self._read(deltas):
            pass
        return deltas

    def finish(self) -> list[Delta]:
        """What was held back, at the reply's end."""
        if self._read == self._read_start:
            self._read = self._read_content
        deltas = self.push("")
        rest, self._text = self._text, ""
        if self._read == self._read_call:
            rest = TOOL_CALL + rest
        field = "reasoning_content" if self._read == self._read_reasoning else "content"
        if rest and not (self._trims and rest.isspace()):
            deltas.append(Delta(field, rest))
        return deltas

    # Each of these reads what it can of the text, and says whether another one is to go on.

    def _read_start(self, deltas: list[Delta]) -> bool:
        text = self._text.lstrip()
        if text.startswith(THINK):
            self._text = text.removeprefix(THINK)
            self._read, self._trims = self._read_reasoning, True
            return True
        if THINK.startswith(text):  # not decided, or nothing there
            return False
        self._read = self._read_content
        return True

    def _read_reasoning(self, deltas: list[Delta]) -> bool:
        return self._read_until(THINK_END, "reasoning_content", self._read_content, deltas)

    def _read_content(self, deltas: list[Delta]) -> bool:
        if self._has_tools:
            return self._read_until(TOOL_CALL, "content", self._read_call, deltas)
        text = self._text.lstrip() if self._trims else self._text
        self._emit("content", text, deltas)
        self._text = ""
        return False

    def _read_call(self, deltas: list[Delta]) -> bool:
        inside, end, rest = self._text.partition(TOOL_CALL_END)
        if not end:
            return False
        self._text = rest
        if (call := _parse_call(inside)) is None:
            deltas.append(Delta("content", TOOL_CALL + inside + TOOL_CALL_END))
        else:
            deltas.append(Delta("tool_calls", {"index": self.num_calls, **call}))
            self.num_calls += 1
        self._read, self._trims = self._read_content, True
        return True

    def _read_until(self, tag: str, field: str, then: Any, deltas: list[Delta]) -> bool:
        """Text up to a tag, without the white space around the tag."""
        text = self._text.lstrip() if self._trims else self._text
        before, found, rest = text.partition(tag)
        if found:
            self._emit(field, before.rstrip(), deltas)
            self._text, self._read, self._trims = rest, then, True
            return True
        length = len(text) - _overlap(text, tag)
        length = len(text[:length].rstrip())
        self._emit(field, text[:length], deltas)
        self._text = text[length:]
        return False

    def _emit(self, field: str, text: str, deltas: list[Delta]) -> None:
        if text:
            deltas.append(Delta(field, text))
            self._trims = False


def _overlap(text: str, tag: str) -> int:
    """How many of the text's last characters may be the beginning of the tag."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


def _parse_call(text: str) -> dict[str, Any] | None:
    try:
        call = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    if not isinstance(arguments := call.get("arguments", {}), dict):
        return None
    try:  # 1e999 is read as an infinity
        arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return {
        "id": f"call_{uuid.uuid4().hex}",
        "type": "function",
        "function": {"name": call["name"], "arguments": arguments},
    }


def _refuse(constant: str) -> None:
    raise ValueError(f"JSON has no {constant}")
