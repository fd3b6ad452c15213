"""For tests that start processes: these import this checkout, and whatever packages this process finds."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(*first: Path | str, **variables: str) -> dict[str, str]:
    """This process's, with `first` and the checkout ahead of what PYTHONPATH has, and with these variables."""
    folders = (*map(str, first), str(ROOT), os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(filter(None, folders))
    return {**os.environ, "PYTHONPATH": path, **variables}
