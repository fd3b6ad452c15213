"""Why ranks cannot write into each other's memory: what each says of itself, compared."""

import types

import pytest
import torch
import torch.distributed as dist

from torch_fdattn.dist.symm import availability

ALIKE = {"host": "a", "device": "", "kind": (9, 0), "unsupported_reason": None}


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({}, None),
        ({"host": "b"}, "several hosts"),
        ({"kind": (8, 0)}, "several compute capabilities"),
        ({"unsupported_reason": "no memory"}, "rank 1: no memory"),
    ],
)
def test_what_differs(monkeypatch, others: dict, expected: str | None) -> None:
    def gather(found: list, mine: object, group: object) -> None:
        found[:] = [mine, {**mine, **others} if isinstance(mine, dict) else mine]

    monkeypatch.setattr(availability, "_about_this_rank", lambda device: ALIKE)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    group = types.SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    found = availability._find_unsupported_reason(group, torch.device("cpu"))
    assert found is None if expected is None else expected in found
