"""Tiles of keys of Hopper's backward, and the queries that they visit: `tiles.py`'s functions, run in plain Python."""

import random
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from torch_fdattn.ops.attention.hopper.backward import tiles

QUERIES, FAR = 64, 1 << 30
key_tile_of, key_blocks = tiles.key_tile_of.fn, tiles.key_blocks.fn


@pytest.fixture(autouse=True)
def plain_python(monkeypatch):
    """Quotients of numbers below zero, which kernels cut off and Python rounds down, are used for none of the results."""
    operations = dict(minimum=min, maximum=max, where=lambda x, a, b: a if x else b)
    plain = SimpleNamespace(**operations, to_tensor=lambda x: x, int32=int)
    of_packed = dict(PADDING=128, Span=Span, span=span, begun_before=begun_before)
    for name, value in dict(
        gl=plain,
        QUERIES=QUERIES,
        key_blocks=key_blocks,
        position_at=int,
        KeyTile=Tile,
        first_term_of=tiles.first_term_of.fn,
        **of_packed,
    ).items():
        monkeypatch.setattr(tiles, name, value)


class Span(NamedTuple):
    first: int
    length: int


def span(begins, sequence, sequences, tokens):
    begin = begins[sequence] if sequence >= 0 else 0
    return Span(begin, (begins[sequence + 1] if sequence < sequences else tokens) - begin)


def begun_before(block, begins, sequences, tokens, size):
    return Count(sum(begin // size + entry < block for entry, begin in enumerate(begins)))


class Flag(int):
    """Of a comparison, as kernels turn it into a number."""

    def __and__(self, other):
        return Flag(bool(self) and bool(other))

    def to(self, _):
        return int(self)


class Count(int):
    def __gt__(self, other):
        return Flag(int(self) > other)

    def __le__(self, other):
        return Flag(int(self) <= other)


class Tile(NamedTuple):
    sequence: int
    kv_head: int
    first: int
    kv_len: int
    offset: int
    begin: int
    end: int
    keys: Span | None
    queries: Span | None
    first_term: int | None


def call_of(q_len, capacity, offset=0, left=-1, right=-1, keys=128, heads=1, section=1):
    """Of one sequence."""
    return SimpleNamespace(
        cu_seqlens_q=None, cu_seqlens_k=None, kv_lens=None, q_start=offset, kv_start=None, q_len=q_len, capacity=capacity, sequences=1, heads=heads,
        section=section, left=left, right=right, HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0, KEYS=keys,
    )  # fmt: skip


def drawn(seed: int) -> SimpleNamespace:
    """Offsets of lengths and of positions, far ones too, and windows of all kinds."""
    source = random.Random(seed)
    q_len = source.choice([1, 63, 64, 65, source.randint(1, 900)])
    capacity = source.randint(1, 1500)
    of_lengths = source.randint(0, capacity) - q_len
    offset = source.choice([of_lengths, of_lengths, source.randint(-3000, 3000), FAR, -FAR])
    left, right = (source.choice([-1, 0, source.randint(0, 700)]) for _ in range(2))
    return call_of(q_len, capacity, offset, left, right, source.choice([128, 256]))


@pytest.mark.parametrize("part", range(10))
def test_every_block_is_visited_by_the_tiles_whose_keys_it_sees(part):
    for seed in range(1000 * part, 1000 * (part + 1)):
        call = drawn(seed)
        by_number = [key_tile_of(i, call) for i in range(key_blocks(call))]
        assert [x.first // call.KEYS for x in by_number] == list(range(len(by_number)))
        blocks = -(-call.q_len // QUERIES)
        assert all(0 <= x.begin < x.end <= blocks for x in by_number)
        for block in range(blocks):
            visiting = [x for x in by_number if x.begin <= block < x.end]
            assert all(x in visiting for x in by_number if sees(call, x, block)), call


def sees(call, tile, block: int) -> bool:
    """Whether a query of the block sees a key of the tile."""
    first = block * QUERIES + call.q_start
    last = min((block + 1) * QUERIES, call.q_len) - 1 + call.q_start
    last_key = min(tile.first + call.KEYS, call.capacity) - 1
    return (not call.HAS_RIGHT or tile.first <= last + call.right) and (
        not call.HAS_LEFT or last_key >= first - call.left
    )


@pytest.mark.parametrize("seed", range(200))
def test_tiles_of_packed_sequences(seed):
    """Each key is of one tile; tokens of no sequence, too, whose tiles write zeros."""
    source = random.Random(seed)
    lengths = [source.choice([0, 1, 128, source.randint(2, 700)]) for _ in range(source.randint(1, 6))]  # fmt: skip
    begins_of_keys = [source.choice([0, 50]), *lengths]
    begins = [sum(begins_of_keys[: i + 1]) for i in range(len(begins_of_keys))]
    queries = [source.choice([n, source.randint(0, 500)]) for n in lengths]
    begins_of_queries = [sum([30, *queries][: i + 1]) for i in range(len(lengths) + 1)]
    call = call_of(begins_of_queries[-1] + 20, begins[-1] + 40)
    for name, value in dict(
        cu_seqlens_q=begins_of_queries, cu_seqlens_k=begins, q_start=None, sequences=len(lengths),
        left=source.choice([-1, 0, 100]), right=source.choice([-1, 0, 70]),
    ).items():  # fmt: skip
        setattr(call, name, value)
    call.HAS_LEFT, call.HAS_RIGHT = call.left >= 0, call.right >= 0
    by_number = [key_tile_of(i, call) for i in range(key_blocks(call))]
    with_keys = [x for x in by_number if x.first < x.keys.length]
    rows = [x.keys.first + key for x in with_keys for key in range(x.first, min(x.first + call.KEYS, x.keys.length))]  # fmt: skip
    assert sorted(rows) == list(range(call.capacity))


@pytest.mark.parametrize("section", [1, 2, 5, 7])
@pytest.mark.parametrize("blocks", [1, 4])
def test_numbers_of_a_head_run_from_the_first_keys_on(blocks, section):
    """Each tile of all heads has one."""
    call = call_of(300, 128 * blocks, heads=7, section=section)
    found = [key_tile_of(i, call) for i in range(7 * blocks)]
    for head in range(7):
        first_keys = [x.first for x in found if x.kv_head == head]
        assert first_keys == [128 * n for n in range(blocks)]
