"""The engine as asyncio has it."""

from __future__ import annotations


class EngineDead(RuntimeError):
    """The engine has failed and answers no more requests."""
