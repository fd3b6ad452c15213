"""The faults, as data: what is planted where, and which tests must notice.

Each is one that a hurried edit could make. `old` must occur exactly once in the file, so that a fault cannot
silently stop being planted when the code changes.
"""

from __future__ import annotations

from tests.mutants.faults import (
    attention,
    caches,
    compiled,
    distributed,
    dropins,
    engine,
    hopper,
    host,
    models,
    serving,
    tuned,
)
from tests.mutants.faults.fault import Fault, Tests

__all__ = ["FAULTS", "Fault", "Tests"]

FAULTS = (
    *attention.FAULTS, *hopper.FAULTS, *caches.FAULTS, *host.FAULTS, *compiled.FAULTS, *distributed.FAULTS, *dropins.FAULTS,
    *engine.FAULTS, *models.FAULTS, *serving.FAULTS, *tuned.FAULTS,
)  # fmt: skip
