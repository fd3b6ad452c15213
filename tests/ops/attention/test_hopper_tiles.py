"""Tiles of queries of Hopper's forward, and the blocks of keys that they see: `tiles.py`'s functions, run in plain Python.

Numbers are those of the device: quotients are cut off, and what leaves int32 fails.
"""

import itertools
import random
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from torch_fdattn.ops.attention.hopper import kernel, sequences, tiles
from torch_fdattn.testing import visible_keys

FAR, ROWS = 1 << 29, 64


class Number(int):
    """An int32."""

    def __add__(self, other):
        return _int32(int(self) + int(other))

    def __sub__(self, other):
        return _int32(int(self) - int(other))

    def __mul__(self, other):
        return _int32(int(self) * int(other))

    def __floordiv__(self, other):
        quotient = abs(int(self)) // abs(int(other))
        return _int32(quotient if (self < 0) == (other < 0) else -quotient)

    def __rsub__(self, other):
        return _int32(int(other) - int(self))

    def __gt__(self, other):
        return Flag(int(self) > other)

    def __le__(self, other):
        return Flag(int(self) <= other)

    def to(self, _):
        return self

    __radd__, __rmul__ = __add__, __mul__


class Flag(Number):
    """Of a comparison, as kernels turn it into a number."""

    def __and__(self, other):
        return Flag(bool(self) and bool(other))


def _int32(x: int) -> Number:
    assert -(2**31) <= x < 2**31
    return Number(x)


class Pointer(NamedTuple):
    numbers: list
    place: int = 0

    def __add__(self, step):
        return Pointer(self.numbers, self.place + step)

    def load(self):
        assert self.place >= 0
        return Number(self.numbers[self.place])


class Span(NamedTuple):
    first: int
    length: int


class Tile(NamedTuple):
    sequence: int
    batch: int
    has_sink: int
    head: int
    pair: int
    queries: Span
    keys: Span
    row: int
    offset: int
    begin: int
    end: int

    of_warp_group = tiles.Tile.of_warp_group.fn


@pytest.fixture(autouse=True)
def plain_python(monkeypatch):
    plain = SimpleNamespace(
        minimum=lambda a, b: Number(min(int(a), int(b))), maximum=lambda a, b: Number(max(int(a), int(b))),
        where=lambda x, a, b: Number(a if x else b), to_tensor=Number, load=Pointer.load, int32=int, int64=int,
    )  # fmt: skip
    for module, names in (
        (sequences, dict(gl=plain, Span=Span, _begin=sequences._begin.fn)),
        (kernel, dict(gl=plain, ROWS=ROWS)),
        (tiles, dict(
            gl=plain, Span=Span, Tile=Tile, ROWS=ROWS, _FAR=FAR, span=sequences.span.fn, begun_before=sequences.begun_before.fn,
            position_at=tiles.position_at.fn,
        )),
    ):  # fmt: skip
        for name, value in names.items():
            monkeypatch.setattr(module, name, value)


class Call(SimpleNamespace):
    """In place of `tiles.Call`."""

    row_blocks, all_heads, tiles = (x.fn for x in (tiles.Call.row_blocks, tiles.Call.all_heads, tiles.Call.tiles))  # fmt: skip


def call_of(source: random.Random, q_len: int, capacity: int, count: int, **of_packed) -> Call:
    """Of so many sequences; lengths and positions out of range, too."""
    left = source.choice((-1, -1, 0, source.randint(1, 400), FAR))
    right = source.choice((-1, 0, 0, source.randint(1, 300), FAR))
    kv_lens = q_start = kv_start = None
    if source.random() < 0.5:
        kv_lens = [source.choice((-3, 0, 1, 64, capacity + 9, source.randint(0, capacity))) for _ in range(count)]  # fmt: skip
    if source.random() < 0.4:
        q_start = [source.choice((0, source.randint(-300, 900), 1 << 40, -(1 << 40))) for _ in range(count)]  # fmt: skip
    if source.random() < 0.4:
        kv_start = [source.choice((0, source.randint(-100, 100), -(1 << 40))) for _ in range(count)]
    heads, group = source.choice(((1, 1), (2, 1), (3, 1), (3, 3), (2, 2), (4, 2), (8, 4), (6, 6)))
    pairs = group % 2 == 0 and (q_len <= ROWS or of_packed["cu_seqlens_q"] is not None)
    given = dict(kv_lens=kv_lens, q_start=q_start, kv_start=kv_start, **of_packed)
    return Call(
        **{name: None if x is None else Pointer(x) for name, x in given.items()}, q_len=Number(q_len), capacity=Number(capacity),
        sequences=Number(count), heads=Number(heads), group=Number(group), pairs=Number(pairs), section=Number(source.randint(1, 5)),
        left=Number(left), right=Number(right), HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0, ROWS=2 * ROWS,
        KEYS=source.choice((64, 128)),
    )  # fmt: skip


