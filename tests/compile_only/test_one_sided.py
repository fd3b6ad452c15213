"""The kernels of the one-sided exchanges, compiled for NVIDIA GPUs: no spills, wide stores of words."""

from __future__ import annotations

import contextlib
import types
from unittest import mock

import pytest
import torch

from tests.compile_only.compiled import compile_launch, resources_of
from tests.compile_only.launches import recorded
from tests.compile_only.targets import ARCHS
from torch_fdattn.dist.decode import (
    fused,
    fused_parts,
    fused_tree,
    push,
    push_tiled,
    rows,
    two_shot,
)
from torch_fdattn.dist.symm import lamport, one_sided_gather
from torch_fdattn.dist.symm.symmetric_memory import PeerMemory
from torch_fdattn.launch.launches import run
from torch_fdattn.ops.decode.inputs import Cache, DecodeCall, GlobalLengths
from torch_fdattn.ops.decode.launch import DecodeLaunchPlan
from torch_fdattn.ops.library import INTERPRET
from torch_fdattn.ops.options import DecodeOptions
from torch_fdattn.ops.positions import Mask

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
        for module in (rows, two_shot, lamport, one_sided_gather):
            for name, value in (("channel", channel), ("rank_and_size", (1, world))):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, return_value=value))
            if hasattr(module, "INTERPRET"):
                stack.enter_context(mock.patch.object(module, "INTERPRET", False))
        yield


#: What ptxas of CUDA 12.8 puts on the stack, in bytes: of the fused kernel for head dim 128 one predicate (which
#: rows exist: P2R, STL), stored once before the wait and loaded once after it. No look at memory touches it. Of the
#: tree's kernel, by triton 3.6 and over three ranks, two registers, stored and loaded once while it merges its own leaves.
STACK = {("fused", "sm_90"): 8, ("fused_tree", "sm_90"): 8}


def check(launches, arch: str) -> None:
    assert launches
    for launch in launches:
        found = resources_of(launch, ARCHS[arch])
        assert found.spills <= STACK.get((found.kernel, arch), 0), found
        assert not found.undefined, found
        assert found.shared <= ARCHS[arch].shared_limit, found


MERGES = [
    (fused, 1, 4, 128, False, "sm_90"),
    (fused, 16, 8, 64, True, "sm_90"),
    (two_shot, 64, 4, 128, False, "sm_90"),
    (two_shot, 64, 4, 256, False, "sm_90"),
    (push, 16, 8, 64, False, "sm_90"),
    (push_tiled, 64, 4, 128, False, "sm_90"),
    *(
        pytest.param(*x, marks=pytest.mark.slow)
        for x in (
            (fused, 2, 2, 256, False, "sm_80"),
            (two_shot, 1, 4, 128, False, "sm_90"),
            (two_shot, 64, 8, 128, False, "sm_90"),
            (two_shot, 64, 3, 96, False, "sm_90"),
            (two_shot, 16, 8, 64, False, "sm_80"),
            (push, 2, 2, 256, True, "sm_80"),
            (push_tiled, 16, 8, 64, True, "sm_90"),
            (push_tiled, 2, 2, 256, False, "sm_80"),
        )
    ),
]


@pytest.mark.parametrize(
    ("module", "batch", "world", "dim", "head_sharded", "arch"),
    MERGES,
    ids=lambda x: x.__name__.rpartition(".")[2] if isinstance(x, types.ModuleType) else None,
)
def test_merges(module, batch: int, world: int, dim: int, head_sharded: bool, arch: str) -> None:
    part, lse = meta(batch, 32, 1, dim), meta(batch, 32, 1)
    with ranks(world), recorded() as launches:
        module.merge(part, lse, torch.bfloat16, "0", head_sharded)
    check(launches, arch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_two_shot_by_wide_words(dtype: torch.dtype) -> None:
    """Parts, what the call before left and what is waited for; a word is its own flag."""
    with ranks(4), recorded() as launches:
        two_shot.merge(meta(64, 32, 1, 128), meta(64, 32, 1), dtype, "0", False)
    check(launches, "sm_90")
    (launch,) = launches
    text = compile_launch(launch, ARCHS["sm_90"]).asm["ptx"]
    assert text.count("st.global.v4") >= 3
    assert "ld.volatile.global.v4" in text
    assert "fence" not in text


@pytest.mark.parametrize(
    ("kv_heads", "q_len", "world", "dim", "head_sharded", "arch"),
    [
        (8, 1, 4, 128, False, "sm_90"),
        pytest.param(1, 4, 2, 64, False, "sm_90", marks=pytest.mark.slow),
        pytest.param(1, 2, 8, 256, True, "sm_90", marks=pytest.mark.slow),
    ],
)
def test_exchange_that_merges_parts(
    kv_heads: int, q_len: int, world: int, dim: int, head_sharded: bool, arch: str
) -> None:
    """Launched as the pieces' dependent, with everything that a shard's bounds may take."""
    q, k = (
        meta(1, *shape, dim, dtype=torch.bfloat16) for shape in ((32, q_len), (kv_heads, 65536))
    )
    part, lse = meta(1, 32, q_len, dim), meta(1, 32, q_len)
    numbers = [meta(1, dtype=torch.int32) for _ in range(3)]
    early = arch == "sm_90"
    with (
        ranks(world),
        mock.patch.object(fused_parts, "uses_pdl", return_value=early),
        recorded() as launches,
    ):
        options = DecodeOptions(Mask(*numbers, 4095, 0, 16, 16 * world), 0.1)
        shard = GlobalLengths(16, 16, 16 * world, 1 << 20)
        call = DecodeCall(q, Cache(k, k.clone()), options, shard)
        plan = DecodeLaunchPlan(call, part, capability=ARCHS[arch].capability)
        parts, others = meta(plan.floats), call.tensors
        run(plan.launches(q, *call.cache[:2], part, lse, parts, *others, merge=False))
        unmerged = plan.unmerged(parts, others[:3])
        fused_parts.merge(part, lse, unmerged, torch.bfloat16, "0", head_sharded)
    assert [launch.kernel.__name__ for launch in launches] == [
        "_decode_kernel",
        "_fused_parts_kernel",
    ]
    check(launches[1:], arch)


@pytest.mark.parametrize(("world", "parts"), [(2, 16), (8, 1), (3, 32)])
def test_exchange_in_a_tree(world: int, parts: int) -> None:
    outs, lses = meta(parts, 2, 8, 1, 128), meta(parts, 2, 8, 1)
    with (
        ranks(world),
        mock.patch.object(fused_tree, "uses_pdl", return_value=True),
        recorded() as launches,
    ):
        fused_tree.merge(outs, lses, torch.bfloat16, "0")
    check(launches, "sm_90")


@pytest.mark.parametrize(("world", "nbytes"), [(8, 1 << 14), (4, 1 << 20)])
def test_all_gather(world: int, nbytes: int) -> None:
    with ranks(world), recorded() as launches:
        one_sided_gather.all_gather(meta(nbytes // 4), "0")
    check(launches, "sm_90")
