"""Packed documents, padding and explicit masks in `dist.ring_attention` against attention on one process."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

import torch_fdattn
from torch_fdattn.dist import SequenceShards, context_parallel, ring_attention, shard_batch

from .test_ring_attention import STRATEGIES, drawn_shards


def drawn_documents(rng: random.Random, total: int) -> list[int]:
    """Where documents begin, empty ones too, and where the last one ends."""
    return [0, *sorted(rng.randint(0, total) for _ in range(rng.randint(0, 6))), total]


def same_document(documents: list[int]) -> torch.Tensor:
    """(total, total): whether two positions are of one document."""
    ends = torch.tensor(documents[1:])
    document = torch.bucketize(torch.arange(documents[-1]), ends, right=True)
    return document[:, None] == document


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", range(16))
def test_drawn(group, rank_device, seed, strategy) -> None:
    rng = random.Random(f"documents {seed} {strategy}")
    torch.manual_seed(seed)
    world, rank = dist.get_world_size(), dist.get_rank()
    heads, total = 2 * world, rng.choice([7, 24, 61])
    shards, documents = drawn_shards(rng, total, world), drawn_documents(rng, total)
    window = rng.choice([None, None, (min(rng.randint(0, 30), total), 0)])
    options = dict(causal=window is not None or rng.random() < 0.6, window=window)
    slopes = torch.rand(heads) if rng.random() < 0.3 else None
    sinks = torch.randn(heads) if rng.random() < 0.3 else None
    inputs = [torch.randn(2, h, total, 16, device=rank_device) for h in (heads, world, world)]
    douts = torch.randn_like(inputs[0]), torch.randn_like(inputs[0][..., 0])
    lens = [rng.randint(0, total), total] if rng.random() < 0.4 else None
    if lens is not None:
        for x in inputs[1:]:
            x[0, :, lens[0] :] = torch.nan
        lens = torch.tensor(lens, dtype=torch.int32)
    wide = [x.double().cpu().requires_grad_() for x in inputs]
    scores = dict(alibi_slopes=slopes, sinks=sinks)
    mask, explicit = same_document(documents), None
    if rng.random() < 0.4:
        shape = rng.choice([1, 2]), rng.choice([1, heads]), rng.choice([1, total]), total
        explicit = torch.rand(shape) < 0.8
        mask = mask & explicit
        if rng.random() < 0.5:
            explicit = torch.where(explicit, torch.randn(shape), -torch.inf)
            mask = torch.where(mask, explicit.double(), -torch.inf)
    # Queries stand where they are, whatever the length.
    starts = torch.zeros(2, dtype=torch.int32)
    exact = torch_fdattn.attention(*wide, lens, q_start=starts, attn_mask=mask, **options, **scores)
    exact_grads = torch.autograd.grad(exact, wide, [x.double().cpu() for x in douts])

    own = [shards.shard(x, rank, 2).clone().requires_grad_() for x in inputs]
    if strategy == "query_split":
        own[1:] = [x.clone().requires_grad_() for x in inputs[1:]]
    if explicit is not None:
        explicit = explicit if explicit.shape[2] == 1 else shards.shard(explicit, rank, 2)
    scores |= dict(kv_lens=lens, attn_mask=explicit)
    scores = {x: None if y is None else y.to(rank_device) for x, y in scores.items()}
    given = torch.tensor(documents, dtype=torch.int32, device=rank_device) if seed % 2 else documents  # fmt: skip
    found = ring_attention(*own, group, shards=shards, strategy=strategy, cu_seqlens=given, **options, **scores)  # fmt: skip
    grads = torch.autograd.grad(found, own, [shards.shard(x, rank, 2) for x in douts])
    # With query_split the gradients of K and V are whole on every rank.
    sharded = 3 if strategy == "query_split" else 5
    results = zip((*found, *grads), (*exact, *exact_grads), strict=True)
    for i, (value, right) in enumerate(results):
        right = right.detach() if i >= sharded else shards.shard(right.detach(), rank, 2)
        torch.testing.assert_close(value.double().cpu(), right, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_varlen_attention_in_context_parallel(group, rank_device, strategy) -> None:
    """A model of packed documents, unchanged, with gradients; documents over ranks' borders."""
    world, rank = dist.get_world_size(), dist.get_rank()
    total = 20 * world
    shards = SequenceShards.zigzag(total, world)
    begins = torch.tensor([0, 3, 3, total // 2 + 1, total], dtype=torch.int32, device=rank_device)
    inputs = [torch.randn(total, h, 16, device=rank_device) for h in (4, 2, 2)]
    dout = torch.randn_like(inputs[0])
    whole = [x.clone().requires_grad_() for x in inputs]
    out, lse = torch_fdattn.varlen_attention(*whole, begins, causal=True)
    expected = torch.autograd.grad(out, whole, dout)
    own = [x.requires_grad_() for x in shard_batch(group, shards, *inputs, dim=0)]
    with context_parallel(group, shards=shards, strategy=strategy):
        found, found_lse = torch_fdattn.varlen_attention(*own, begins, causal=True)
        grads = torch.autograd.grad(found, own, shards.shard(dout, rank, 0))
    torch.testing.assert_close(found, shards.shard(out, rank, 0))
    torch.testing.assert_close(found_lse, shards.shard(lse, rank, 1))
    for value, right in zip(grads, expected, strict=True):
        torch.testing.assert_close(value, shards.shard(right, rank, 0))


@pytest.mark.parametrize("what", ["mask", "kv_lens", "cu_seqlens", "slopes", "tokens"])
def test_what_one_rank_alone_gets_wrong_is_refused_on_all(group, rank_device, what) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    if world == 1:
        pytest.skip("needs 2 ranks")
    odd = rank == 1
    x = torch.randn(1, 2, 9 if odd and what == "tokens" else 8, 16, device=rank_device)
    options = {
        "mask": dict(attn_mask=torch.ones(7 if odd else 8, 8 * world, device=rank_device).bool()),
        "kv_lens": dict(kv_lens=torch.ones(2 if odd else 1, dtype=torch.int32, device=rank_device)),
        "cu_seqlens": dict(cu_seqlens="x" if odd else [0, 8 * world]),
        "slopes": dict(alibi_slopes=torch.ones(3 if odd else 2, device=rank_device)),
        "tokens": {},
    }[what]
    kind = TypeError if what == "cu_seqlens" else ValueError
    shards = SequenceShards.contiguous(8 * world, world)
    with pytest.raises(kind, match="must" if odd else r"must .* \(on rank 1\)"):
        ring_attention(x, x, x, group, shards=shards, scale=0.223, **options)  # of this test


def test_lengths_that_differ_are_named_on_every_rank(group, rank_device) -> None:
    if dist.get_world_size() == 1 or rank_device.type != "cpu":
        pytest.skip("needs 2 ranks")
    x = torch.randn(1, 2, 8, 16, device=rank_device)
    lens = torch.tensor([3 + dist.get_rank()], dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"kv_lens must be the same on all ranks, got .* on rank 1"
    ):
        ring_attention(x, x, x, group, kv_lens=lens)


def test_documents_that_change_in_place_in_context_parallel(group, rank_device) -> None:
    """Through memory that torch knows nothing of, too; and under inference_mode."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = SequenceShards.contiguous(8 * world, world)
    inputs = [torch.randn(8 * world, 2, 16, device=rank_device) for _ in range(3)]
    own = [shards.shard(x, rank, 0) for x in inputs]
    numbers = np.array([0, 3, 8 * world], dtype=np.int32)
    begins = torch.from_numpy(numbers)
    with torch.inference_mode(), context_parallel(group, shards=shards):
        for cut in (3, 5):
            numbers[1] = cut
            given = begins if rank_device.type == "cpu" else begins.to(rank_device)
            found = torch_fdattn.varlen_attention(*own, given)[0]
            exact = torch_fdattn.dist.ring_attention(
                *(x.transpose(0, 1)[None] for x in own), group, shards=shards, cu_seqlens=[0, cut, 8 * world]
            )[0]  # fmt: skip
            assert torch.equal(found, exact[0].transpose(0, 1))


def test_masks_in_context_parallel(group, rank_device) -> None:
    """Of this rank's rows over all keys; by SDPA and by attention. Those over its own keys are refused."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = SequenceShards.zigzag(8 * world, world)
    inputs = [torch.randn(2, 2, 8 * world, 16, device=rank_device) for _ in range(3)]
    mask = torch.rand(8 * world, 8 * world, device=rank_device) < 0.7
    mask.fill_diagonal_(True)
    expected = shards.shard(torch_fdattn.attention(*inputs, attn_mask=mask)[0], rank, 2)
    own, rows = [shards.shard(x, rank, 2) for x in inputs], shards.shard(mask, rank, 0)
    with context_parallel(group, shards=shards):
        for found in (
            torch_fdattn.attention(*own, attn_mask=rows)[0],
            torch.nn.functional.scaled_dot_product_attention(*own, rows),
        ):
            torch.testing.assert_close(found, expected)
        if world > 1:
            with pytest.raises(NotImplementedError, match="got attn_mask"):
                torch_fdattn.attention(*own, attn_mask=rows[:, :8])
    for strategy in ("star", "ulysses"):
        with pytest.raises(NotImplementedError, match=f"no gradient with strategy='{strategy}'"):
            ring_attention(*own, group, shards=shards, attn_mask=rows.float().requires_grad_(), strategy=strategy)  # fmt: skip
    with pytest.raises(ValueError, match="attn_mask must be broadcastable"):
        ring_attention(*own, group, shards=shards, attn_mask=rows[:, 1:])


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ([0, 5], ValueError, r"cu_seqlens must begin with 0, end with the \d+ tokens of all ranks"),
        ([], ValueError, r"cu_seqlens must begin with 0 and end with the tokens of all ranks, got \[\]"),
        ("short", TypeError, "cu_seqlens must be an integer tensor of one dimension, a list of ints or None"),
        ([0, 1.5], TypeError, "cu_seqlens must be an integer tensor"),
        (torch.zeros(2, 2), TypeError, "cu_seqlens must be an integer tensor"),
    ],
)  # fmt: skip
def test_wrong_documents(group, rank_device, given, kind, text) -> None:
    x = torch.randn(1, 2, 8, 16, device=rank_device)
    with pytest.raises(kind, match=text):
        ring_attention(x, x, x, group, cu_seqlens=given)
    falling = [0, 7, 3, 8 * dist.get_world_size()]
    with pytest.raises(ValueError, match="not fall between"):
        ring_attention(x, x, x, group, cu_seqlens=falling)


def test_ranks_that_disagree_are_named_on_every_rank(group, rank_device) -> None:
    if dist.get_world_size() == 1:
        pytest.skip("needs 2 ranks")
    x = torch.randn(1, 2, 8, 16, device=rank_device)
    documents = [0, 3 + dist.get_rank(), 8 * dist.get_world_size()]
    with pytest.raises(
        ValueError, match=r"cu_seqlens must be the same on all ranks, got .* on rank 1"
    ):
        ring_attention(x, x, x, group, cu_seqlens=documents, scale=0.219)  # of this test
