"""Strategy "ulysses_ring", heads shared inside nodes and a ring over the nodes; KV heads fewer than the ranks that share them."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import torch_fdattn
from torch_fdattn.compile_backend.options import split
from torch_fdattn.dist import SequenceShards, context_parallel, ring_attention, shard_batch

from .test_rank_invariant import drawn_shards as drawn_blocks
from .test_rank_invariant import expect_same_bits
from .test_ring_attention import drawn_shards

SEEDS = [pytest.param(x, marks=() if x < 6 else pytest.mark.slow) for x in range(40)]


def options_of(rng: random.Random, heads: int, total: int, device: torch.device) -> dict:
    causal = rng.random() < 0.6
    given = dict(causal=causal, softcap=rng.choice([0.0, 4.0]))
    if causal and rng.random() < 0.4:
        given["window"] = min(rng.randint(0, 40), total), 0
    if rng.random() < 0.4:
        given["alibi_slopes"] = torch.rand(heads, dtype=torch.float64, device=device)
    if rng.random() < 0.4:
        given["sinks"] = torch.randn(heads, dtype=torch.float64, device=device)
    if rng.random() < 0.4:
        lens = [rng.randint(1, total) for _ in range(2)]
        given["kv_lens"] = torch.tensor(lens, dtype=torch.int32, device=device)
    if rng.random() < 0.4:
        given |= dict(
            dropout_p=0.3, dropout_seed=torch.tensor([rng.randint(0, 99), 1], device=device)
        )
    return given


def mask_of_documents(begins: list[int], total: int) -> Tensor:
    document = torch.bucketize(torch.arange(total), torch.tensor(begins[1:]), right=True)
    return document[:, None] == document


@pytest.mark.parametrize("seed", SEEDS)
def test_drawn(group, rank_device, hierarchies, seed) -> None:
    """In float64 on the CPU's ranks, else in float32: values and all gradients."""
    rng = random.Random(f"ulysses ring {seed}")
    torch.manual_seed(seed)
    world, rank = dist.get_world_size(), dist.get_rank()
    on_gpu = rank_device.type == "cuda"
    hierarchy = rng.choice(hierarchies)
    place = len(dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(hierarchy[0])))  # fmt: skip
    strategy = rng.choice(["ulysses_ring", "ulysses_ring", "ulysses"])
    ranks = place if strategy == "ulysses_ring" else world
    # Fewer KV heads than ranks that share them, as many, and more.
    kv_heads = rng.choice([x for x in range(1, ranks + 1) if ranks % x == 0] + [2 * ranks])
    heads = max(kv_heads, ranks) * rng.choice([1, 2])
    total = rng.choice([7, 40, 83])
    shards = drawn_shards(rng, total, world)
    inputs = [torch.randn(2, h, total, 16, dtype=torch.float64) for h in (heads, kv_heads, kv_heads)]  # fmt: skip
    given = options_of(rng, heads, total, torch.device("cpu"))
    trained = [given[x] for x in ("alibi_slopes", "sinks") if x in given]
    mask = None
    if rng.random() < 0.3 and "kv_lens" not in given:
        given["cu_seqlens"] = [0, *sorted(rng.sample(range(1, total), 2)), total]
        mask = mask_of_documents(given["cu_seqlens"], total)
    elif rng.random() < 0.3:
        mask = torch.rand(1, rng.choice([1, heads]), total, total) < 0.8
    wide = [x.clone().requires_grad_() for x in (*inputs, *trained)]
    exact_given = {n: x for n, x in given.items() if n != "cu_seqlens"}
    exact_given |= dict(zip([x for x in ("alibi_slopes", "sinks") if x in given], wide[3:], strict=True))  # fmt: skip
    if "kv_lens" in given:
        exact_given["q_start"] = torch.zeros(2, dtype=torch.int32)
    exact = torch_fdattn.attention(*wide[:3], attn_mask=mask, **exact_given)
    dout, dlse = torch.randn_like(exact[0]), torch.randn_like(exact[1])
    # A row without keys has no lse to have a gradient of.
    dlse = dlse.masked_fill(exact[1].isinf(), 0.0)
    exact_grads = torch.autograd.grad(exact, wide, [dout, dlse])

    dtype = torch.float32 if on_gpu else torch.float64
    own = [shards.shard(x, rank, 2).to(rank_device, dtype).requires_grad_() for x in inputs]
    leaves = own + [x.to(rank_device, dtype).requires_grad_() for x in trained]
    given = {n: x.to(rank_device) if isinstance(x, Tensor) else x for n, x in given.items()}
    given |= dict(zip([x for x in ("alibi_slopes", "sinks") if x in given], leaves[3:], strict=True))  # fmt: skip
    if strategy == "ulysses_ring":
        given["hierarchy"] = hierarchy
    if mask is not None and "cu_seqlens" not in given:
        given["attn_mask"] = shards.shard(mask, rank, 2).to(rank_device)
    found = ring_attention(*own, group, shards=shards, strategy=strategy, **given)
    parts = [shards.shard(x, rank, 2).to(rank_device, dtype) for x in (dout, dlse)]
    grads = torch.autograd.grad(found, leaves, parts)
    tolerance = dict(rtol=1e-5, atol=2e-5) if on_gpu else dict(rtol=1e-8, atol=1e-9)
    for value, right in zip((*found, *grads[:3]), (*exact, *exact_grads[:3]), strict=True):
        right = shards.shard(right.detach(), rank, 2)
        torch.testing.assert_close(value.double().cpu(), right, **tolerance)
    for value, right in zip(grads[3:], exact_grads[3:], strict=True):
        dist.all_reduce(value)
        torch.testing.assert_close(value.double().cpu(), right, **tolerance)