def length(source: random.Random) -> int:
    return source.choice((1, 63, 64, 65, 127, 128, 129, source.randint(2, 500)))


def drawn(seed: int) -> tuple[Call, list[int], list[int]]:
    """(call, queries and keys of each sequence); packed by odd seeds, and the keys of every fourth on pages."""
    source, count = random.Random(seed), random.Random(seed).randint(1, 4)
    if seed % 2 == 0:
        q_len, capacity = length(source), length(source)
        call = call_of(source, q_len, capacity, count, cu_seqlens_q=None, cu_seqlens_k=None)
        return call, [q_len] * count, [capacity] * count
    queries = [source.choice((0, length(source))) for _ in range(count)]
    keys = [source.choice((0, n, length(source))) for n in queries]
    begins, begins_of_keys = (
        list(itertools.accumulate(x, initial=source.choice((0, 5, 130)))) for x in (queries, keys)
    )
    tokens, tokens_of_keys = begins[-1] + source.choice((1, 200)), begins_of_keys[-1] + 9
    if seed % 4 == 1:
        keys, tokens_of_keys, begins_of_keys = [256] * count, 256, None
    call = call_of(source, tokens, tokens_of_keys, count, cu_seqlens_q=begins, cu_seqlens_k=begins_of_keys)  # fmt: skip
    return call, queries, keys


def seen_of(call: Call, sequence: int, q_len: int, keys: int) -> torch.Tensor:
    """The boolean (query, valid key) mask of a sequence, by the oracle."""

    def number(given, default):
        return default if given is None else min(max(given.numbers[sequence], -FAR), FAR)

    kv_start = number(call.kv_start, 0)
    valid = keys if call.kv_lens is None else min(max(call.kv_lens.numbers[sequence], 0), keys)
    q_start, window = number(call.q_start, kv_start + valid - q_len), (call.left, call.right)
    return visible_keys(q_len, valid, q_start=q_start, kv_start=kv_start, window=window)


def tiles_of(call: Call) -> list[Tile]:
    found = [tiles.tile_of.fn(Number(i), call) for i in range(call.tiles())]
    # The scheduling warp leaves out packed tiles without rows.
    return [x for x in found if x.row < x.queries.length]


@pytest.mark.parametrize("seed", range(240))
def test_each_row_is_of_one_warp_group_of_a_tile(seed):
    """Tokens of no sequence, too, which see no key."""
    call, queries, _ = drawn(seed)
    rows = []
    for tile in tiles_of(call):
        both = [tile.of_warp_group(group) for group in range(2)]
        assert both[0].head // call.group == both[1].head // call.group
        for x in both:
            own = range(x.row, min(x.row + ROWS, x.queries.length))
            rows += [(x.head, x.batch, x.queries.first + row) for row in own]
    batches = 1 if call.cu_seqlens_q else len(queries)
    assert sorted(rows) == list(itertools.product(range(call.heads), range(batches), range(call.q_len)))  # fmt: skip


@pytest.mark.parametrize("seed", range(240))
def test_blocks_have_all_keys_that_are_seen_and_hide_all_others(seed):
    call, queries, keys = drawn(seed)
    masks = [seen_of(call, i, n, m) for i, (n, m) in enumerate(zip(queries, keys, strict=True))]
    for tile in tiles_of(call):
        assert 0 <= tile.begin < tile.end
        if not tile.has_sink:
            assert tile.keys.length == 0
            continue
        mask = masks[tile.sequence]
        assert mask.shape == (tile.queries.length, tile.keys.length)
        seen = mask[tile.row : tile.row + call.ROWS].any(0).nonzero()[:, 0] // call.KEYS
        assert all(tile.begin <= block < tile.end for block in seen.tolist())
        for row in range(tile.row, min(tile.row + call.ROWS, tile.queries.length), ROWS):
            own = mask[row : row + ROWS]
            begin, end = kernel._seen_by_all.fn(tile._replace(row=Number(row)), call)
            for block in range(max(begin, tile.begin), min(end, tile.end)):
                unhidden = own[:, block * call.KEYS : (block + 1) * call.KEYS]
                assert unhidden.shape[1] == call.KEYS
                assert unhidden.all()


def test_few_queries_of_two_heads_are_one_tile():
    counted = 0
    for seed in range(240):
        call, queries, _ = drawn(seed)
        found = [x for x in tiles_of(call) if x.has_sink]
        for sequence, count in enumerate(queries):
            heads = call.heads // 2 if call.pairs and count <= ROWS else call.heads
            counted += count > 0 and heads < call.heads
            own = [x for x in found if x.sequence == sequence]
            assert len(own) == heads * -(-count // call.ROWS)
    assert counted > 50
