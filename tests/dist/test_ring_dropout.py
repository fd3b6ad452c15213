"""Dropout in `dist.ring_attention` against attention on one process: one seed drops the same weights."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import torch_fdattn
from torch_fdattn.compile_backend import fdattn
from torch_fdattn.dist import SequenceShards, context_parallel, ring_attention, shard_batch

from .test_ring_attention import STRATEGIES, drawn_shards


def normal(heads, total, device, dtype=torch.float32):
    return [torch.randn(2, h, total, 16, dtype=dtype, device=device) for h in heads]


def drawn_heads(rng: random.Random, strategy: str) -> tuple[int, int, int]:
    """Of q, k and v; with "ulysses" ranks have parts of them."""
    kv_heads = rng.choice([1, dist.get_world_size() if strategy == "ulysses" else 2])
    return 2 * dist.get_world_size() if strategy == "ulysses" else 4, kv_heads, kv_heads


def seed_of(number: int, device) -> torch.Tensor:
    return torch.tensor([number, 1 << 40], device=device)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", range(6))
def test_drawn(group, rank_device, seed, strategy) -> None:
    rng = random.Random(f"dropout {seed} {strategy}")
    torch.manual_seed(seed)
    world, rank = dist.get_world_size(), dist.get_rank()
    total = rng.choice([7, 40, 83])
    shards = drawn_shards(rng, total, world)
    window = rng.choice([None, (min(rng.randint(0, 40), total), 0)])
    given = dict(causal=window is not None or rng.random() < 0.5, window=window, dropout_p=rng.choice([0.1, 0.5, 1.0]))  # fmt: skip
    inputs = normal(drawn_heads(rng, strategy), total, rank_device)
    dout, dlse = torch.randn_like(inputs[0]), torch.randn_like(inputs[0][..., 0])
    wide = [x.double().cpu().requires_grad_() for x in inputs]
    exact = torch_fdattn.attention(*wide, dropout_seed=seed_of(seed, "cpu"), **given)
    exact_grads = torch.autograd.grad(exact, wide, [dout.double().cpu(), dlse.double().cpu()])

    own = [shards.shard(x, rank, 2).clone().requires_grad_() for x in inputs]
    if strategy == "query_split":
        own[1:] = [x.clone().requires_grad_() for x in inputs[1:]]
    given |= dict(shards=shards, strategy=strategy, dropout_seed=seed_of(seed, rank_device))
    found = ring_attention(*own, group, **given)
    grads = torch.autograd.grad(found, own, [shards.shard(x, rank, 2) for x in (dout, dlse)])
    # With query_split the gradients of K and V are whole on every rank.
    sharded = 3 if strategy == "query_split" else 5
    for i, (value, right) in enumerate(zip((*found, *grads), (*exact, *exact_grads), strict=True)):
        right = right.detach() if i >= sharded else shards.shard(right.detach(), rank, 2)
        torch.testing.assert_close(value.double().cpu(), right, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_documents_count_positions_of_the_sequence(group, rank_device, strategy) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = SequenceShards.zigzag(8 * world, world)
    begins = [0, 5, 8 * world - 1, 8 * world]
    document = torch.bucketize(torch.arange(8 * world), torch.tensor(begins[1:]), right=True)
    visible = (document[:, None] == document).to(rank_device)
    inputs = normal(drawn_heads(random.Random(0), strategy), 8 * world, rank_device)
    given = dict(causal=True, dropout_p=0.3, dropout_seed=seed_of(3, rank_device))
    expected = torch_fdattn.attention(*inputs, attn_mask=visible, **given)
    own = [shards.shard(x, rank, 2) for x in inputs]
    if strategy == "query_split":
        own[1:] = inputs[1:]
    found = ring_attention(*own, group, shards=shards, cu_seqlens=begins, strategy=strategy, **given)  # fmt: skip
    for value, right in zip(found, expected, strict=True):
        torch.testing.assert_close(value, shards.shard(right, rank, 2))


def drawn_by_rank_0(q: torch.Tensor) -> torch.Tensor:
    """The seed that rank 0's generator draws next; each rank's own comes to another place."""
    torch.manual_seed(100 + dist.get_rank())
    seed = torch.ops.fdattn.dropout_seed(q)
    dist.broadcast(seed, 0)
    torch.manual_seed(100 + dist.get_rank())
    return seed


def test_without_a_seed_rank_0_draws_it(group, rank_device) -> None:
    """In a model too, by either call, and where a checkpoint computes it again."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = SequenceShards.zigzag(16 * world, world)
    inputs = normal((4, 4, 4), 16 * world, rank_device)
    whole = [x.clone().requires_grad_() for x in inputs]
    seed = drawn_by_rank_0(inputs[0])
    expected = torch_fdattn.attention(*whole, causal=True, dropout_p=0.5, dropout_seed=seed)[0]
    weights = torch.randn_like(expected)
    dist.broadcast(weights, 0)
    expected_grads = torch.autograd.grad((expected * weights).sum(), whole)
    own = [x.requires_grad_() for x in shard_batch(group, shards, *inputs, dim=2)]
    own_weights = shards.shard(weights, rank, 2)
    calls = (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.5),
        lambda q, k, v: torch_fdattn.attention(q, k, v, causal=True, dropout_p=0.5)[0],
    )
    for call in calls:
        for run in (call, lambda *x, call=call: checkpoint(call, *x, use_reentrant=False)):
            drawn_by_rank_0(inputs[0])
            with context_parallel(group, shards=shards):
                found = run(*own)
                grads = torch.autograd.grad((found * own_weights).sum(), own)
            for value, right in zip((found, *grads), (expected, *expected_grads), strict=True):
                torch.testing.assert_close(value, shards.shard(right.detach(), rank, 2))


