"""The kernels of the one-sided exchanges, compiled for NVIDIA GPUs: no spills, wide stores of words."""

from __future__ import annotations

import contextlib
import types
from unittest import mock

import pytest
import torch

from tests.compile_only.resources import ARCHS, _resources, recorded
from torch_fdattn.dist import one_sided_gather
from torch_fdattn.dist.decode import fused, push, push_tiled, rows, two_shot
from torch_fdattn.dist.symmetric_memory import PeerMemory
from torch_fdattn.ops.library import INTERPRET

pytestmark = pytest.mark.skipif(
    INTERPRET, reason="compiles kernels, which the interpreter replaces"
)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@contextlib.contextmanager
def ranks(world: int):
    """Modules that believe to be rank 1 of so many, their channels on the meta device."""
    words = meta(8, dtype=torch.int64)
    channel = types.SimpleNamespace(
        rank=1, world=world, half_bytes=1 << 20, memory=PeerMemory(words, words, None), state=words,
        fault=types.SimpleNamespace(tensor=words), enter=lambda: None,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for module in (fused, push, push_tiled, two_shot, one_sided_gather):
            stack.enter_context(mock.patch.object(module, "channel", return_value=channel))
            stack.enter_context(mock.patch.object(module, "rank_and_size", return_value=(1, world)))
            if hasattr(module, "INTERPRET"):
                stack.enter_context(mock.patch.object(module, "INTERPRET", False))
        stack.enter_context(mock.patch.object(rows, "INTERPRET", False))
        yield


def check(launches, arch: str) -> None:
    assert launches
    for launch in launches:
        found = _resources(launch, ARCHS[arch])
        assert found.spills == 0, found
        assert not found.undefined, found
        assert found.shared <= ARCHS[arch].shared_limit, found


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("head_sharded", [False, True])
@pytest.mark.parametrize(
    ("batch", "world", "dim"), [(1, 4, 128), (64, 4, 128), (16, 8, 64), (2, 2, 256)]
)
@pytest.mark.parametrize(
    "module", [fused, two_shot, push, push_tiled], ids=lambda m: m.__name__[21:]
)
def test_merges(module, batch: int, world: int, dim: int, head_sharded: bool, arch: str) -> None:
    part, lse = meta(batch, 32, 1, dim), meta(batch, 32, 1)
    with ranks(world), recorded() as launches:
        module.merge(part, lse, torch.bfloat16, "0", head_sharded)
    check(launches, arch)


@pytest.mark.parametrize("nbytes", [4, 1 << 14, 1 << 20])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_all_gather(world: int, nbytes: int) -> None:
    with ranks(world), recorded() as launches:
        one_sided_gather.all_gather(meta(nbytes // 4), "0")
    check(launches, "sm_90")
