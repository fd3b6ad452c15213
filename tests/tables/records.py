"""What tests of the tuned table share: a record of this machine, and a file that is the one that is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from torch_fdattn import tables
from torch_fdattn.dist.tensor_parallel import auto
from torch_fdattn.launch import prepared
from torch_fdattn.tables.lookup import triton_version
from torch_fdattn.version import __version__

TILE = dict(kernel="forward", head_dim=16, dtype="float16", mask="masked", tile="64x32w1s1")
SPLITS = dict(
    head_dim=16, dtype="float16", paged=False, work_tiles=2, kv_len=256, splits_per_sm=4.0
)
FUSED = dict(ranks=2, fused_rows=8)
RING = dict(ranks=2, choices=[[64, "all_gather"], [4096, "one_sided"]])
LINEAR = dict(
    op="matmul_all_reduce", ranks=2, dtype="float32", columns=6, features=8,
    choices=[[4, "low_latency"], [64, "nccl"]],
)  # fmt: skip


def record(device: str | torch.device = "cpu", **changed) -> dict:
    """This machine's, with an entry in each section; changed: fields in place of these."""
    machine = dict(
        **tables.Device.of(torch.device(device))._asdict(), triton=triton_version(), torch_fdattn=__version__,
        torch=torch.__version__, count=1, date="2026-11-28T00:00:00Z",
    )  # fmt: skip
    sections = dict(
        attention_tiles=[TILE],
        decode_splits=[SPLITS],
        dist_decode=[FUSED],
        ring_attention=[RING],
        tensor_parallel=[LINEAR],
    )
    return {**machine, **sections, **changed}


def save(path: Path, *records: dict, **document) -> Path:
    """The records in a file, as they are: nothing is checked."""
    path.write_text(json.dumps({"schema": 1, "machines": records, **document}))
    return path


@contextmanager
def read_from(path: Path | str) -> Iterator[None]:
    """The file that this process reads; prepared launches and choices begin anew, before and behind it."""

    def forget() -> None:
        tables.forget()
        prepared.forget()
        auto._cached_lookup.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_FDATTN_TABLES", str(path))
        forget()
        try:
            yield
        finally:
            forget()