def test_attention_under_the_compile_backend(group, rank_device) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = SequenceShards.zigzag(8 * world, world)
    inputs, seed = normal((2 * world,) * 3, 8 * world, rank_device), seed_of(5, rank_device)

    def layer(q, k, v):
        return torch_fdattn.attention(q, k, v, causal=True, dropout_p=0.5, dropout_seed=seed)[0]

    expected = shards.shard(layer(*inputs), rank, 2)
    own = shard_batch(group, shards, *inputs, dim=2)
    for strategy in ("ring", "ulysses"):
        option = {"group": group, "shards": shards, "strategy": strategy}
        torch._dynamo.reset()
        options = {"context_parallel": option, "lower": "aot_eager"}
        compiled = torch.compile(layer, backend=fdattn, fullgraph=True, options=options)
        torch.testing.assert_close(compiled(*own), expected)


def test_heads_of_a_part_are_counted_from_the_first(group, rank_device) -> None:
    """A seed of three numbers, of which "ulysses" makes one for each rank; compiled too."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = SequenceShards.contiguous(8 * world, world)
    inputs = normal((2 * world,) * 3, 8 * world, rank_device)
    seed = torch.tensor([3, 1 << 40, 5], device=rank_device)
    expected = torch_fdattn.attention(*inputs, dropout_p=0.5, dropout_seed=seed)[0]
    other = torch_fdattn.attention(*inputs, dropout_p=0.5, dropout_seed=seed[:2].clone())[0]
    assert not torch.equal(expected, other)
    own = shard_batch(group, shards, *inputs, dim=2)

    def run(q, k, v, seed):
        options = dict(shards=shards, strategy="ulysses", dropout_p=0.5, dropout_seed=seed)
        return ring_attention(q, k, v, group, **options)[0]

    torch._dynamo.reset()
    for call in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        torch.testing.assert_close(call(*own, seed), shards.shard(expected, rank, 2))


def test_compiles(group, rank_device) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = SequenceShards.zigzag(8 * world, world)
    own = [shards.shard(x, rank, 2).requires_grad_() for x in normal((4, 2, 2), 8 * world, rank_device)]  # fmt: skip

    def run(q, k, v, seed):
        options = dict(shards=shards, causal=True, dropout_p=0.5, dropout_seed=seed)
        return ring_attention(q, k, v, group, **options)[0]

    seed = seed_of(0, rank_device)
    expected = run(*own, seed)
    expected_grads = torch.autograd.grad(expected.sum(), own)
    torch._dynamo.reset()
    found = torch.compile(run, backend="aot_eager", fullgraph=True)(*own, seed)
    grads = torch.autograd.grad(found.sum(), own)
    assert torch.equal(found, expected)
    # Not the same bits: autograd's expanded dO is contiguous when compiled, and kernels of other strides sum in another order.
    torch.testing.assert_close(grads, expected_grads)


def test_refusals(group, rank_device) -> None:
    """On every rank, what one rank alone gets wrong too."""
    world, rank = dist.get_world_size(), dist.get_rank()
    q, k, v = normal((world,) * 3, 6, rank_device)
    if world > 1:
        mine = seed_of(rank, rank_device)
        if rank_device.type == "cpu":
            with pytest.raises(ValueError, match="dropout_seed"):
                ring_attention(q, k, v, group, dropout_p=0.5, dropout_seed=mine)
    with pytest.raises(ValueError, match=r"dropout_p must be from 0 to 1, got 1.5"):
        ring_attention(q, k, v, group, dropout_p=1.5)
    seed = seed_of(0, rank_device).to(torch.int32 if rank == 0 else torch.int64)
    with pytest.raises(TypeError, match="dropout_seed must be int64"):
        ring_attention(q, k, v, group, dropout_p=0.5, dropout_seed=seed)
    with pytest.raises(TypeError, match="dropout_p must be a number, got"):
        ring_attention(q, k, v, group, dropout_p="a" if rank == 0 else 0.5)
    with pytest.raises(ValueError, match="strategy must be"):
        ring_attention(q, k, v, group, strategy="rings" if rank == 0 else "star")
    shards = SequenceShards.contiguous(6 * world, world)
    begins = torch.tensor([0, 6 * world], dtype=torch.int32, device=rank_device)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    with (
        context_parallel(group, shards=shards),
        pytest.raises(NotImplementedError, match=r"dropout of dense attention.*got dropout_p"),
    ):
        torch_fdattn.varlen_attention(*packed, begins, dropout_p=0.5)
