"""Standard output that cannot be written: a full disk, a reader that has gone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class OutputError(OSError):
    """Text that could not be written."""


def write(text: str) -> None:
    """Writes at once, or raises OutputError."""
    try:
        print(text, end="", flush=True)
    except OSError as error:
        # Python writes what the buffer still holds when it ends: let that not fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputError(f"cannot write the text ({error.strerror})") from None


@contextmanager
def unwritable_is_one_line() -> Iterator[None]:
    """Around a whole command: one line on stderr and exit status 1 in place of any other end of it."""
    try:
        yield
    finally:
        try:
            write("")  # what a failed print has left in the buffer, it still holds
        except OutputError as error:
            print(f"fdattn: {error}", file=sys.stderr)
            raise SystemExit(1) from None
