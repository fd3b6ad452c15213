"""Chunked attention and prefix-LM in `dist.ring_attention` against attention under an explicit mask on one process."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import torch_fdattn
from torch_fdattn.dist import SequenceShards, context_parallel, ring_attention

from .test_ring_attention import STRATEGIES, drawn_shards
from .test_ring_documents import drawn_documents, same_document


def mask_of_chunks(documents: list[int], chunk: int) -> torch.Tensor:
    """(total, total), by positions in each document."""
    begins = torch.tensor(documents)
    place = torch.arange(documents[-1]) - begins[:-1].repeat_interleave(begins.diff())
    return same_document(documents) & (place[:, None] // chunk == place // chunk)


def mask_of_prefixes(documents: list[int], prefixes: list[int]) -> torch.Tensor:
    """(total, total), causal ones included."""
    at = torch.arange(documents[-1])
    seen = at <= at[:, None]
    for begin, prefix in zip(documents[:-1], itertools.cycle(prefixes), strict=False):
        seen = seen | ((at >= begin) & (at < begin + prefix))
    return seen & same_document(documents)


def drawn_mask(rng: random.Random, total: int) -> tuple[dict, torch.Tensor]:
    """(options of ring_attention, the mask of all positions)."""
    documents, given = [0, total], {}
    if rng.random() < 0.5:
        documents = given["cu_seqlens"] = drawn_documents(rng, total)
    at = torch.arange(total)
    if rng.random() < 0.5:
        given |= dict(attention_chunk=rng.choice([1, 3, 8, 100]), causal=rng.random() < 0.7)
        seen = mask_of_chunks(documents, given["attention_chunk"])
        if given["causal"] and rng.random() < 0.4:
            given["window"] = rng.randint(0, 5), 0
            seen = seen & (at >= at[:, None] - given["window"][0])
        return given, seen & (at <= at[:, None]) if given["causal"] else seen
    lengths = [b - a for a, b in itertools.pairwise(documents)]
    prefixes = [rng.randint(0, x) for x in lengths]
    if rng.random() < 0.4:
        prefixes = [min(lengths)]
    one = len(prefixes) == 1 and rng.random() < 0.5
    given |= dict(causal=True, prefix_lens=prefixes[0] if one else prefixes)
    return given, mask_of_prefixes(documents, prefixes)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", [pytest.param(x, marks=() if x < 6 else pytest.mark.slow) for x in range(20)])  # fmt: skip
def test_drawn(group, rank_device, seed, strategy) -> None:
    """Values and gradients; with scores, lengths and dropout."""
    rng = random.Random(f"chunks {seed} {strategy}")
    torch.manual_seed(seed)
    world, rank = dist.get_world_size(), dist.get_rank()
    heads, total = 2 * world, rng.choice([7, 24, 61])
    shards = drawn_shards(rng, total, world)
    given, mask = drawn_mask(rng, total)
    scores = {}
    if rng.random() < 0.3:
        scores["alibi_slopes"] = torch.rand(heads)
    if rng.random() < 0.3:
        scores["sinks"] = torch.randn(heads)
    if rng.random() < 0.3:
        scores |= dict(dropout_p=0.3, dropout_seed=torch.tensor([seed, 1]))
    if rng.random() < 0.3:
        scores["kv_lens"] = torch.tensor([rng.randint(1, total), total], dtype=torch.int32)
    inputs = [torch.randn(2, h, total, 16, device=rank_device) for h in (heads, world, world)]
    dout = torch.randn_like(inputs[0])
    wide = [x.double().cpu().requires_grad_() for x in inputs]
    starts = torch.zeros(2, dtype=torch.int32)
    exact = torch_fdattn.attention(*wide, q_start=starts, attn_mask=mask, **scores)
    exact_grads = torch.autograd.grad(exact[0], wide, dout.double().cpu())

    own = [shards.shard(x, rank, 2).clone().requires_grad_() for x in inputs]
    if strategy == "query_split":
        own[1:] = [x.clone().requires_grad_() for x in inputs[1:]]
    given |= {n: x.to(rank_device) if isinstance(x, torch.Tensor) else x for n, x in scores.items()}
    found = ring_attention(*own, group, shards=shards, strategy=strategy, **given)
    grads = torch.autograd.grad(found[0], own, shards.shard(dout, rank, 2))
    # With query_split the gradients of K and V are whole on every rank.
    sharded = 3 if strategy == "query_split" else 5
    for i, (value, right) in enumerate(zip((*found, *grads), (*exact, *exact_grads), strict=True)):
        right = right.detach() if i >= sharded else shards.shard(right.detach(), rank, 2)
        torch.testing.assert_close(value.double().cpu(), right, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    "given",
    [
        dict(attention_chunk=6),
        pytest.param(dict(prefix_lens=11), marks=pytest.mark.slow),
        dict(prefix_lens=[11, 3], cu_seqlens=[0, 17]),
    ],
    ids=["chunks", "prefix", "prefixes"],
)
def test_compiles_and_has_the_same_bits_with_any_shards(group, hierarchies, rank_device, given) -> None:  # fmt: skip
    """By blocks whose borders are no chunk's and no prefix's."""
    world, rank = dist.get_world_size(), dist.get_rank()
    total = 16 * world
    given = given | dict(causal=True)
    if "cu_seqlens" in given:
        given["cu_seqlens"] = [*given["cu_seqlens"], total]
    whole = [torch.randn(1, world, total, 16, device=rank_device) for _ in range(3)]
    results = []
    for shards in (SequenceShards.contiguous(total, world), SequenceShards.zigzag(total, world)):
        own = [shards.shard(x, rank, 2) for x in whole]

        def run(q, k, v, shards=shards):
            return ring_attention(q, k, v, group, shards=shards, **given)[0]

        torch._dynamo.reset()
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(*own), run(*own))
        for options in (
            dict(strategy="ring"),
            dict(strategy="ulysses_ring", hierarchy=hierarchies[-1]),
        ):
            found = ring_attention(*own, group, shards=shards, invariant_block=8, **options, **given)[0]  # fmt: skip
            torch.testing.assert_close(found, run(*own))
            parts = [torch.empty_like(found) for _ in range(world)]
            dist.all_gather(parts, found)
            results.append(shards.join(parts, 2))
    assert all(torch.equal(x, results[0]) for x in results)


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        (dict(attention_chunk=-1), ValueError, "attention_chunk must be an int of at least 1, or 0 or None .*, got -1"),
        (dict(attention_chunk=2.5), TypeError, "attention_chunk must be an int of at least 1"),
        (dict(prefix_lens=3), NotImplementedError, "prefix_lens needs causal=True and no window"),
        (dict(prefix_lens=3, causal=True, window=(4, 0)), NotImplementedError, "prefix_lens needs causal=True and no window"),
        (dict(prefix_lens=3, causal=True, attention_chunk=4), NotImplementedError, "prefix_lens goes with no attention_chunk, got 4"),
        (dict(prefix_lens=[3, 2], causal=True), ValueError, "prefix_lens must be one number, or one for each of the 1 documents, got 2"),
        (dict(prefix_lens=[-1], causal=True), ValueError, r"prefix_lens must be from 0 to the \d+ tokens of document 0, got -1"),
        (dict(prefix_lens=999, causal=True), ValueError, r"prefix_lens must be from 0 to the \d+ tokens of document 0, got 999"),
        (dict(prefix_lens=[], causal=True), ValueError, r"prefix_lens must have a number for each document, got \[\]"),
        (dict(prefix_lens="a", causal=True), TypeError, "prefix_lens must be an integer tensor of one dimension"),
        (dict(prefix_lens=torch.ones(1), causal=True), TypeError, "prefix_lens must be an integer tensor"),
    ],
)  # fmt: skip
def test_refusals(group, rank_device, given, kind, text) -> None:
    x = torch.randn(1, 2, 8, 16, device=rank_device)
    with pytest.raises(kind, match=text):
        ring_attention(x, x, x, group, **given)


@pytest.mark.parametrize("name", ["attention_chunk", "prefix_lens"])
def test_ranks_that_disagree_are_named_on_every_rank(group, rank_device, name) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    if world == 1:
        pytest.skip("needs 2 ranks")
    x = torch.randn(1, 2, 8, 16, device=rank_device)
    given = dict(causal=True, scale=0.217)  # of this test
    with pytest.raises(ValueError, match=rf"{name} must be the same on all ranks, got .* on rank 1"):  # fmt: skip
        ring_attention(x, x, x, group, **{name: 3 + rank}, **given)
    with pytest.raises(TypeError, match=rf"{name} must"):
        ring_attention(x, x, x, group, **{name: "a" if rank == 1 else 3}, **given)


def test_prefixes_in_context_parallel(group, rank_device) -> None:
    """A causal model, by either call, is a prefix-LM; what is not causal, or has a window, is refused."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = SequenceShards.zigzag(8 * world, world)
    inputs = [torch.randn(2, 2, 8 * world, 16, device=rank_device) for _ in range(3)]
    mask = mask_of_prefixes([0, 8 * world], [5]).to(rank_device)
    expected = shards.shard(torch_fdattn.attention(*inputs, attn_mask=mask)[0], rank, 2)
    own = [shards.shard(x, rank, 2) for x in inputs]
    with context_parallel(group, shards=shards, prefix_lens=5):
        for found in (
            torch_fdattn.attention(*own, causal=True)[0],
            F.scaled_dot_product_attention(*own, is_causal=True),
        ):
            torch.testing.assert_close(found, expected)
        for wrong in ({}, dict(causal=True, window=(3, 0))):
            with pytest.raises(NotImplementedError, match="prefix_lens needs causal=True and no"):
                torch_fdattn.attention(*own, **wrong)
    with (
        pytest.raises(TypeError, match="prefix_lens must be an integer tensor"),
        context_parallel(group, shards=shards, prefix_lens="a"),
    ):
        pass
