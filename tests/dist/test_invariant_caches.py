"""`invariant_block` of KV caches, and of a model over them: the same bits on all ranks' shards as on those of a group of one rank."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.engine.cached_batch import CachedBatch
from tests.engine.tiny import PROMPTS, random_model
from torch_fdattn.dist import DistributedDecodeAttention, ShardedKVCache, decode
from torch_fdattn.engine import PagedKVCache

from .test_rank_invariant import alone, expect_same_bits  # noqa: F401

BLOCK = 8
SEEDS = [pytest.param(x, marks=() if x < 4 else pytest.mark.slow) for x in range(30)]


def made(paged: bool, capacity: int, device, group, kv_block: int | None, **options):
    sizes = dict(dtype=torch.float32, device=device, group=group, kv_block=kv_block, **options)
    if paged:
        return PagedKVCache(2, 3, 2, capacity, 16, page_size=4, invariant_block=BLOCK, **sizes)
    return ShardedKVCache(2, 3, 2, capacity, 16, invariant_block=BLOCK, **sizes)


@pytest.mark.parametrize("seed", SEEDS)
def test_steps(group, alone, rank_device, seed) -> None:  # noqa: F811
    """Prompts in chunks, single tokens and ragged steps; contiguous and round-robin, pages, quantised."""
    rng = random.Random(f"invariant caches {seed}")
    paged, capacity = bool(seed % 2), rng.randint(30, 75)
    options = {"kv_dtype": rng.choice([None, None, "int8"])}
    kv_block = rng.choice([None, BLOCK, 3 * BLOCK, 100 * BLOCK])
    shared = made(paged, capacity, rank_device, group, kv_block, **options)
    one = made(paged, capacity, rank_device, alone, rng.choice([None, BLOCK, 2 * BLOCK]), **options)
    window = rng.choice([None, (rng.randint(0, 20), 0)])
    for tokens in (rng.randint(17, 22), 1, 5, 1):
        q, k, v = (torch.randn(3, h, tokens, 16, device=rank_device) for h in (4, 2, 2))
        for layer in range(2):
            results = []
            for cache in (shared, one):
                cache.append(layer, k, v)
                results.append(cache.attend(layer, q, window=window))
            expect_same_bits(results[:1], results[1:])
            assert not results[0].isnan().any()
        for cache in (shared, one):
            cache.advance(tokens)
    assert shared.held == one.held


def test_the_values_are_those_without_it(group, rank_device) -> None:
    caches = [
        ShardedKVCache(
            1, 2, 2, 50, 16, dtype=torch.float32, device=rank_device, group=group, **given
        )
        for given in ({}, {"invariant_block": BLOCK})
    ]
    q, k, v = (torch.randn(2, h, 40, 16, device=rank_device) for h in (4, 2, 2))
    results = []
    for cache in caches:
        cache.append(0, k, v)
        results.append(cache.attend(0, q))
    torch.testing.assert_close(*results)


def test_layer(group, alone, rank_device) -> None:  # noqa: F811
    sizes = dict(dtype=torch.float32, device=rank_device, invariant_block=BLOCK)
    layers = [DistributedDecodeAttention(2, 2, 40, 16, group=x, **sizes) for x in (group, alone)]
    for tokens in (20, 1, 1):
        q, k, v = (torch.randn(2, h, tokens, 16, device=rank_device) for h in (4, 2, 2))
        expect_same_bits(*((layer(q, k, v),) for layer in layers))


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_a_models_logits(group, alone, rank_device, kind) -> None:  # noqa: F811
    """Of prompts and of each step."""
    options = {"page_size": 4} if kind == "paged" else {}
    batches = [
        CachedBatch(
            random_model(rank_device), kind, batch=len(PROMPTS), group=x, invariant_block=BLOCK, kv_block=kv_block,
            **options,
        )
        for x, kv_block in ((group, BLOCK), (alone, None))
    ]  # fmt: skip
    logits = [batch.prefill(PROMPTS) for batch in batches]
    for _ in range(6):
        expect_same_bits(logits[:1], logits[1:])
        tokens = logits[0].argmax(-1, keepdim=True)
        logits = [batch.step(tokens) for batch in batches]


def test_refusals(group, rank_device) -> None:
    given = dict(dtype=torch.float32, device=rank_device)
    for wrong, kind, match in (
        (dict(invariant_block=8), ValueError, "group must be a process group with invariant_block"),
        (dict(invariant_block=0, group=group), ValueError, "invariant_block must be at least 1"),
        (dict(invariant_block=8.0, group=group), TypeError, "invariant_block must be an int or None"),
        (dict(invariant_block=8, group=group, kv_block=12), ValueError, "kv_block must be a multiple of invariant_block=8, got 12"),
        (dict(invariant_block=8, group=group, strategy="star"), NotImplementedError, "strategy must be one of .* with invariant_block"),
    ):  # fmt: skip
        with pytest.raises(kind, match=match):
            ShardedKVCache(1, 1, 1, 32, 16, **given, **wrong)
    with pytest.raises(ValueError, match="invariant_block must be whole pages of 16 tokens, got 8"):
        PagedKVCache(1, 1, 1, 32, 16, **given, group=group, invariant_block=8)


def test_the_group_has_all_ranks(group, alone) -> None:  # noqa: F811
    """Or else these tests would compare one rank with itself."""
    assert dist.get_world_size(dist.distributed_c10d._resolve_process_group(alone)) == 1


class LargestTensor(TorchDispatchMode):
    """How many elements the largest tensor has that an op gives."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def test_a_run_beyond_the_capacity_costs_no_memory(group, alone, rank_device) -> None:  # noqa: F811
    """An odd number of blocks, far more than there are, which no rank may send states of."""
    world = dist.get_world_size()
    q, k, v = (torch.randn(1, 2, n, 16, device=rank_device) for n in (1, 24, 24))
    lens = torch.tensor([21], dtype=torch.int32, device=rank_device)
    shard = [x if dist.get_rank() == 0 else torch.full_like(x, torch.nan) for x in (k, v)]
    given = dict(kv_block=BLOCK * (2**20 + 1), invariant_block=BLOCK)
    with LargestTensor() as largest:
        found = decode(q, *shard, lens, group, **given)
    assert largest.elements <= world * k.numel()
    expect_same_bits(found, decode(q, k, v, lens, alone, kv_block=24, invariant_block=BLOCK))
