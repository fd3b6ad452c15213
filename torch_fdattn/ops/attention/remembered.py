"""What `autotune` has found: in the process, and in a JSON file for other processes.

{"tiles": {"<device>, triton <version>, sources <hash>": {"<call>": {"<kernel>": "128x64w8s3"}}}}
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from torch_fdattn.ops.attention.configs import TileConfig

Parts = dict[str, TileConfig]


class Memory:
    """Tiles by device with its software, and by call; with a path, read from it and written to it."""

    def __init__(self, path: Path | None) -> None:
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"path must lie in a directory that exists, got {path}")
        self.path = path
        self.tiles: dict[str, dict[str, Parts]] = {}
        self._read()

    def get(self, where: str, call: str) -> Parts | None:
        return self.tiles.get(where, {}).get(call)

    def put(self, where: str, call: str, parts: Parts) -> None:
        self._read()  # what other processes have written meanwhile
        self.tiles.setdefault(where, {})[call] = parts
        if self.path is None:
            return
        texts = {
            where: {call: {name: str(x) for name, x in parts.items()} for call, parts in calls.items()}
            for where, calls in self.tiles.items()
        }  # fmt: skip
        partial = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        partial.write_text(json.dumps({"tiles": texts}, indent=1, sort_keys=True) + "\n")
        partial.replace(self.path)  # whole or not at all

    def _read(self) -> None:
        if self.path is None:
            return
        with contextlib.suppress(FileNotFoundError):
            try:
                for where, calls in json.loads(self.path.read_text())["tiles"].items():
                    for call, texts in calls.items():
                        parts = {name: TileConfig.parse(x).checked() for name, x in texts.items()}
                        self.tiles.setdefault(where, {})[call] = parts
            except (ValueError, TypeError, KeyError, AttributeError, IsADirectoryError) as failure:
                raise ValueError(
                    f"path must name a file that autotune wrote, or none, got {self.path}: {failure}"
                ) from failure
