"""A progress bar on rank 0's terminal, through rich where it is installed; otherwise nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def progress(items: Iterable[Item], total: int, text: str, rank: int) -> Iterator[Item]:
    """The items, with a bar while they are taken."""
    if rank or not sys.stderr.isatty():
        yield from items
        return
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        yield from items
        return
    yield from track(items, text, total=total, console=Console(stderr=True), transient=True)
