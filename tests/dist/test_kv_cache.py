"""ShardedKVCache against a cache on one process: who stores what, chunks across borders, storage bytes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.dist.test_decode_strategies import PORTABLE, by
from torch_fdattn import attention
from torch_fdattn.dist import DistributedDecodeAttention, ShardedKVCache
from torch_fdattn.dist.kv_cache.scales import KV_FORMATS
from torch_fdattn.engine import PagedKVCache

SHAPE = dict(num_layers=2, batch=2, kv_heads=2, head_dim=16)


def make(device, capacity: int = 40, dtype=torch.float32, **options) -> ShardedKVCache:
    options = SHAPE | options
    return ShardedKVCache(capacity=capacity, dtype=dtype, device=device, **options)


def step(cache: ShardedKVCache, tokens: int, seed: int) -> list[torch.Tensor]:
    """One step with its own random q, k, v; each layer's output."""
    generator = torch.Generator().manual_seed(seed)
    device, outputs = cache.lengths.device, []
    for layer in range(SHAPE["num_layers"]):
        k, v = (torch.randn(2, 2, tokens, 16, generator=generator).to(device) for _ in range(2))
        q = torch.randn(2, 6, tokens, 16, generator=generator).to(device)
        cache.append(layer, k, v)
        outputs.append(cache.attend(layer, q))
    cache.advance(tokens)
    return outputs


@pytest.mark.parametrize("kv_block", [None, 1, 4, 7])
@pytest.mark.parametrize("steps", [[1] * 5, [18, 1, 3, 17, 1], [40], [9, 9, 9], [3, 16, 2]])
def test_equals_one_process(group: str, rank_device, kv_block, steps: list[int]) -> None:
    """Prompts, single tokens, several tokens over a border, and a second prompt over a sharded cache."""
    cache = make(rank_device, group=group, kv_block=kv_block)
    whole = make(rank_device)
    for seed, tokens in enumerate(steps):
        for ours, expected in zip(
            step(cache, tokens, seed), step(whole, tokens, seed), strict=True
        ):
            torch.testing.assert_close(ours, expected, atol=3e-6, rtol=1e-5)
    assert cache.lengths.tolist() == [sum(steps)] * 2


