"""The examples in the server's docstrings."""

from __future__ import annotations

import doctest
import importlib

import pytest
import torch

import torch_fdattn
from tests.server import running  # noqa: F401  (skips without the extra)


@pytest.mark.parametrize("name", ["options", "errors", "reply_parser", "bench.workload"])
def test_examples(name: str) -> None:
    module = importlib.import_module(f"torch_fdattn.server.{name}")
    names = {"torch": torch, "torch_fdattn": torch_fdattn}
    result = doctest.testmod(module, extraglobs=names)
    assert result.attempted > 0
    assert result.failed == 0
