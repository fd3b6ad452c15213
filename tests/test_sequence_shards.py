"""Which positions each rank holds, and the calls that follow from them: host arithmetic, on one process."""

import itertools
import random

import pytest
import torch

from torch_fdattn.dist.ring_attention.head_groups import head_groups
from torch_fdattn.dist.ring_attention.local import Problem, call_mask
from torch_fdattn.dist.ring_attention.plan import BlockCall, block_calls
from torch_fdattn.dist.ring_attention.sequence_shards import Run, SequenceShards
from torch_fdattn.dist.ring_attention.unsharded import unsharded_calls
from torch_fdattn.ops.attention.dropout import Dropout


def test_zigzag_pairs_early_and_late_chunks():
    shards = SequenceShards.zigzag(16, 2)
    assert shards.ranks == ((Run(0, 4), Run(12, 4)), (Run(4, 8),))
    assert shards.positions(0).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]


def test_positions_in_packed_documents():
    shards = SequenceShards.zigzag(8, 2)
    assert shards.positions(0, cu_seqlens=[0, 1, 1, 7, 8]).tolist() == [0, 0, 5, 0]
    assert shards.positions(1, cu_seqlens=torch.tensor([0, 3, 8])).tolist() == [2, 0, 1, 2]
    with pytest.raises(ValueError, match="cu_seqlens must begin with 0, end with the 8 tokens"):
        shards.positions(0, cu_seqlens=[0, 3])


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_named_maps_are_even_partitions(kind):
    for world, total in itertools.product([1, 2, 3, 8], [0, 1, 5, 31, 64]):
        shards = getattr(SequenceShards, kind)(total, world)
        assert (shards.world_size, shards.total) == (world, total)
        everything = torch.cat([shards.positions(r) for r in range(world)])
        assert sorted(everything.tolist()) == list(range(total))
        assert max(shards.lengths) - min(shards.lengths) <= (1 if kind == "contiguous" else 2)
        assert SequenceShards.from_flat(shards.flat()) == shards


def test_zigzag_balances_causal_work():
    shards = SequenceShards.zigzag(8 * 128, 4)
    work = [sum(p + 1 for p in shards.positions(r).tolist()) for r in range(4)]
    assert max(work) < 1.001 * min(work)


def test_shard_and_join_are_inverse():
    shards = SequenceShards.from_positions([[4, 5, 0], [], [3, 1, 2, 6]])
    assert shards.lengths == [3, 0, 4]
    whole = torch.randn(2, 7, 3)
    parts = [shards.shard(whole, r) for r in range(3)]
    assert torch.equal(parts[0], whole[:, [4, 5, 0]])
    assert torch.equal(shards.join(parts), whole)


@pytest.mark.parametrize(
    ("positions", "text"),
    [
        ([[0, 1], [1, 2]], "got 1 where 2"),
        ([[0, 2]], "got 2 where 1"),
        ([[-1, 0]], "got -1 where 0"),
    ],
)
def test_no_partition_is_refused(positions, text):
    with pytest.raises(ValueError, match=text):
        SequenceShards.from_positions(positions)


@pytest.mark.parametrize("arguments", [(-1, 2), (4, 0)])
def test_impossible_sizes_are_refused(arguments):
    with pytest.raises(ValueError, match="total must be at least 0 and world_size at least 1"):
        SequenceShards.contiguous(*arguments)


def pairs_of(call: BlockCall) -> set[tuple[int, int]]:
    """The (query, key) pairs that a kernel would see under a call's own positions."""
    seen, (left, right) = set(), call.window
    for i, j in itertools.product(
        range(call.q_begin, call.q_end), range(call.kv_begin, call.kv_end)
    ):
        if call.q_start is None:
            seen.add((i, j))
            continue
        distance = (call.kv_start + j - call.kv_begin) - (call.q_start + i - call.q_begin)
        if (right < 0 or distance <= right) and (left < 0 or distance >= -left):
            seen.add((i, j))
    return seen


@pytest.mark.parametrize("world", [1, 2, 4])
def test_causal_calls_of_zigzag_shards_need_no_positions(world: int) -> None:
    """Neither over all keys nor block by block: a kernel that is given none takes its faster form, and the host makes none."""
    shards = SequenceShards.zigzag(64 * world, world)
    problem = Problem("", 0, shards, -1, 0, 1.0)
    for rank in range(world):
        of_rank = problem._replace(rank=rank)
        calls = unsharded_calls(of_rank)
        for other in range(world):
            calls += of_rank.calls(shards.ranks[rank], shards.ranks[other])
        for call in calls:
            q = torch.zeros(1, 1, call.q_end - call.q_begin, 8)
            assert call_mask(call, q, of_rank)[:3] == (None, None, None)
    # Dropout counts positions, and lengths do.
    call = unsharded_calls(problem)[0]
    for positions in (
        dict(dropout=Dropout(0.5)),
        dict(kv_lens=torch.tensor([3], dtype=torch.int32)),
    ):
        found = call_mask(call, torch.zeros(1, 1, call.q_end, 8), problem._replace(**positions))
        assert found.q_start is not None


