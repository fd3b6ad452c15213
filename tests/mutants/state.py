"""Results that outlive a run: one JSON file, which several shards on one machine may write."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from tests.mutants.running import ROOT, Outcome

#: Where git looks for nothing.
STATE = ROOT / "build/mutants.json"


class State:
    """What is known of each run, by its name: the key of the sources that it was made with, and its outcome."""

    def __init__(self, path: Path = STATE) -> None:
        self.path = path

    def read(self) -> dict[str, dict]:
        if not self.path.exists():
            return {}
        return json.loads(self.path.read_text(encoding="utf-8"))

    def find(self, name: str, key: str) -> Outcome | None:
        """The outcome with these very sources; none where the tests neither passed nor failed."""
        entry = self.read().get(name)
        if entry is None or entry["key"] != key or entry["verdict"] == "neither":
            return None
        return Outcome(entry["verdict"], entry["summary"], entry["seconds"])

    def keep(self, name: str, key: str, outcome: Outcome) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            entry = {"key": key, **outcome._asdict(), "seconds": round(outcome.seconds, 1)}
            text = json.dumps({**self.read(), name: entry}, indent=1, sort_keys=True)
            new = self.path.with_suffix(".new")
            new.write_text(text + "\n", encoding="utf-8")
            os.replace(new, self.path)  # a run that is ended leaves a whole file
