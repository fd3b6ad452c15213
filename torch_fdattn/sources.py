"""A hash of our own sources: what was made by other sources (cached graphs, tuned tiles) is not to be used."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

_ROOT = Path(__file__).parent


@functools.cache
def hash_of(*parts: str) -> str:
    """Of every Python and JSON file in these folders, and of these files, of the package."""
    found = hashlib.sha256()
    for path in sorted((*_ROOT.rglob("*.py"), *_ROOT.rglob("*.json"))):
        if path.relative_to(_ROOT).parts[0] in parts:
            found.update(str(path.relative_to(_ROOT)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()
