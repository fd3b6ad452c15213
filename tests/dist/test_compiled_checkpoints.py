"""Compiled context parallelism under activation checkpoints, where a rank's mask hides what it receives: the backward, which runs
the forward's collectives again, must run as many on each rank."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import torch_fdattn
from torch_fdattn.compile_backend import fdattn
from torch_fdattn.dist import SequenceShards, shard_batch

HEADS, DIM = 2, 16


def layer(x, documents=(), window=None):
    """x (B, S, 3 * HEADS * DIM)."""
    q, k, v = (2 * x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
    ends = pairwise(documents or (0, x.shape[1]))
    parts = [
        torch_fdattn.attention(*(y[:, :, a:b] for y in (q, k, v)), causal=True, window=window)[0]
        for a, b in ends
    ]
    return torch.cat(parts, 2).transpose(1, 2).flatten(2).sin()


def compare(group, device, shards, strategy, documents=(), window=None) -> None:
    x = torch.randn(1, shards.total, 3 * HEADS * DIM, device=device, requires_grad=True)
    layer(x, documents, window).square().sum().backward()
    own, expected = shard_batch(group, shards, x.detach(), x.grad)

    def run(x):
        return checkpoint(layer, x, (), window, use_reentrant=False)

    option = {"group": group, "shards": shards, "strategy": strategy}
    if documents:
        option["cu_seqlens"] = list(documents)
    torch._dynamo.reset()
    compiled = torch.compile(
        run, backend=fdattn, fullgraph=True,
        options={"context_parallel": option, "lower": "aot_eager"},
    )  # fmt: skip
    for _ in range(2):
        own = own.detach().requires_grad_()
        compiled(own).square().sum().backward()
        torch.testing.assert_close(own.grad, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strategy", ["ring", "star"])
def test_shards_in_order(group, rank_device, strategy) -> None:
    """The first rank sees no keys of the last one, and a star's root alone reads what it gathers."""
    world = dist.get_world_size()
    compare(group, rank_device, SequenceShards.contiguous(16 * world, world), strategy)


def test_windows(group, rank_device) -> None:
    world = dist.get_world_size()
    shards = SequenceShards.contiguous(16 * world, world)
    compare(group, rank_device, shards, "ring", window=(4, 0))


def test_documents_inside_a_shard(group, rank_device) -> None:
    world = dist.get_world_size()
    shards = SequenceShards.contiguous(16 * world, world)
    documents = (0, *range(10, 16 * world, 16), 16 * world)
    compare(group, rank_device, shards, "ring", documents=documents)


def test_a_rank_without_tokens(group, rank_device) -> None:
    """It reads none of what it gathers."""
    world = dist.get_world_size()
    shards = SequenceShards.from_lengths([16 * world, *[0] * (world - 1)])
    compare(group, rank_device, shards, "all_gather")
    if world > 1:
        with pytest.raises(Exception, match="must have tokens on every rank, got shards of"):
            compare(group, rank_device, shards, "star")
