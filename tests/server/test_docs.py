"""docs/server.md lists every field, since it says that others are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.server import running  # noqa: F401  (skips without the extra)
from torch_fdattn.server import schemas

DOCS = Path(__file__).parents[2] / "docs" / "server.md"


@pytest.mark.parametrize("name", ["ChatRequest", "CompletionRequest", "TokenizeRequest"])
def test_every_field_is_listed(name: str) -> None:
    fields = DOCS.read_text(encoding="utf-8").partition("\n## Fields\n")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`(\w+)[`.]", fields))
    assert getattr(schemas, name).model_fields.keys() - listed == set()
