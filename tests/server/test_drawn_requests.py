"""Requests drawn from the server's own OpenAPI, valid and not, to an engine without a model and to the real one: no 5xx, no hang."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

pytest.importorskip("schemathesis", reason="needs the package schemathesis")
pytest.importorskip("hypothesis", reason="needs the package hypothesis")

import hypothesis
import schemathesis
from hypothesis import strategies

from tests.server import running
from tests.server.fake_engine import FakeEngine
from tests.server.tiny_engine import tiny_llm
from torch_fdattn import engine
from torch_fdattn.server.app import make_app

APP = make_app(FakeEngine(max_model_len=256), running.options())
IN_PROCESS = schemathesis.openapi.from_asgi("/openapi.json", APP, headers={"Host": "localhost"})
#: Asked by HTTP: a schema that knows an application asks that.
BY_HTTP = schemathesis.openapi.from_dict(APP.openapi())
#: What is wrong is drawn of bodies alone: a path without parameters cannot be. Of many fields one is wrong, or more: bodies
#: with what is needed and a few of them reach further.
MODES = {"get": ("positive",), "post": ("positive", "negative", "few fields", "few wrong fields")}


def drawn_cases(schema) -> list:
    operations = [operation.ok() for operation in schema.get_all_operations()]
    return [
        pytest.param(x, mode, id=f"{x.path}-{mode}")
        for x in operations
        for mode in MODES[x.method.lower()]
    ]


#: Without one of these a request is no request.
NEEDED = {"messages": [{"role": "user", "content": "Hello"}], "prompt": "Hello"}
LIMIT_SECONDS = 60  # of an answer, on a busy machine


def statuses_of_drawn(operation, mode: str, examples: int, ask: Callable) -> collections.Counter:
    """ask: from a case and headers to the answer."""
    statuses = collections.Counter()
    is_few = mode.startswith("few")
    generation = {"few fields": "positive", "few wrong fields": "negative"}.get(mode, mode)
    few = strategies.sets(strategies.integers(0, 40), max_size=3)

    @hypothesis.settings(
        max_examples=examples, deadline=LIMIT_SECONDS * 1000, derandomize=True, database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(
        case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(generation)),
        kept=few if is_few else strategies.none(),
    )
    def test(case, kept: set[int] | None) -> None:
        if kept is not None and isinstance(case.body, dict):
            fields = sorted(case.body.keys() - {*NEEDED, "model"})
            needed = {name: value for name, value in NEEDED.items() if name in case.body}
            case.body = needed | {x: case.body[x] for i, x in enumerate(fields) if i in kept}
        answer = ask(case, {**(case.headers or {}), "Host": "localhost"})
        statuses[answer.status_code] += 1
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    test()
    assert sum(statuses.values()) > 0
    return statuses


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "mode"), drawn_cases(IN_PROCESS))
def test_drawn_requests(operation, mode: str) -> None:
    statuses = statuses_of_drawn(
        operation, mode, 150, lambda case, headers: case.call(headers=headers)
    )
    if mode == "few fields":
        assert statuses[200] > 30, statuses


@contextlib.contextmanager
def served_beside(llm: engine.LLM) -> Iterator[str]:
    """The URL of a server on a thread of its own; at its end all pages and rows must be free."""
    url, end = Future(), threading.Event()

    async def serve() -> None:
        asynchronous = engine.AsyncLLM(llm)
        async with running.served(asynchronous, max_sequences=32) as found:
            url.set_result(found)
            await asyncio.to_thread(end.wait)
            await running.until(lambda: not (llm.stats().running or llm.stats().waiting))
        await asynchronous.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    try:
        yield url.result(LIMIT_SECONDS)
    finally:
        end.set()
        thread.join(LIMIT_SECONDS)
    assert not thread.is_alive()
    assert llm.stats().pages_used == 0


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Iterator[tuple[str, engine.LLM]]:
    llm = tiny_llm(tmp_path_factory.mktemp("tiny"))
    with served_beside(llm) as url:
        yield url, llm


@pytest.mark.parametrize(
    "examples", [6, pytest.param(300, marks=pytest.mark.slow)], ids=["quick", "many"]
)
@pytest.mark.parametrize(("operation", "mode"), drawn_cases(BY_HTTP))
def test_drawn_requests_to_the_real_engine(operation, mode: str, examples: int, real) -> None:
    url, llm = real
    before = llm.stats().generated_tokens
    statuses = statuses_of_drawn(
        operation, mode, examples,
        lambda case, headers: case.call(base_url=url, headers=headers, timeout=LIMIT_SECONDS),
    )  # fmt: skip
    if mode == "few fields" and examples > 100:
        assert statuses[200] > 60, statuses
        if operation.path != "/tokenize":
            assert llm.stats().generated_tokens > before
