"""Which heads a tensor-parallel rank holds, against shares written by hand."""

from __future__ import annotations

import pytest

from torch_fdattn.dist.tensor_parallel.head_sharding import shard_heads


@pytest.mark.parametrize(
    ("heads", "kv_heads", "q", "kv"),
    [
        (9, 3, [6, 3], [(0, 2), (2, 1)]),
        (9, 3, [3, 3, 3], [(0, 1), (1, 1), (2, 1)]),
        (9, 3, [2, 1, 3, 3], [(0, 1), (0, 1), (1, 1), (2, 1)]),
        (4, 4, [2, 1, 1], [(0, 2), (2, 1), (3, 1)]),
        (8, 1, [3, 3, 2], [(0, 1)] * 3),
        (8, 2, [2, 2, 4], [(0, 1), (0, 1), (1, 1)]),
        (64, 8, [16] * 4, [(0, 2), (2, 2), (4, 2), (6, 2)]),
    ],
)
def test_shares(heads, kv_heads, q, kv) -> None:
    shards = [shard_heads(heads, kv_heads, rank, len(q)) for rank in range(len(q))]
    assert [s.q_heads for s in shards] == q
    assert [s.q_start for s in shards] == [sum(q[:rank]) for rank in range(len(q))]
    assert [(s.kv_start, s.kv_heads) for s in shards] == kv
    assert {s.replicated for s in shards} == {len(q) > kv_heads}
    for s in shards:  # each query head's KV head is there
        group = heads // kv_heads
        used = {head // group for head in range(s.q_start, s.q_start + s.q_heads)}
        assert used == set(range(s.kv_start, s.kv_start + s.kv_heads))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 1, 0, 4), "heads must be at least the number of ranks, .* got 3 heads on 4 ranks"),
        ((9, 2, 0, 2), "heads must be a positive multiple of kv_heads, got 9 and 2"),
        ((0, 0, 0, 1), "heads must be a positive multiple of kv_heads, got 0 and 0"),
    ],
)
def test_refusals(arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_heads(*arguments)
