"""The calls whose launches are written down, a file for each op.

Names are OP/WHAT. What a name says is all in which a call differs from its op's plain one; tensors are unwritten memory,
but for lengths.
"""

from __future__ import annotations

import importlib

from tests.golden.calls.common import Call

_FILES = ("attention", "varlen", "decode", "caches", "exchanges", "linear")


def all_calls() -> list[Call]:
    """New ones, with new tensors."""
    modules = [importlib.import_module(f"{__name__}.{file}") for file in _FILES]
    return [call for module in modules for call in module.calls()]


__all__ = ["Call", "all_calls"]
