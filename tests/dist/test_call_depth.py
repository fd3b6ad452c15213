"""How many of our files are on top of each other in a repeated call of `dist.decode`: what a reader who follows it must
keep in mind."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.distributed as dist

import torch_fdattn
from torch_fdattn.dist import decode
from torch_fdattn.dist.decode.one_sided import ONE_SIDED
from torch_fdattn.dist.symm.availability import available
from torch_fdattn.environment import INTERPRET

PACKAGE = str(Path(torch_fdattn.__file__).parent) + os.sep
MAX_FILES = 6


def files_on(frame: FrameType | None) -> list[str]:
    """Our files on a stack, the innermost first; none below a kernel or a reference, which stands for one."""
    found: list[str] = []
    while frame is not None:
        path = frame.f_code.co_filename
        if f"{os.sep}triton{os.sep}" in path or (
            path.endswith("reference.py") and found[:1] != [path]
        ):
            return []
        if path.startswith(PACKAGE) and path not in found:
            found.append(path)
        frame = frame.f_back
    return found


def deepest(call: Callable[[], None]) -> list[str]:
    """The most of our files that are on the stack at once while the call runs."""
    most: list[str] = []

    def watch(frame: FrameType, event: str, argument: object) -> None:
        nonlocal most
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            most = max(most, files_on(frame), key=len)

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [path.removeprefix(PACKAGE) for path in most]


@pytest.mark.parametrize("strategy", ["auto", "all_gather", "star", "ring", *ONE_SIDED])
def test_repeated_call(group, rank_device, strategy: str) -> None:
    if strategy in ONE_SIDED and (dist.get_world_size() == 1 or not available(group, rank_device)):
        pytest.skip("needs 2 ranks: that share symmetric memory")
    torch.manual_seed(0)
    dtype = torch.float16 if rank_device.type == "cuda" else torch.float32
    q = torch.randn(1, 2, 1, 16, device=rank_device, dtype=dtype)
    k, v = torch.randn(2, 1, 1, 16, 16, device=rank_device, dtype=dtype)
    lens = torch.tensor([20], dtype=torch.int32, device=rank_device)

    def call() -> None:
        decode(q, k, v, lens, group, kv_block=8, strategy=strategy)

    for _ in range(2):  # kernels are bound by the second call
        call()
    found = deepest(call)
    assert {"dist/functional.py", "dist/decode/op.py"} <= set(found)  # it watched the call
    # Interpreted kernels are never bound: launches.py and device.py stand in the place of driver_launch.py.
    assert len(found) <= MAX_FILES + INTERPRET, found
