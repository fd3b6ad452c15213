"""What a planted fault is, and the run of tests that must notice it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tests:
    """One run of pytest: in the interpreter, on CPU tensors, or under torchrun (`interpret` there: of all tests)."""

    __test__ = False  # pytest need not look for tests in it

    name: str
    paths: tuple[str, ...]
    interpret: bool = False
    ranks: int = 0


@dataclass(frozen=True)
class Fault:
    name: str
    file: str
    old: str
    new: str
    tests: Tests
