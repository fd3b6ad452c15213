"""Chat templates of whoever published the model: the server goes on while one is rendered, and refuses what has no end."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.server.fake_engine import TEMPLATE, FakeEngine
from tests.server.running import client_of, run
from torch_fdattn.models import template_limits

BODY = {"messages": [{"role": "user", "content": "hello"}]}
ENDLESS = (
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}" + TEMPLATE
)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_template_is_rendered_outside_of_the_event_loop(path: str, monkeypatch) -> None:
    async def test() -> None:
        engine = FakeEngine()
        tokenizer = engine.llm.tokenizer
        render = tokenizer.chat_text

        def slow(*args, **named) -> str:
            time.sleep(1)
            return render(*args, **named)

        monkeypatch.setattr(tokenizer, "chat_text", slow)
        async with client_of(engine) as client:
            asked = asyncio.create_task(client.post(path, json=BODY))
            answers = 0
            while not asked.done():
                assert (await client.get("/health")).status_code == 200
                answers += 1
                await asyncio.sleep(0.01)
            assert (await asked).status_code == 200
            assert answers > 2

    run(test)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_template_without_an_end_is_refused(path: str, monkeypatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_STEPS", 50_000)

    async def test() -> None:
        async with client_of(FakeEngine(chat_template=ENDLESS)) as client:
            answer = await client.post(path, json=BODY)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["param"] == "messages"
            assert "the chat template must take at most 50000 steps" in error["message"]

    run(test)