def test_same_bits_with_every_mesh(group, hierarchies, rank_device) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    whole = [torch.randn(1, world, 90, 32, device=rank_device) for _ in range(3)]
    seed = torch.tensor([3, 4], device=rank_device)
    given = dict(causal=True, invariant_block=8, dropout_p=0.3, dropout_seed=seed)
    shards = drawn_blocks(random.Random(0), 12, 8, 90, world)
    own = [shards.shard(x, rank, 2) for x in whole]
    expected = ring_attention(*own, group, shards=shards, **given)
    for hierarchy in hierarchies:
        found = ring_attention(*own, group, shards=shards, strategy="ulysses_ring", hierarchy=hierarchy, **given)  # fmt: skip
        expect_same_bits(found, expected)


def test_context_parallel_and_compiled(group, hierarchies, rank_device) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = SequenceShards.zigzag(8 * world, world)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 8 * world, 16, device=rank_device) for h in (2 * world, 1, 1))
    own = shard_batch(group, shards, q, k, v, dim=2)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    for hierarchy in hierarchies:
        options = dict(shards=shards, strategy="ulysses_ring", hierarchy=hierarchy)
        with context_parallel(group, **options):
            found = F.scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(found, shards.shard(expected, rank, 2), rtol=1e-4, atol=1e-5)
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda *x, options=options: ring_attention(*x, group, causal=True, **options)[0],
            backend="aot_eager", fullgraph=True,
        )  # fmt: skip
        assert torch.equal(compiled(*own), found)


def test_refusals(group, hierarchies, rank_device) -> None:
    """On every rank."""
    world = dist.get_world_size()
    x = torch.randn(1, 2 * world, 4, 16, device=rank_device)
    hierarchy = hierarchies[0]  # all ranks in one node
    for wrong, kind, match in (
        (dict(strategy="ulysses_ring"), ValueError, r"hierarchy must be a pair of groups \(inner, outer\) with"),
        (dict(hierarchy=hierarchy), ValueError, "hierarchy must be None with strategy='ring'"),
        (dict(strategy="ulysses_ring", hierarchy=hierarchy[0]), TypeError, "hierarchy must be a pair of groups"),
        (dict(strategy="ulysses_ring", hierarchy=hierarchies[0], attn_mask=torch.zeros(4, 4 * world, device=rank_device).requires_grad_()),
         NotImplementedError, "attn_mask of ring_attention has no gradient with strategy='ulysses_ring'"),
    ):  # fmt: skip
        with pytest.raises(kind, match=match):
            ring_attention(x, x, x, group, **wrong)
    if world == 1:
        return
    given = dict(strategy="ulysses_ring", hierarchy=hierarchy)
    with pytest.raises(ValueError, match=r"q's head count must be divisible by the .* ranks that share heads"):  # fmt: skip
        ring_attention(*(x[:, : world + 1],) * 3, group, **given)
    if world > 2:
        k = x[:, : world - 1]
        q = torch.randn(1, world * (world - 1), 4, 16, device=rank_device)
        with pytest.raises(ValueError, match=r"k's head count must be divisible by the .* or divide them"):  # fmt: skip
            ring_attention(q, k, k, group, **given)
    with pytest.raises(ValueError, match="hierarchy must name groups of this rank's row and column"):  # fmt: skip
        ring_attention(x, x, x, group, strategy="ulysses_ring", hierarchy=hierarchy[:1] * 2)


def test_option_of_the_compile_backend(group, hierarchies, rank_device) -> None:
    """SDPA of one rank's tokens, of every mesh; gradients too."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = SequenceShards.zigzag(8 * world + 3, world)
    heads = 2 * world, world, world
    whole = [torch.randn(2, h, shards.total, 16, device=rank_device).requires_grad_() for h in heads]  # fmt: skip
    own = [shards.shard(x.detach(), rank, 2).requires_grad_() for x in whole]

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    expected = attend(*whole)
    weights = torch.randn_like(expected)
    expected_grads = torch.autograd.grad((expected * weights).sum(), whole)
    for hierarchy in hierarchies:
        option = dict(group=group, shards=shards, strategy="ulysses_ring", hierarchy=hierarchy)
        torch._dynamo.reset()
        compiled = torch.compile(
            attend, backend="fdattn", fullgraph=True,
            options={"context_parallel": option, "lower": "aot_eager"},
        )  # fmt: skip
        found = compiled(*own)
        grads = torch.autograd.grad((found * shards.shard(weights, rank, 2)).sum(), own)
        for value, right in zip((found, *grads), (expected, *expected_grads), strict=True):
            torch.testing.assert_close(value, shards.shard(right, rank, 2))


def test_a_hierarchy_that_is_no_mesh_of_the_ranks_is_named(group, hierarchies) -> None:
    if dist.get_world_size() < 2:
        pytest.skip("needs 2 ranks")
    option = dict(group=group, strategy="ulysses_ring", hierarchy=hierarchies[0][:1] * 2)
    with pytest.raises(ValueError, match="hierarchy must name groups of this rank's row") as raised:
        split({"context_parallel": option}, None)
    assert 'options["context_parallel"]' in str(raised.value)
