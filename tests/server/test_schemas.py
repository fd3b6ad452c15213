"""What is wrong with a body: few errors of it, however many there are."""

from __future__ import annotations

import pydantic
import pytest

from torch_fdattn.server.schemas import CompletionRequest


@pytest.mark.parametrize(
    ("body", "errors"),
    [
        ({"prompt": [1.5] * 1000}, 5),
        ({"prompt": [{}] * 1000}, 5),
        ({"prompt": [[1, "a"] * 1000]}, 5),
        ({"prompt": "a", "stop": [0] * 1000}, 2),
        ({"prompt": "a"} | {f"key {i}": 0 for i in range(1000)}, 1),
        ({"prompt": "a", "stream_options": {f"key {i}": 0 for i in range(1000)}}, 1),
    ],
)
def test_many_errors_are_few(body: dict, errors: int) -> None:
    """A body of 4 MiB has a million of them, each of which would take some KiB."""
    with pytest.raises(pydantic.ValidationError) as found:
        CompletionRequest.model_validate(body)
    assert found.value.error_count() <= errors
