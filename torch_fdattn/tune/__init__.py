"""`fdattn tune`: measures this machine, and says what was the fastest, for the tuned table that `auto` reads.

Each section of the table is a module with `measure(session)`, which returns its entries.
"""

from __future__ import annotations

from torch_fdattn.tune.run import ONE_DEVICE, OVER_RANKS, tune
from torch_fdattn.tune.session import Measurement, Session

__all__ = ["ONE_DEVICE", "OVER_RANKS", "Measurement", "Session", "tune"]
