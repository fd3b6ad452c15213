"""The sections that are asked for, one after the other, and the record that they make."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime

import torch

from torch_fdattn import tables
from torch_fdattn.tables.lookup import triton_version
from torch_fdattn.tune import (
    attention_tiles,
    decode_splits,
    dist_decode,
    ring_attention,
    tensor_parallel,
)
from torch_fdattn.tune.session import Session
from torch_fdattn.version import __version__

#: Sections of one device, and of all ranks of a group.
ONE_DEVICE = {x.SECTION: x.measure for x in (attention_tiles, decode_splits)}
OVER_RANKS = {x.SECTION: x.measure for x in (dist_decode, ring_attention, tensor_parallel)}


def tune(session: Session, sections: Sequence[str], seconds: float) -> dict:
    """The machine's record with what was measured, the same on all ranks; for `tables.write`.

    Args:
        sections: of ONE_DEVICE where the session has no group, else of OVER_RANKS.
        seconds: that all of them may take; each has its share of what is left.
    """
    measures, end = ONE_DEVICE if session.group is None else OVER_RANKS, time.monotonic() + seconds
    record = machine(session.device)
    with tables.shipped_tables_only():
        for number, name in enumerate(sections):
            session.allow((end - time.monotonic()) / (len(sections) - number))
            record[name] = measures[name](session)
    return record


def machine(device: torch.device) -> dict:
    """What a record says of this machine."""
    return dict(
        **tables.Device.of(device)._asdict(),
        triton=triton_version(),
        torch_fdattn=__version__,
        torch=str(torch.__version__),
        count=torch.cuda.device_count() if device.type == "cuda" else 1,
        date=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
    )
