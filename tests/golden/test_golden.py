"""Today's launches are those of `launches.txt`, which has every kernel of the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden import book
from tests.golden.recorder import Launch

_ROOT = Path(__file__).parents[2]
_DIFFER = "launches differ, file -> today (where that is meant: python -m tests.golden --write):"
#: Lines of differences that are shown.
_SHOWN = 60


def test_launches_are_the_golden_ones() -> None:
    """In a process of its own, which believes to have a GPU and has neither caches nor the interpreter."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.golden"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        lines = (ran.stdout + ran.stderr).splitlines()
        more = [f"… and {len(lines) - _SHOWN} lines more: python -m tests.golden"]
        lines[_SHOWN:] = more * (len(lines) > _SHOWN)
        pytest.fail("\n".join([_DIFFER, *lines]), pytrace=False)


BOOK = {
    "op/one": [Launch("a.k", {"grid": "(1)", "num_warps": "4", "x": "q:bfloat16", "BLOCK": "64"})],
    "op/two": [
        Launch("a.k", {"grid": "(2)", "x": "q:bfloat16", "BLOCK": "64"}),
        Launch("b.k", {"grid": "(2)", "PDL": "True"}),
    ],
    "op/three": [Launch("a.k", {"grid": "(2)", "num_warps": "4", "x": "None", "BLOCK": "64"})],
    "op/nothing": [],
}


def test_a_book_is_read_as_it_was_written() -> None:
    text = book.written(BOOK)
    assert book.read(text) == BOOK
    assert book.written(dict(reversed(BOOK.items()))) == text
    assert text.count("BLOCK=64") == 1


def test_a_difference_names_call_launch_and_argument() -> None:
    today = book.read(book.written(BOOK))
    today["op/two"][0].values["BLOCK"] = "128"
    del today["op/three"][0].values["num_warps"]
    today["op/one"] = today["op/one"] * 2
    del today["op/nothing"]
    assert list(book.differences(BOOK, today)) == [
        "op/nothing: is not in the list of calls",
        "op/one: launches\n    a.k\n -> a.k, a.k",
        "op/three: launch 1, a.k: num_warps 4 -> -",
        "op/two: launch 1, a.k: BLOCK 64 -> 128",
    ]
