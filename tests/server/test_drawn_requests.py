"""Requests drawn from the server's own OpenAPI, valid and not: no 5xx, no hang."""

from __future__ import annotations

import collections

import pytest

pytest.importorskip("schemathesis", reason="needs the package schemathesis")
pytest.importorskip("hypothesis", reason="needs the package hypothesis")

import hypothesis
import schemathesis
from hypothesis import strategies

from tests.server import running
from tests.server.fake_engine import FakeEngine
from torch_fdattn.server.app import make_app

SCHEMA = schemathesis.openapi.from_asgi(
    "/openapi.json",
    make_app(FakeEngine(max_model_len=256), running.options()),
    headers={"Host": "localhost"},
)
OPERATIONS = [operation.ok() for operation in SCHEMA.get_all_operations()]
#: What is wrong is drawn of bodies alone: a path without parameters cannot be. Of many fields one is wrong, or more: bodies
#: with what is needed and a few of them reach further.
MODES = {"get": ("positive",), "post": ("positive", "negative", "few fields", "few wrong fields")}
CASES = [
    pytest.param(x, mode, id=f"{x.path}-{mode}")
    for x in OPERATIONS
    for mode in MODES[x.method.lower()]
]
#: Without one of these a request is no request.
NEEDED = {"messages": [{"role": "user", "content": "Hello"}], "prompt": "Hello"}


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "mode"), CASES)
def test_drawn_requests(operation, mode: str) -> None:
    statuses = collections.Counter()
    is_few = mode.startswith("few")
    generation = {"few fields": "positive", "few wrong fields": "negative"}.get(mode, mode)
    few = strategies.sets(strategies.integers(0, 40), max_size=3)

    @hypothesis.settings(
        max_examples=150, deadline=20_000, derandomize=True, database=None,
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
        answer = case.call(headers={**(case.headers or {}), "Host": "localhost"})
        statuses[answer.status_code] += 1
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    test()
    assert sum(statuses.values()) > 0
    if mode == "few fields":
        assert statuses[200] > 30, statuses
