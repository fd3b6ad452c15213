"""`invariant_block`: decode and ring attention over all ranks have the same bits as over one."""

from __future__ import annotations

import os
import random
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_fdattn
from torch_fdattn.dist import SequenceShards, context_parallel, decode, ring_attention
from torch_fdattn.dist.consensus import assume_equal_on_all_ranks
from torch_fdattn.dist.state_tree import StateTree
from torch_fdattn.ops.library import INTERPRET

from .drawn_rings import group_of
from .test_decode import rank_map, sharded
from .test_decode_strategies import paged, quantised
from .test_ring_attention import STRATEGIES

#: The interpreter has no bfloat16.
HALF = torch.float16 if INTERPRET else torch.bfloat16
RUNS_KERNELS = INTERPRET or torch.cuda.is_available()
INVARIANT = [x for x in STRATEGIES if x != "star"] + ["ulysses_ring"]
#: Draws of each test, those of `make test` first; `make drawn-same-bits` takes more.
DRAWN = int(os.environ.get("DRAWN", "25"))
SEEDS = [pytest.param(x, marks=() if x < 3 else pytest.mark.slow) for x in range(DRAWN)]


@pytest.fixture(scope="module")
def alone(group) -> str:
    """The name of the group of this rank alone."""
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    return groups[dist.get_rank()].group_name


