"""What a planted fault is, and the run of tests that must notice it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tests:
    """One run of pytest: in the interpreter, on CPU tensors, or under torchrun (`interpret` there: of all tests).

    keyword: of pytest's -k, to run a part of the files; needs_sm_90: on CUDA tensors of such a GPU.
    """

    __test__ = False  # pytest need not look for tests in it

    name: str
    paths: tuple[str, ...]
    interpret: bool = False
    ranks: int = 0
    keyword: str = ""
    needs_sm_90: bool = False


@dataclass(frozen=True)
class Fault:
    name: str
    file: str
    old: str
    new: str
    tests: Tests
