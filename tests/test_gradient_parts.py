"""Gradients put together from those of calls: each of a part of the tokens, some of them of the same ones."""

from __future__ import annotations

import random

import pytest
import torch

from torch_fdattn.dist.ring_attention.sequence_shards import Run
from torch_fdattn.dist.ring_attention.unsharded import GradientParts


@pytest.mark.parametrize("seed", range(40))
def test_they_are_the_sums_in_the_order_of_calls(seed: int) -> None:
    """With the bits of adding each call's to zeros, whoever asks for which tokens; and no more is held than a few times N."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    count, length = rng.choice([1, 2]), rng.randint(1, 20)
    x = torch.zeros(2, 3, length, 4, dtype=torch.bfloat16)
    parts, dense = GradientParts(count, x), torch.zeros(count, 2, 3, length, 4)
    for _ in range(rng.choice([0, 1, 2, 30])):
        begin = rng.randrange(length)
        end = rng.choice([length, rng.randint(begin + 1, length)])
        own = torch.randn(count, 2, 3, end - begin, 4)
        parts.add(begin, end, *own)
        dense[:, :, :, begin:end] += own
        assert sum(end - begin for begin, end, _ in parts._parts) <= 2 * length
    cuts = sorted(rng.sample(range(length + 1), rng.randint(0, min(3, length))))
    runs = [Run(a, b - a) for a, b in zip([0, *cuts], [*cuts, length], strict=True)]
    rng.shuffle(runs)
    found = parts.of(runs)
    assert found.dtype == torch.float32
    expected = torch.cat([dense[:, :, :, run.start : run.end] for run in runs], 3)
    assert torch.equal(found, expected)
