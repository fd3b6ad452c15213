"""The bounds of a rank's shard: the kernel against torch."""

from __future__ import annotations

import random

import pytest
import torch

from torch_fdattn.dist.decode.local_mask import _local_bounds, local_mask
from torch_fdattn.dist.sharding import ShardMap
from torch_fdattn.ops.positions import FAR, Mask


@pytest.mark.interpreter
def test_the_kernel_gives_what_torch_gives(kernel_device: str) -> None:
    from torch_fdattn.dist.decode.local_mask_kernel import launch_local_mask

    rng = random.Random(0)
    for _ in range(40):
        batch, tokens, world = rng.choice([1, 3, 300]), rng.choice([1, 3]), rng.randint(1, 5)
        shards = ShardMap(rng.randrange(world), world, rng.choice([1, 7, 64]))
        capacity = rng.choice([0, 10, 1000])
        most = rng.choice([FAR, world * capacity])
        q = torch.zeros(batch, 1, tokens, 16, device=kernel_device)

        def drawn(dtype: torch.dtype, batch: int = batch) -> torch.Tensor:
            return torch.randint(-5, 2000, (batch,), dtype=dtype, device=kernel_device)

        starts = [drawn(torch.int32) if rng.random() < 0.4 else None for _ in range(2)]
        mask = Mask(drawn(rng.choice([torch.int32, torch.int64])), *starts, -1, 0, 0, 0)
        ours = launch_local_mask(q, mask, most, capacity, shards, True)
        for found, expected in zip(
            ours, _local_bounds(q, mask, most, capacity, shards), strict=True
        ):
            assert torch.equal(found, expected.int())


def test_positions_are_left_out_where_they_hide_nothing() -> None:
    lens = torch.tensor([5], dtype=torch.int32)
    one, two = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 2, 16)
    causal = Mask(lens, None, None, -1, 0, 0, 0)
    assert local_mask(one, 8, causal, 2, 1, 2)[1:] == (None, None, -1, -1, 0, 0)
    assert local_mask(one, 8, causal, 2, 1, 2, alibi=True).kv_stride == 4
    assert local_mask(two, 8, causal, 2, 1, 2).window_right == 0
    assert local_mask(one, 8, causal._replace(q_start=lens), 2, 1, 2).q_start is not None
