"""Texts that the tokenizer gives up are the client's to change: a 400 that names the field."""

from __future__ import annotations

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.running import chat, client_of, run
from torch_fdattn.models import ModelError


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "aaa"}, "prompt"),
        ("/v1/chat/completions", chat("aaa"), "messages"),
        ("/tokenize", {"prompt": "aaa"}, "prompt"),
    ],
)
def test_a_text_that_the_tokenizer_gives_up_is_refused(path, body, param) -> None:
    engine, answers = FakeEngine(), list[httpx.Response]()

    def give_up(text: str, add_special_tokens: bool = True) -> list[int]:
        raise ModelError("the tokenizer failed at the text: retry-limit-in-match over")

    engine.llm.tokenizer.encode = give_up

    async def test() -> None:
        async with client_of(engine) as client:
            answers.append(await client.post(path, json=body))

    run(test)
    error = answers[0].json()["error"]
    assert answers[0].status_code == 400
    assert error["param"] == param
    assert error["message"].startswith(f"{param} must be a text that the tokenizer takes: the tok")