@pytest.mark.parametrize("kv_block", [None, 1, 4])
def test_each_rank_keeps_its_own_tokens(group: str, rank_device, kv_block) -> None:
    cache = make(rank_device, capacity=24, group=group, kv_block=kv_block)
    values = torch.arange(24.0, device=rank_device)[None, None, :, None].expand(2, 2, 24, 16)
    cache.append(0, values, -values)
    cache.append(1, values, -values)
    cache.advance(24)
    k, v = cache.layer(0)
    block = kv_block or -(-24 // dist.get_world_size())
    mine = [p for p in range(24) if p // block % dist.get_world_size() == dist.get_rank()]
    assert k[1, 1, : len(mine), 3].tolist() == mine
    assert v[0, 0, : len(mine), 0].tolist() == [-p for p in mine]


@pytest.mark.parametrize("kv_block", [None, 1, 4])
def test_storage_is_a_share_plus_at_most_one_block(group: str, rank_device, kv_block) -> None:
    cache, whole = make(rank_device, group=group, kv_block=kv_block), make(rank_device)
    per_token = 2 * 2 * 2 * 2 * 16 * 4  # k and v, layers, batch, heads, dim, bytes
    total = 40 * per_token
    block = cache.shards.kv_block
    share = -(-40 // dist.get_world_size()) * per_token
    assert cache.nbytes <= share + min(block, 4) * per_token
    step(cache, 40, 0)
    used = torch.tensor([cache.bytes_used()], device=rank_device)
    assert used.item() <= total / dist.get_world_size() + block * per_token
    dist.all_reduce(used)
    assert used.item() == total
    assert whole.nbytes == total


@pytest.mark.parametrize("kv_block", [None, 4])
@pytest.mark.parametrize("kv_dtype", KV_FORMATS)
def test_quantised_shards_hold_what_one_process_holds(group, rank_device, kv_block, kv_dtype):
    """Scales follow from all new tokens, which every rank sees; long prompts attend over a shard read back."""
    cache = make(rank_device, group=group, kv_block=kv_block, kv_dtype=kv_dtype)
    whole = make(rank_device, kv_dtype=kv_dtype)
    for seed, tokens in enumerate([3, 18, 1, 16]):
        found, expected = (step(each, tokens, seed) for each in (cache, whole))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(cache.layer(1), whole.layer(1), strict=True):
        mine, places = cache.shards.locate(torch.arange(38, device=rank_device))
        kept = ours.view(torch.uint8)[:, :, places[mine]]
        assert torch.equal(kept, theirs.view(torch.uint8)[:, :, :38][:, :, mine])
    assert torch.equal(cache.scales.k, whole.scales.k)


@pytest.mark.parametrize("kv_block", [None, 3])
@pytest.mark.parametrize("kv_dtype", [None, "fp8_e4m3"])
def test_pages_of_each_rank(group, rank_device, kv_block, kv_dtype) -> None:
    """A table of its own on every rank; pages run out on all of them at the same step, though some have enough."""
    sizes = dict(
        **SHAPE,
        capacity=40,
        dtype=torch.float32,
        device=rank_device,
        page_size=5,
        kv_dtype=kv_dtype,
    )
    cache, whole = (
        PagedKVCache(**sizes, group=group, kv_block=kv_block),
        make(rank_device, kv_dtype=kv_dtype),
    )
    for seed, tokens in enumerate([3, 18, 1, 16]):
        found, expected = (step(each, tokens, seed) for each in (cache, whole))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    few = PagedKVCache(**sizes, group=group, kv_block=kv_block, pages=1)
    k = torch.randn(2, 2, 3, 16, device=rank_device)
    with pytest.raises(ValueError, match="pages must be at least 2 for sequences of"):
        few.append(0, k, k)


def test_more_ranks_than_blocks(group, rank_device) -> None:
    """A rank that never holds a position."""
    cache = make(rank_device, capacity=3, group=group, kv_block=3)
    whole = make(rank_device, capacity=3)
    for seed, tokens in enumerate([2, 1]):
        found, expected = (step(each, tokens, seed) for each in (cache, whole))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=3e-6, rtol=1e-5)


def test_every_strategy(group, rank_device, hierarchies) -> None:
    whole = make(rank_device)
    caches = [
        make(rank_device, group=group, kv_block=3, **by(strategy, hierarchies, 1))
        for strategy in PORTABLE
    ]
    for seed, tokens in enumerate([18, 1, 4]):
        expected = step(whole, tokens, seed)
        for cache in caches:
            for ours, theirs in zip(step(cache, tokens, seed), expected, strict=True):
                torch.testing.assert_close(ours, theirs, atol=3e-6, rtol=1e-5)


def test_reset_forgets(group: str, rank_device) -> None:
    cache, fresh = make(rank_device, group=group), make(rank_device, group=group)
    step(cache, 17, 0)
    cache.reset()
    assert cache.bytes_used() == 0
    for again, expected in zip(step(cache, 5, 1), step(fresh, 5, 1), strict=True):
        assert torch.equal(again, expected)


@pytest.mark.parametrize("kv_block", [None, 1, 4])
@pytest.mark.parametrize("tokens", [[3, 5], [1, 18], [0, 2], [0, 0], [3, 3]])
def test_ragged_steps_equal_each_sequence_alone(
    group: str, rank_device, kv_block, tokens: list[int]
) -> None:
    """Over 4 tokens held; each sequence's tokens are the last columns, the padding is never seen."""
    cache = make(rank_device, group=group, kv_block=kv_block)
    step(cache, 4, 0)
    columns = max(*tokens, 1)
    q, k, v = (torch.randn(2, heads, columns, 16).to(rank_device) for heads in (6, 2, 2))
    cache.reserve(tokens)
    counts, full = torch.tensor(tokens, device=rank_device), min(tokens) == columns
    ragged = cache.ragged_step(counts, columns, full=full)
    ragged.append(1, k, v)
    found = ragged.attend(1, q)
    ragged.advance(columns)
    assert cache.held == cache.lengths.tolist() == [4 + count for count in tokens]
    for sequence, count in enumerate(tokens):
        alone = make(rank_device, group=group, kv_block=kv_block)
        step(alone, 4, 0)
        if not count:
            continue
        alone.append(1, k[:, :, -count:], v[:, :, -count:])
        expected = alone.attend(1, q[:, :, -count:])
        torch.testing.assert_close(
            found[sequence, :, -count:], expected[sequence], atol=3e-6, rtol=1e-5
        )


@pytest.mark.parametrize("kv_block", [None, 4])
def test_truncate_keeps_a_prefix(group: str, rank_device, kv_block) -> None:
    cache, fresh = (make(rank_device, group=group, kv_block=kv_block) for _ in range(2))
    step(cache, 5, 0)
    step(cache, 12, 2)
    step(fresh, 5, 0)
    cache.truncate(5)
    assert cache.held == cache.lengths.tolist() == [5, 5]
    assert cache.bytes_used() == fresh.bytes_used()
    for again, expected in zip(step(cache, 3, 1), step(fresh, 3, 1), strict=True):
        assert torch.equal(again, expected)
    cache.truncate(1000)
    assert cache.held == [8, 8]


class TestBadInput:
    def test_overflow(self, group: str, rank_device) -> None:
        cache = make(rank_device, capacity=8, group=group)
        step(cache, 6, 0)
        k = torch.randn(2, 2, 3, 16, device=rank_device)
        with pytest.raises(ValueError, match="capacity of 8 tokens, got 3 new tokens after 6"):
            cache.append(0, k, k)
        with pytest.raises(ValueError, match="tokens must be from 0 to 2, got 3"):
            cache.advance(3)

    def test_ragged_overflow(self, group: str, rank_device) -> None:
        cache = make(rank_device, capacity=8, group=group)
        step(cache, 6, 0)
        message = "sequence 1 must fit the cache's capacity of 8 tokens, got 3 new tokens after 6"
        with pytest.raises(ValueError, match=message):
            cache.reserve([2, 3])
        assert cache.held == [6, 6]
        with pytest.raises(ValueError, match="length must be at least 0, got -1"):
            cache.truncate(-1)

    def test_shapes_and_dtypes(self, group: str, rank_device) -> None:
        cache = make(rank_device, group=group)
        k = torch.randn(2, 2, 3, 16, device=rank_device)
        with pytest.raises(
            ValueError, match=r"v must have shape \(2, 2, 3, 16\), got \(2, 2, 4, 16\)"
        ):
            cache.append(0, k, torch.randn(2, 2, 4, 16, device=rank_device))
        with pytest.raises(
            TypeError, match=r"k must have dtype torch\.float32 like the cache, got torch\.float16"
        ):
            cache.append(0, k.half(), k.half())

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (dict(capacity=0), "capacity must be at least 1, got 0"),
            (dict(num_layers=0), "num_layers must be at least 1, got 0"),
            (dict(head_dim=7), "head_dim must be a multiple of 8 from 16 to 256, got 7"),
            (dict(kv_block=0), "kv_block must be at least 1, got 0"),
            (dict(kv_block=-1), "kv_block must be at least 1, got -1"),
            (dict(strategy="none"), "strategy must be one of"),
            (dict(strategy="hierarchical"), "hierarchy must be the names of an inner and an outer"),
            (dict(group="nosuch"), "group must name a process group"),
        ],
    )
    def test_options(self, group: str, rank_device, options: dict, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            make(rank_device, **options)

    def test_layers_and_types(self, group: str, rank_device) -> None:
        cache = make(rank_device, group=group)
        k = torch.randn(2, 2, 3, 16, device=rank_device)
        with pytest.raises(ValueError, match=r"layer must be from 0 to \d, got -1"):
            cache.append(-1, k, k)
        with pytest.raises(TypeError, match=r"k must be a torch\.Tensor, got list"):
            cache.append(0, [1], [1])
        with pytest.raises(TypeError, match=r"q must be a torch\.Tensor, got list"):
            cache.attend(0, [1])
        with pytest.raises(TypeError, match="dtype must be one of"):
            make(rank_device, dtype=torch.int32)


def test_values_are_stored_without_their_graphs(group, rank_device) -> None:
    cache = make(rank_device, group=group)
    for _ in range(2):  # a second step over what a first one's backward has freed
        k = torch.randn(2, 2, 3, 16, device=rank_device, requires_grad=True)
        q = torch.randn(2, 4, 3, 16, device=rank_device, requires_grad=True)
        cache.append(0, k, k)
        cache.attend(0, q).sum().backward()
        assert q.grad is not None
        assert k.grad is None
        cache.advance(3)


@pytest.mark.parametrize("kv_block", [None, 4])
def test_as_a_module(group, rank_device, kv_block) -> None:
    layer = DistributedDecodeAttention(
        2, 2, 30, 16, dtype=torch.float32, device=rank_device, group=group, kv_block=kv_block,
        window=(9, 0), scale=0.3,
    )  # fmt: skip
    q, k, v = (torch.randn(2, n, 30, 16, device=rank_device) for n in (6, 2, 2))
    exact, _ = attention(q, k, v, causal=True, window=(9, 0), scale=0.3)
    for _ in range(2):
        outs, begin = [], 0
        for tokens in (19, 1, 1, 5, 4):
            part = slice(begin, begin + tokens)
            outs.append(layer(q[:, :, part], k[:, :, part], v[:, :, part]))
            begin += tokens
        torch.testing.assert_close(torch.cat(outs, 2), exact)
        with pytest.raises(ValueError, match="k must fit the cache's capacity"):
            layer(q[:, :, :1], k[:, :, :1], v[:, :, :1])
        layer.reset()
