"""Strategy `fused` of `invariant_block`: one kernel for a rank's blocks, the exchange and the ranks' nodes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from torch_fdattn.dist import chosen_strategy, decode
from torch_fdattn.dist.decode.one_sided import ONE_SIDED
from torch_fdattn.ops.library import INTERPRET, launches

from .test_rank_invariant import HALF, alone, expect_same_bits  # noqa: F401


@pytest.fixture(autouse=True)
def _kernels(rank_device: torch.device) -> None:
    if rank_device.type == "cpu" and not INTERPRET:
        pytest.skip("tests a kernel: needs a CUDA device or TRITON_INTERPRET=1")


@pytest.mark.parametrize(
    ("blocks", "at_once"),
    [(1, 32), (2, 32), (4, 2), *(pytest.param(8, n, marks=pytest.mark.slow) for n in (32, 4))],
)
def test_the_bits_of_one_rank(group, alone, rank_device, monkeypatch, blocks, at_once) -> None:  # noqa: F811
    """Of contiguous shards of a power of two of blocks, of which a launch merges so many at once."""
    from torch_fdattn.dist.decode import fused_tree

    monkeypatch.setattr(fused_tree, "MAX_LEAVES", at_once)
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(blocks)
    length = 4 * blocks * world
    q = torch.randn(2, 2, 2, 32, device=rank_device, dtype=HALF)
    k = torch.randn(2, 1, length, 32, device=rank_device, dtype=HALF)
    v = torch.randn(2, 1, length, 20, device=rank_device, dtype=HALF)
    lens = torch.tensor([length, length // 2 - 1], dtype=torch.int32, device=rank_device)
    own = [x[:, :, 4 * blocks * rank : 4 * blocks * (rank + 1)] for x in (k, v)]
    for given in (dict(), dict(sinks=torch.randn(2, device=rank_device))):
        given["invariant_block"] = 4
        expected = decode(q, k, v, lens, alone, **given)
        for strategy in ("auto", "fused", "symm_all_gather", "all_gather"):
            before = launches["dist_merge/fused_tree"]
            found = decode(q, *own, lens, group, strategy=strategy, **given)
            expect_same_bits(found, expected)
            one_sided = strategy == "auto" and chosen_strategy(q, group) in ONE_SIDED
            fused = world > 1 and (one_sided or strategy == "fused")
            assert launches["dist_merge/fused_tree"] - before == fused