def test_long_sequences_travel_in_groups_of_heads_and_many_documents_do_not() -> None:
    def sizes(
        total: int, heads: int = 16, ranks: int = 2, documents: tuple[int, ...] = (), of="forward"
    ) -> list[int]:
        shards = SequenceShards.zigzag(total, ranks)
        problem = Problem("", 0, shards, -1, 0, 1.0, documents=documents)
        q, k = (torch.empty(1, n, total // ranks, 128, dtype=torch.bfloat16, device="meta") for n in (2 * heads, heads))  # fmt: skip
        return [group.count for group in head_groups(q, k, problem, of)]

    assert sizes(16384) == sizes(16384, of="backward") == [16]
    assert sizes(32768) == [16]
    assert sizes(32768, of="backward") == [4] * 4
    assert sizes(131072) == [4] * 4
    assert sizes(131072, of="backward") == [1] * 16
    assert sizes(65536, ranks=4) == [8, 8]
    assert sizes(65536, ranks=4, of="backward") == [4] * 4
    assert sizes(131072, heads=10) == [4, 3, 3]
    assert sizes(1 << 20, heads=2) == [1, 1]
    assert sizes(131072, documents=tuple(range(0, 131073, 4096))) == [16]


def test_plans_see_each_visible_pair_once():
    for seed in range(300):
        rng = random.Random(seed)
        world, total = rng.choice([1, 2, 3]), rng.randint(1, 24)
        positions = list(range(total))
        if rng.random() < 0.5:
            size = rng.choice([1, 2, 4])
            blocks = [positions[i : i + size] for i in range(0, total, size)]
            rng.shuffle(blocks)
            positions = [p for block in blocks for p in block]
        cuts = sorted(rng.randint(0, total) for _ in range(world - 1))
        edges = [0, *cuts, total]
        held = [positions[a:b] for a, b in itertools.pairwise(edges)]
        shards = SequenceShards.from_positions(held)
        left, right = rng.choice([(-1, 0), (-1, -1), (3, 0), (0, 0), (2, 5), (-1, 2), (4, -1)])
        for q_rank, kv_rank in itertools.product(range(world), repeat=2):
            visible = {
                (i, j)
                for (i, p), (j, s) in itertools.product(
                    enumerate(held[q_rank]), enumerate(held[kv_rank])
                )
                if (right < 0 or s <= p + right) and (left < 0 or s >= p - left)
            }
            calls = block_calls(shards.ranks[q_rank], shards.ranks[kv_rank], left, right)
            seen = [pair for call in calls for pair in pairs_of(call)]
            assert len(seen) == len(set(seen)), f"seed {seed}: a pair seen twice"
            assert set(seen) == visible, f"seed {seed}"
            for call in calls:
                cut = call.over_seen_keys()
                assert pairs_of(cut) == pairs_of(call), f"seed {seed}"
                keys = [key for _, key in pairs_of(call)]
                ends = min(keys), max(keys) + 1
                assert (cut.kv_begin, cut.kv_end) == ends, f"seed {seed}"
                for x in (call, cut):
                    if x.ends_together:  # positions that attention takes where none are given
                        rows, keys = x.q_end - x.q_begin, x.kv_end - x.kv_begin
                        assert pairs_of(x._replace(q_start=keys - rows, kv_start=0)) == pairs_of(x)


@pytest.mark.parametrize("by_position", [False, True])
def test_plans_of_prefixes_see_each_visible_pair_once(by_position):
    for seed in range(200):
        rng = random.Random(f"prefixes {seed}")
        world, total = rng.choice([1, 2, 3]), rng.randint(1, 24)
        documents = [0, *sorted(rng.randint(0, total) for _ in range(rng.randint(0, 3))), total]
        prefixes = [rng.randint(0, b - a) for a, b in itertools.pairwise(documents)]
        shards = SequenceShards.balanced(total, world, chunks=rng.choice([1, 2, 3]))
        last = [0] * total  # key that each query sees
        for (begin, end), prefix in zip(itertools.pairwise(documents), prefixes, strict=True):
            last[begin:end] = [max(p, begin + prefix - 1) for p in range(begin, end)]
        first = [max(x for x in documents if x <= p) for p in range(total)]
        alone = rng.random() < 0.3 and len(documents) == 2
        for q_rank, kv_rank in itertools.product(range(world), repeat=2):
            held = [shards.positions(r).tolist() for r in (q_rank, kv_rank)]
            visible = {
                (i, j)
                for (i, p), (j, s) in itertools.product(*map(enumerate, held))
                if first[p] <= s <= last[p]
            }
            runs = shards.ranks[q_rank], shards.ranks[kv_rank]
            calls = block_calls(*runs, -1, 0, by_position, () if alone else documents, prefixes)
            seen = [pair for call in calls for pair in pairs_of(call)]
            assert len(seen) == len(set(seen)), f"seed {seed}: a pair seen twice"
            assert set(seen) == visible, f"seed {seed}"


@pytest.mark.parametrize("world", [2, 4])
def test_zigzag_makes_few_calls(world):
    """One call a run for the rank's own keys, one in all for another rank's."""
    shards = SequenceShards.zigzag(64 * world, world)
    for q_rank, kv_rank in itertools.product(range(world), repeat=2):
        calls = block_calls(shards.ranks[q_rank], shards.ranks[kv_rank], -1, 0)
        assert len(calls) <= (2 if q_rank == kv_rank else 1), (q_rank, kv_rank, calls)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_balanced_shards(world, causal) -> None:
    """Ranks differ by at most a chunk's tokens, and by a few per cent in the pairs that they see."""
    rng = random.Random(world)
    for _ in range(5):
        total = rng.randint(600, 1500)
        documents = [0, *sorted(rng.randint(0, total) for _ in range(rng.randint(0, 12))), total]
        window = rng.choice([None, (rng.randint(50, 900), 0 if causal else 40)])
        options = dict(cu_seqlens=documents, causal=causal, window=window)
        shards = SequenceShards.balanced(total, world, **options)
        assert sorted(torch.cat([shards.positions(r) for r in range(world)]).tolist()) == list(range(total))  # fmt: skip
        assert max(shards.lengths) - min(shards.lengths) <= total / (8 * world) + 1
        document = torch.bucketize(torch.arange(total), torch.tensor(documents[1:]), right=True)
        mask = document[:, None] == document
        distance = torch.arange(total)[:, None] - torch.arange(total)
        left, right = window or (-1, -1)
        right = 0 if causal else right
        if left >= 0:
            mask &= distance <= left
        if right >= 0:
            mask &= -distance <= right
        pairs = mask.sum(1)
        work = [int(pairs[shards.positions(r)].sum()) for r in range(world)]
        assert max(work) <= 1.1 * sum(work) / world
        given = pairs if total % 2 else pairs.tolist()
        assert SequenceShards.balanced(total, world, keys_per_query=given) == shards
    assert SequenceShards.balanced(0, world).total == 0
    for wrong, text in (
        (dict(cu_seqlens=[0, 9]), "cu_seqlens must begin with 0, end with the 10"),
        (dict(cu_seqlens=[]), r"cu_seqlens must .*got \[\]"),
        (dict(cu_seqlens=[0, 1.5, 10]), "cu_seqlens must be an integer tensor"),
        (dict(window=(-7, 2)), "window"),
        (dict(chunks=1.5), "chunks must be an int"),
        (dict(keys_per_query=[1] * 9), r"keys_per_query must have shape \(10,\), .* got \(9,\)"),
        (dict(keys_per_query=[11] * 10), "keys_per_query must be from 0 to 10, got 11 to 11"),
        (dict(keys_per_query=[0.5] * 10), "keys_per_query must hold integers"),
        (dict(keys_per_query=[1] * 10, window=(3, 0)), "cu_seqlens and window must be None with"),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            SequenceShards.balanced(10, world, **wrong)


def test_documents_that_do_not_meet_make_no_calls() -> None:
    """Of documents of 8 tokens on ranks of 16, each rank calls for its own alone."""
    shards = SequenceShards.contiguous(64, 4)
    documents = range(0, 65, 8)
    for queries in range(4):
        for keys in range(4):
            runs = shards.ranks[queries], shards.ranks[keys]
            calls = block_calls(*runs, -1, 0, documents=documents)
            assert len(calls) == (2 if queries == keys else 0)
    assert len(block_calls(shards.ranks[1], shards.ranks[0], -1, 0, documents=(0, 30, 64))) == 1
