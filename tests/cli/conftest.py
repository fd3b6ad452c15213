"""The tiny model that most commands are run on."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("typer", reason="needs the extra cli")
pytest.importorskip("rich", reason="needs the extra cli")


from tests.tiny_model import save_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A random model of 64 tokens, most of which are written outside ASCII."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))