def expect_same_bits(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for ours, right in zip(found, expected, strict=True):
        assert ours.dtype == right.dtype
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[right.dtype.itemsize]
        assert torch.equal(ours.contiguous().view(integers), right.contiguous().view(integers))


@pytest.mark.parametrize("seed", SEEDS)
def test_decode(group, alone, rank_device, seed) -> None:
    check_decode(group, alone, rank_device, seed)


def check_decode(group: str, alone: str, rank_device: torch.device, seed: int) -> None:
    """A drawn case with any cut over the ranks, and the values of plain decode."""
    rng = random.Random(f"decode {seed}")
    torch.manual_seed(seed)
    world, rank = dist.get_world_size(), dist.get_rank()
    block, kv_heads, batch = rng.choice([4, 16]), rng.choice([1, 2]), 3
    heads, prompt = kv_heads * rng.choice([1, 3]), rng.random() < 0.2
    # Rounds of kv_block over all ranks, and blocks enough for some levels.
    kv_block = block * rng.choice([1, 2, 3])
    length = kv_block * world * rng.randint(1, 4)
    tokens = rng.randint(17, 24) if prompt else rng.choice([1, 1, 5])
    shape = dict(device=rank_device, dtype=rng.choice([torch.float32, torch.float32, HALF]))  # fmt: skip
    q = torch.randn(batch, heads, tokens, 32, **shape)
    k, v = torch.randn(2, batch, kv_heads, length, 32, **shape)
    lens = torch.tensor([length, rng.randint(0, length), rng.randint(0, 3)], dtype=torch.int32, device=rank_device)  # fmt: skip
    both = dict(window=rng.choice([None, (rng.randint(0, 30), 0)]), scale=rng.choice([None, 0.3]))
    if not prompt:
        both["softcap"] = rng.choice([0.0, 5.0])
        if rng.random() < 0.4:
            both["alibi_slopes"] = torch.rand(heads, device=rank_device)
        if rng.random() < 0.4:
            both["sinks"] = torch.randn(heads, device=rank_device)
        if rng.random() < 0.3:
            k, v = quantised(k, torch.int8), quantised(v, torch.int8)
            both["k_scale"], both["v_scale"] = torch.rand(2, 1, kv_heads, 1, device=rank_device) / 10  # fmt: skip
    exact = decode(q, k, v, lens, alone, kv_block=length, **both)
    given = dict(both, invariant_block=block)
    expected = decode(q, k, v, lens, alone, kv_block=length, **given)
    torch.testing.assert_close(expected, exact, **({} if q.dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)))  # fmt: skip

    round_robin = [sharded(x, rank_map(kv_block)) for x in (k, v)]
    for strategy in ("auto", "all_gather", "symm_all_gather") if RUNS_KERNELS else ("auto",):
        found = decode(q, *round_robin, lens, group, kv_block=kv_block, strategy=strategy, **given)
        expect_same_bits(found, expected)
    own = slice(rank * length // world, (rank + 1) * length // world)
    if length // world % block == 0:
        contiguous = [x[:, :, own] for x in (k, v)]
        expect_same_bits(decode(q, *contiguous, lens, group, **given), expected)
    if not prompt and k.dtype != torch.int8:
        pages = round_robin[0].shape[2] // 4
        table = torch.randperm(batch * pages, device=rank_device).view(batch, pages).int()
        on_pages = [paged(x.float(), 4, table).to(x.dtype) for x in round_robin]
        expect_same_bits(
            decode(q, *on_pages, lens, group, page_table=table, kv_block=kv_block, **given),
            expected,
        )
    # One sequence alone, and a cache of twice the capacity.
    first = {n: x[:1] if n == "q" else x for n, x in given.items()}
    longer = [torch.cat([x[:1], x[:1]], 2) for x in (k, v)]
    found = decode(q[:1], *longer, lens[:1], alone, kv_block=2 * length, **first)
    expect_same_bits(found, tuple(x[:1] for x in expected))
    if heads % world == 0:
        found = decode(q, *round_robin, lens, group, kv_block=kv_block, head_sharded=True, **given)
        expect_same_bits(found, tuple(x.chunk(world, 1)[rank] for x in expected))


def drawn_shards(rng: random.Random, blocks: int, block: int, total: int, world: int):
    """Blocks dealt out at random: ranks may have none, and any order."""
    of_ranks: list[list[int]] = [[] for _ in range(world)]
    for index in rng.sample(range(blocks), blocks):
        own = range(index * block, min((index + 1) * block, total))
        of_ranks[rng.randrange(world)] += own
    return SequenceShards.from_positions(of_ranks)


@pytest.mark.parametrize("strategy", INVARIANT)
@pytest.mark.parametrize("seed", SEEDS)
def test_ring_attention(group, alone, rank_device, hierarchies, seed, strategy) -> None:
    check_ring(group, alone, rank_device, hierarchies, seed, strategy)


def check_ring(
    group: str, alone: str, rank_device: torch.device, hierarchies, seed: int, strategy: str
) -> None:
    """A drawn case has the same bits on all ranks as on one."""
    rng = random.Random(f"ring {seed} {strategy}")
    torch.manual_seed(seed)
    world, rank = dist.get_world_size(), dist.get_rank()
    block, total = rng.choice([8, 16]), rng.choice([16, 61, 96])
    kv_heads = rng.choice([1, 2])
    heads = kv_heads * rng.choice([1, 2])
    hierarchy = rng.choice(hierarchies) if strategy == "ulysses_ring" else None
    if (
        hierarchy is not None or strategy == "ulysses"
    ):  # one KV head for all ranks, or some for each
        share = world if hierarchy is None else dist.get_world_size(group_of(hierarchy[0]))  # fmt: skip
        kv_heads = rng.choice([1, share, 2 * share])
        heads = max(share, kv_heads) * rng.choice([1, 2])
    dtype = rng.choice([torch.float32, torch.float32, HALF])
    q = torch.randn(2, heads, total, 32, device=rank_device, dtype=dtype)
    k, v = torch.randn(2, 2, kv_heads, total, 32, device=rank_device, dtype=dtype)
    causal = rng.random() < 0.7
    given = dict(causal=causal, invariant_block=block, softcap=rng.choice([0.0, 4.0]))
    if causal and rng.random() < 0.4:
        given["window"] = min(rng.randint(0, 40), total), 0
    if rng.random() < 0.4:
        given["alibi_slopes"] = torch.rand(heads, device=rank_device)
    if rng.random() < 0.4:
        given["sinks"] = torch.randn(heads, device=rank_device)
    if rng.random() < 0.3:
        given["cu_seqlens"] = [0, *sorted(rng.sample(range(1, total), 3)), total]
    elif rng.random() < 0.4:
        lens = [rng.randint(0, total) for _ in range(2)]
        given["kv_lens"] = torch.tensor(lens, dtype=torch.int32, device=rank_device)
    if rng.random() < 0.3:
        given |= dict(dropout_p=0.4, dropout_seed=torch.tensor([seed, 0], device=rank_device))
    mask = None
    if rng.random() < 0.3:
        mask = torch.rand(1, rng.choice([1, heads]), total, total, device=rank_device) < 0.7
    whole = SequenceShards.contiguous(total, 1)
    expected = ring_attention(q, k, v, alone, shards=whole, attn_mask=mask, **given)
    plain = dict(given, invariant_block=None)
    exact = ring_attention(q, k, v, alone, shards=whole, attn_mask=mask, **plain)
    torch.testing.assert_close(expected, exact, **({} if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)))  # fmt: skip

    shards = drawn_shards(rng, -(-total // block), block, total, world)
    own = [shards.shard(x, rank, 2) for x in (q, k, v)]
    if strategy == "query_split":
        own[1:] = k, v
    rows = None if mask is None else shards.shard(mask, rank, 2)
    found = ring_attention(*own, group, shards=shards, strategy=strategy, hierarchy=hierarchy, attn_mask=rows, **given)  # fmt: skip
    expect_same_bits(found, tuple(shards.shard(x, rank, 2) for x in expected))


def test_context_parallel(group, rank_device) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = SequenceShards.zigzag(16 * world, world)
    whole = [torch.randn(1, 2, 16 * world, 32, device=rank_device) for _ in range(3)]
    own = [shards.shard(x, rank, 2) for x in whole]
    expected = ring_attention(*own, group, shards=shards, causal=True, invariant_block=8)
    with context_parallel(group, shards=shards, invariant_block=8):
        found = torch_fdattn.attention(*own, causal=True)
    expect_same_bits(found, expected)


def test_gradients_are_those_of_the_strategy(group, rank_device) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = SequenceShards.zigzag(16 * world, world)
    inputs = [torch.randn(1, 2, 16 * world, 32, device=rank_device) for _ in range(3)]
    grads = []
    for block in (None, 8):
        own = [shards.shard(x, rank, 2).clone().requires_grad_() for x in inputs]
        out, lse = ring_attention(*own, group, shards=shards, causal=True, invariant_block=block)
        grads.append(torch.autograd.grad(out.square().sum() + lse.sum(), own))
    torch.testing.assert_close(*grads)


def test_compiles(group, rank_device) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = SequenceShards.zigzag(16 * world, world)
    q, k, v = (shards.shard(torch.randn(1, 2, 16 * world, 32, device=rank_device), rank, 2) for _ in range(3))  # fmt: skip
    lens = torch.tensor([9 * world], dtype=torch.int32, device=rank_device)

    def run(q, k, v, lens):
        out, _ = ring_attention(q, k, v, group, shards=shards, causal=True, invariant_block=8)
        return out, decode(q[:, :, :1], k, v, lens, group, kv_block=8, invariant_block=8)[0]

    with torch.no_grad():
        torch._dynamo.reset()
        found = torch.compile(run, backend="aot_eager", fullgraph=True)(q, k, v, lens)
        expect_same_bits(found, run(q, k, v, lens))


def test_long_queries_of_many_sequences(group, alone, rank_device) -> None:
    """Which CPUs compute together, in plain calls; and scales of no dims."""
    world, rank = dist.get_world_size(), dist.get_rank()
    q = torch.randn(9, 2, 20, 32, device=rank_device)
    k, v = torch.randn(2, 9, 2, 16 * world, 32, device=rank_device)
    lens = torch.full((9,), 16 * world, dtype=torch.int32, device=rank_device)
    own = [x[:, :, 16 * rank : 16 * (rank + 1)] for x in (k, v)]
    found = decode(q, *own, lens, group, invariant_block=8)
    one = decode(q[:1], k[:1], v[:1], lens[:1], alone, invariant_block=8)
    expect_same_bits(tuple(x[:1] for x in found), one)
    scale = torch.tensor(0.1, device=rank_device)
    given = dict(k_scale=scale, v_scale=scale, invariant_block=8)
    k, v = quantised(k, torch.int8), quantised(v, torch.int8)
    own = [x[:, :, 16 * rank : 16 * (rank + 1)] for x in (k, v)]
    found = decode(q[:, :, :1], *own, lens, group, **given)
    expect_same_bits(found, decode(q[:, :, :1], k, v, lens, alone, **given))


def test_empty_batches_and_expanded_tokens(group, alone, rank_device) -> None:
    """No sequences; K or V whose tokens are one in memory."""
    world, rank = dist.get_world_size(), dist.get_rank()
    q = torch.randn(2, 2, 1, 32, device=rank_device)
    k, v = torch.randn(2, 2, 2, 16 * world, 32, device=rank_device)
    lens = torch.tensor([16 * world, 11], dtype=torch.int32, device=rank_device)
    own, given = slice(16 * rank, 16 * (rank + 1)), dict(invariant_block=4)
    out, lse = decode(q[:0], k[:0, :, own], v[:0, :, own], lens[:0], group, **given)
    assert out.shape == (0, 2, 1, 32)
    assert lse.shape == (0, 2, 1)
    pages, table = k[:, :, :4].contiguous(), lens.new_zeros(0, 4)
    out, _ = decode(q[:0], pages, pages, lens[:0], group, page_table=table, **given)
    assert out.shape == (0, 2, 1, 32)
    for cache in ((k[:, :, :1].expand_as(k), v), (k, v[:, :, :1].expand_as(v))):
        found = decode(q, *(x[:, :, own] for x in cache), lens, group, **given)
        expect_same_bits(found, decode(q, *cache, lens, alone, **given))
        torch.testing.assert_close(found, decode(q, *cache, lens, alone))


def test_rounds_longer_than_the_capacity(group, alone, rank_device) -> None:
    """A rank sends the node of its blocks, not an empty state for each block that it might hold."""
    rank = dist.get_rank()
    q = torch.randn(2, 2, 1, 32, device=rank_device)
    k, v = torch.randn(2, 2, 2, 12, 32, device=rank_device)
    lens = torch.tensor([12, 7], dtype=torch.int32, device=rank_device)
    expected = decode(q, k, v, lens, alone, invariant_block=4)
    if rank:  # rank 0 holds all that is filled
        k, v = k.new_full(k.shape, float("nan")), v.new_full(v.shape, float("nan"))
    for rounds in (12, 16, 20, 4 * 2**22, 4 * 3 * 2**20):
        found = decode(q, k, v, lens, group, kv_block=rounds, invariant_block=4)
        expect_same_bits(found, expected)


def test_a_tree_asks_for_no_order() -> None:
    torch.manual_seed(0)
    leaves = [(torch.randn(3, 16), torch.randn(3)) for _ in range(11)]
    leaves[4] = torch.full((3, 16), torch.nan), torch.full((3,), -torch.inf)  # whatever is there
    for index, nothing in ((0, -0.0), (1, 0.0), (6, torch.nan)):  # a row that sees no key anywhere
        leaves[index][0][2] = nothing
    for index in range(11):
        leaves[index][1][2] = -torch.inf
    results = []
    for seed in range(20):
        tree, order = StateTree(), random.Random(seed).sample(range(11), 11)
        for index in order:
            # What is empty may as well be absent.
            if index != 4 or seed % 2:
                tree.add((0, index), *leaves[index])
        if seed % 2:
            assert set(tree.nodes) == {(3, 0), (1, 4), (0, 10)}
        results.append(tree.root())
    for result in results:
        expect_same_bits(result, results[0])
    assert not results[0][0][2].any()
    assert not torch.signbit(results[0][0][2]).any()
    stacked = [torch.stack(x)[:, None, None] for x in zip(*leaves, strict=True)]
    for together in (1, 2, 8, 64):  # the op's, in one pass or two
        nodes = torch.ops.fdattn.merge_tree(*stacked, together)
        root = torch.ops.fdattn.merge_tree(*nodes, 64)
        if not INTERPRET:
            expect_same_bits([x[0, 0, 0] for x in root], results[0])
        torch.testing.assert_close([x[0, 0, 0] for x in root], list(results[0]))
    outs, lses = (torch.stack([y[:2] for y in x]) for x in zip(*(x for i, x in enumerate(leaves) if i != 4), strict=True))  # fmt: skip
    torch.testing.assert_close(results[0][1][:2], lses.logsumexp(0))
    torch.testing.assert_close(results[0][0][:2], (lses.softmax(0)[..., None] * outs).sum(0))


@pytest.mark.parametrize("equal", [nullcontext, assume_equal_on_all_ranks])
def test_refusals(group, rank_device, equal) -> None:
    """On every rank, before data moves; where calls that were compared are compared no more, too, and this is not the first."""
    with equal():
        check_refusals(group, rank_device)


def check_refusals(group: str, rank_device: torch.device) -> None:
    world = dist.get_world_size()
    q, k = torch.randn(1, 2, 1, 32, device=rank_device), torch.randn(1, 2, 24, 32, device=rank_device)  # fmt: skip
    lens = torch.tensor([9], dtype=torch.int32, device=rank_device)
    decode(q, k, k, lens, group)
    for wrong, kind, match in (
        (dict(invariant_block=0), ValueError, "invariant_block must be at least 1, got 0"),
        (dict(invariant_block=16), ValueError, "k_shard's capacity must be a multiple of invariant_block=16, got 24"),
        (dict(invariant_block=16, kv_block=8), ValueError, "kv_block must be a multiple of invariant_block=16, got 8"),
        (dict(invariant_block=16, kv_block=16), ValueError, "k_shard's capacity must be a multiple of invariant_block=16"),
        (dict(invariant_block=8, kv_start=lens), NotImplementedError, "kv_start must be None with invariant_block"),
        (dict(invariant_block=8, strategy="star"), NotImplementedError, "strategy must be one of .* others merge by ranks, got 'star'"),
        (dict(invariant_block=8.0), TypeError, "invariant_block must be an int or None, got float"),
        (dict(invariant_block=8, strategy="fused"), NotImplementedError, "strategy must not be 'fused' where a rank's blocks are several"),
        (dict(invariant_block=8, kv_block=8, strategy="fused"), NotImplementedError, "got 24 keys in blocks of 8, kv_block=8"),
    ):  # fmt: skip
        with pytest.raises(kind, match=match):
            decode(q, k, k, lens, group, **wrong)
    with pytest.raises(NotImplementedError, match="no gradient with invariant_block"):
        decode(q.clone().requires_grad_(), k, k, lens, group, invariant_block=8)
    table = torch.arange(2, device=rank_device).view(1, 2).int()
    pages = torch.randn(2, 2, 16, 32, device=rank_device)
    with pytest.raises(ValueError, match="must be whole pages of 16 tokens, got 8"):
        decode(q, pages, pages, lens, group, page_table=table, invariant_block=8)

    x = torch.randn(1, 2, 12, 32, device=rank_device)
    for wrong, kind, match in (
        (dict(invariant_block=True), TypeError, "invariant_block must be an int or None, got bool"),
        (dict(invariant_block=-1), ValueError, "invariant_block must be at least 1, got -1"),
        (dict(invariant_block=4, strategy="star"), NotImplementedError, "must not be 'star' with invariant_block"),
    ):  # fmt: skip
        with pytest.raises(kind, match=match):
            ring_attention(x, x, x, group, **wrong)
    if world > 1:
        with pytest.raises(ValueError, match="shards must begin and end at multiples of invariant_block=8, got positions"):  # fmt: skip
            ring_attention(x, x, x, group, invariant_block=8)
        block = 4 if dist.get_rank() else 12
        with pytest.raises(ValueError, match="invariant_block"):
            ring_attention(x, x, x, group, invariant_block=block)
        with pytest.raises(ValueError, match="invariant_block"):
            decode(q, k, k, lens, group, invariant_block=2 * block)
        # What one rank alone gets wrong, the others hear of.
        first = dist.get_rank() == 0
        for wrong in (
            dict(invariant_block=16 if first else 8),
            dict(invariant_block=8.0 if first else 8),
            dict(invariant_block=8, strategy="star" if first else "auto"),
        ):
            with pytest.raises(
                (ValueError, TypeError, NotImplementedError), match="invariant_block"
            ):
                decode(q, k, k, lens, group, **wrong)
    shards = SequenceShards.contiguous(12 * world, world)
    with pytest.raises(TypeError, match="invariant_block must be an int or None, got str"):
        context_parallel(group, shards=shards, invariant_block="8").__enter__()
    with pytest.raises(ValueError, match="hierarchy must be a pair of groups"):
        context_parallel(group, shards=shards, strategy="ulysses_ring").__enter__()
