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
#: What is wrong is drawn of bodies alone: a path without parameters cannot be.
CASES = [
    pytest.param(x, mode, id=f"{x.path}-{mode}")
    for x in OPERATIONS
    for mode in (("positive", "negative") if x.method.lower() == "post" else ("positive",))
]
#: Without one of these a request is no request.
NEEDED = ("messages", "prompt")


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "mode"), CASES)
def test_drawn_requests(operation, mode: str) -> None:
    statuses = collections.Counter()
    cases = operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode))
    several = strategies.sets(strategies.integers(0, 40), max_size=3)

    @hypothesis.settings(
        max_examples=150, deadline=20_000, derandomize=True, database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(case=cases, kept=strategies.none() | several)
    def test(case, kept: set[int] | None) -> None:
        if kept is not None and isinstance(case.body, dict):
            # Of many drawn fields one is wrong: a few of them reach further.
            fields = sorted(case.body.keys() - {*NEEDED, "model"})
            names = {*NEEDED, *(name for i, name in enumerate(fields) if i in kept)}
            case.body = {name: case.body[name] for name in case.body if name in names}
        answer = case.call(headers={**(case.headers or {}), "Host": "localhost"})
        statuses[answer.status_code] += 1
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    test()
    assert sum(statuses.values()) > 0
    if mode == "positive" and operation.method.lower() == "post":
        assert statuses[200] > 5, statuses
