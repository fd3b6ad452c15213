"""Replies taken apart alike, however their text is cut into parts."""

from __future__ import annotations

import random

import pytest

from tests.server import running  # noqa: F401  (skips without the extra)
from torch_fdattn.server.reply_parser import ReplyParser

CALL = '<tool_call>{"name": "f", "arguments": {"x": "</think>"}}</tool_call>'


def parsed(text: str, cuts: list[int], **options) -> tuple[str, str, list]:
    parser = ReplyParser(**options)
    deltas = []
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        deltas += parser.push(text[start:stop])
    deltas += parser.finish()
    fields = {"content": "", "reasoning_content": ""}
    calls = []
    for field, value in deltas:
        if field == "tool_calls":
            calls.append(
                (value["index"], value["function"]["name"], value["function"]["arguments"])
            )
        else:
            assert value
            fields[field] += value
    return fields["content"], fields["reasoning_content"], calls


@pytest.mark.parametrize(
    ("text", "options", "content", "reasoning", "num_calls"),
    [
        ("plain <think>", {}, "plain <think>", "", 0),
        ("  two spaces\n", {}, "  two spaces\n", "", 0),
        ("", {"has_reasoning": True, "has_tools": True}, "", "", 0),
        ("<think>a</think>b", {"has_reasoning": True}, "b", "a", 0),
        ("\n<think>\n a \n</think>\n\n b\n", {"has_reasoning": True}, "b\n", "a", 0),
        ("a</think>b", {"has_reasoning": True, "in_reasoning": True}, "b", "a", 0),
        ("<think>a <thi", {"has_reasoning": True}, "", "a <thi", 0),
        ("<thinking>", {"has_reasoning": True}, "<thinking>", "", 0),
        ("<thi", {"has_reasoning": True}, "<thi", "", 0),
        ("x <think>a</think>", {"has_reasoning": True}, "x <think>a</think>", "", 0),
        (f"a {CALL}\n{CALL}\n", {"has_tools": True}, "a", "", 2),
        (f"{CALL} b", {"has_tools": True}, "b", "", 1),
        (f"<think>t</think>{CALL}", {"has_tools": True, "has_reasoning": True}, "", "t", 1),
        (CALL, {}, CALL, "", 0),
        ("<tool_call>{}</tool_call>", {"has_tools": True}, "<tool_call>{}</tool_call>", "", 0),
        ("<tool_call>no</tool_call>", {"has_tools": True}, "<tool_call>no</tool_call>", "", 0),
        ('a <tool_call>{"name"', {"has_tools": True}, 'a<tool_call>{"name"', "", 0),
        ("a < b <tool", {"has_tools": True}, "a < b <tool", "", 0),
        ("a \n", {"has_tools": True}, "a \n", "", 0),
    ],
)  # fmt: skip
def test_any_cut_gives_the_same(text, options, content, reasoning, num_calls) -> None:
    generator = random.Random(0)
    cuttings = [[], list(range(1, len(text)))]
    for _ in range(30):
        cuts = sorted(generator.sample(range(len(text) + 1), min(3, len(text))))
        cuttings.append(cuts)
    for cuts in cuttings:
        got = parsed(text, cuts, **options)
        assert got[:2] == (content, reasoning), cuts
        assert got[2] == [(i, "f", '{"x": "</think>"}') for i in range(num_calls)]


@pytest.mark.parametrize(
    "more",
    [
        '"arguments": {"x": NaN}', '"arguments": {"x": -Infinity}', '"arguments": {"x": [-1e999]}',
        '"arguments": {}, "x": NaN', f'"arguments": {{"x": {"9" * 5000}}}',
        f'"arguments": {{"x": {"[" * 500_000 + "]" * 500_000}}}',
    ],
    ids=lambda x: x[:30],
)  # fmt: skip
def test_a_call_whose_arguments_are_no_json_is_content(more: str) -> None:
    text = f'<tool_call>{{"name": "f", {more}}}</tool_call>'
    content, _, calls = parsed(text, [5, 30], has_tools=True)
    assert (content, calls) == (text, [])


def test_text_is_not_held_back_without_need() -> None:
    parser = ReplyParser(has_reasoning=True, has_tools=True)
    assert [x.value for x in parser.push("Hello")] == ["Hello"]
    assert [x.value for x in parser.push(" <")] == []
    assert [x.value for x in parser.push("b")] == [" <b"]
