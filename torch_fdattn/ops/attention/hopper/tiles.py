"""Which tile a number stands for: rows of queries of one head or two, and the blocks of keys that these rows see.

The scheduling warp takes numbers from a counter (`take`), finds out what they stand for, which may need numbers from the
device's memory, and hands that to the others (`write_tile`, `read_tile`). Numbers run through sections of heads
whose keys and values fit into the L2 cache together, and within a section from the tiles with the most keys to those
with the fewest: what is left at the end of a launch are short tiles.
"""
# Without `from __future__ import annotations`: aggregates ask for the types of their fields.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from torch_fdattn.ops.attention.hopper.rows import ROWS
from torch_fdattn.ops.attention.hopper.sequences import Span, begun_before, span

#: Positions are clamped to this (`ops/positions.py`).
_FAR = gl.constexpr(1 << 29)


@aggregate
class Call:
    """What a call's tiles have in common."""

    kv_lens: gl.tensor | gl.constexpr  # pointers, or None
    q_start: gl.tensor | gl.constexpr
    kv_start: gl.tensor | gl.constexpr
    cu_seqlens_q: gl.tensor | gl.constexpr  # of packed sequences
    cu_seqlens_k: gl.tensor | gl.constexpr
    q_len: gl.tensor  # of packed sequences: all tokens
    capacity: gl.tensor  # keys of a sequence at most; all tokens
    sequences: gl.tensor
    heads: gl.tensor
    group: gl.tensor  # query heads of a KV head
    section: gl.tensor  # heads of a section, of all sequences
    left: gl.tensor
    right: gl.tensor
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    ROWS: gl.constexpr
    KEYS: gl.constexpr
    # 1 where heads 2 i and 2 i + 1, which read the same keys, share a tile: of packed sequences those of at most 64 queries,
    # of others all, and then none has more. 0: no heads do.
    pairs: gl.tensor | gl.constexpr

    @gluon.constexpr_function
    def __init__(self, kv_lens, q_start, kv_start, cu_seqlens_q, cu_seqlens_k, q_len, capacity, sequences, heads, group, section, left, right,
                 HAS_LEFT, HAS_RIGHT, ROWS, KEYS, pairs=0):  # fmt: skip
        self.kv_lens = gl.constexpr(None) if kv_lens is None else kv_lens
        self.q_start = gl.constexpr(None) if q_start is None else q_start
        self.kv_start = gl.constexpr(None) if kv_start is None else kv_start
        self.cu_seqlens_q = gl.constexpr(None) if cu_seqlens_q is None else cu_seqlens_q
        self.cu_seqlens_k = gl.constexpr(None) if cu_seqlens_k is None else cu_seqlens_k
        self.q_len = q_len
        self.capacity = capacity
        self.sequences = sequences
        self.heads = heads
        self.group = group
        self.section = section
        self.left = left
        self.right = right
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.ROWS = gl.constexpr(ROWS)
        self.KEYS = gl.constexpr(KEYS)
        self.pairs = gl.constexpr(pairs) if isinstance(pairs, int) else pairs

    @gluon.jit
    def row_blocks(self):
        if self.cu_seqlens_q is not None:
            return self.q_len // self.ROWS + self.sequences + 2
        else:
            return (self.q_len + self.ROWS - 1) // self.ROWS

    @gluon.jit
    def all_heads(self):
        """Heads of all sequences, or pairs of heads; packed sequences share theirs."""
        if self.cu_seqlens_q is not None:
            return self.heads
        else:
            return self.heads * self.sequences // (1 + self.pairs)

    @gluon.jit
    def tiles(self):
        return self.row_blocks() * self.all_heads()


@aggregate
class Tile:
    """Rows from `row` on, of `q_len` that there are, and the blocks of keys from `begin` to before `end`, at least one.

    The second warp group has the next rows, or those of the next head (`Call.pairs`).
    """

    sequence: gl.tensor
    batch: gl.tensor  # where it lies in the tensors: `sequence`, or 0 where sequences are packed
    has_sink: gl.tensor  # 0 for tokens of no sequence, or 1
    head: gl.tensor
    pair: gl.tensor  # how many heads the second warp group's is behind it: 0 or 1
    queries: Span
    keys: Span
    row: gl.tensor
    offset: gl.tensor  # of the first query's position from the first key's
    begin: gl.tensor
    end: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, sequence, batch, has_sink, head, pair, queries, keys, row, offset, begin, end
    ):
        self.sequence = sequence
        self.batch = batch
        self.has_sink = has_sink
        self.head = head
        self.pair = pair
        self.queries = queries
        self.keys = keys
        self.row = row
        self.offset = offset
        self.begin = begin
        self.end = end

    @gluon.jit
    def of_warp_group(self, GROUP: gl.constexpr):
        """With the head and the first row of a warp group, in place of the first warp group's."""
        head = self.head + GROUP * self.pair
        row = self.row + GROUP * ROWS * (1 - self.pair)
        return Tile(
            self.sequence, self.batch, self.has_sink, head, self.pair, self.queries, self.keys, row,
            self.offset, self.begin, self.end,
        )  # fmt: skip


@gluon.jit
def tile_of(number, call):
    row_blocks = call.row_blocks()
    each = call.section * row_blocks
    section = number // each
    number -= section * each
    heads = gl.minimum(call.section, call.all_heads() - section * call.section)
    block = number // heads
    head = section * call.section + number - block * heads
    if call.HAS_RIGHT:
        block = row_blocks - 1 - block
    if call.cu_seqlens_q is not None:
        begun = begun_before(block, call.cu_seqlens_q, call.sequences, call.q_len, call.ROWS)
        queries = span(call.cu_seqlens_q, begun - 1, call.sequences, call.q_len)
        keys = Span(gl.to_tensor(0), call.capacity)  # on pages
        if call.cu_seqlens_k is not None:
            keys = span(call.cu_seqlens_k, begun - 1, call.sequences, call.capacity)
        block = block - (queries.first // call.ROWS + begun)
        pair = call.pairs * (queries.length <= ROWS).to(gl.int32)
        # Lengths that do not grow have blocks before their first: none of theirs, then. And a pair has its first head's.
        none = (block < 0) | (pair * (head % 2) > 0)
        block = gl.where(none, call.q_len // call.ROWS + 1, block)
        # Those of no sequence have no keys, and read the entries of another one.
        owned = ((begun > 0) & (begun <= call.sequences)).to(gl.int32)
        kv_len = owned * keys.length
        sequence = gl.minimum(gl.maximum(begun - 1, 0), call.sequences - 1)
        batch = gl.to_tensor(0)
    else:
        pair = gl.to_tensor(call.pairs)
        head *= 1 + pair
        sequence = head // call.heads
        head -= sequence * call.heads
        batch = sequence
        owned = gl.to_tensor(1)
        queries = Span(gl.to_tensor(0), call.q_len)
        keys = Span(gl.to_tensor(0), call.capacity)
        kv_len = call.capacity
    row = block * call.ROWS

    if call.kv_lens is not None:
        given = gl.load(call.kv_lens + sequence).to(gl.int64)
        kv_len = gl.minimum(gl.maximum(given, 0), kv_len).to(gl.int32)
    offset = kv_len - queries.length
    if call.q_start is not None:
        offset = position_at(call.q_start + sequence)
        if call.kv_start is not None:
            offset -= position_at(call.kv_start + sequence)
    low = gl.to_tensor(0)
    high = kv_len
    if call.HAS_LEFT:
        low = gl.maximum(offset + row - call.left, 0)
    if call.HAS_RIGHT:
        last = gl.minimum(row + call.ROWS, queries.length) - 1
        high = gl.minimum(high, offset + last + call.right + 1)
    begin = low // call.KEYS
    end = gl.maximum((high + call.KEYS - 1) // call.KEYS, begin + 1)
    keys = Span(keys.first, kv_len)
    return Tile(sequence, batch, owned, head, pair, queries, keys, row, offset, begin, end)


@gluon.jit
def position_at(pointer):
    found = gl.load(pointer).to(gl.int64)
    return gl.minimum(gl.maximum(found, -_FAR), _FAR).to(gl.int32)


@gluon.jit
def take(counter, tiles):
    """The next number that no program has. The last one that is taken in a launch leaves the counter at 0."""
    taken = gl.atomic_add(counter, 1, sem="relaxed")
    if taken == tiles - 1:
        gl.store(counter, 0)
    return taken + gl.num_programs(0)


#: Room for a tile in shared memory, in int32.
FIELDS = gl.constexpr(13)


@gluon.jit
def write_tile(tile, end, buffer, slot, LAYOUT: gl.constexpr):
    """`end`, 0 for a tile that there is not, in place of the tile's own."""
    fields = (
        end, tile.begin, tile.row, tile.offset, tile.keys.first, tile.keys.length, tile.queries.first,
        tile.queries.length, tile.head, tile.batch, tile.sequence, tile.has_sink, tile.pair,
    )  # fmt: skip
    for i in gl.static_range(FIELDS):
        buffer.index(slot * FIELDS + i).store(gl.full([1], fields[i], gl.int32, LAYOUT))


@gluon.jit
def read_end(buffer, slot, LAYOUT: gl.constexpr):
    """0 where there is no tile."""
    return read_field(buffer, slot, 0, FIELDS, LAYOUT)


@gluon.jit
def read_tile(buffer, slot, LAYOUT: gl.constexpr):
    return Tile(
        sequence=read_field(buffer, slot, 10, FIELDS, LAYOUT),
        batch=read_field(buffer, slot, 9, FIELDS, LAYOUT),
        has_sink=read_field(buffer, slot, 11, FIELDS, LAYOUT),
        head=read_field(buffer, slot, 8, FIELDS, LAYOUT),
        pair=read_field(buffer, slot, 12, FIELDS, LAYOUT),
        queries=Span(
            read_field(buffer, slot, 6, FIELDS, LAYOUT), read_field(buffer, slot, 7, FIELDS, LAYOUT)
        ),
        keys=Span(
            read_field(buffer, slot, 4, FIELDS, LAYOUT), read_field(buffer, slot, 5, FIELDS, LAYOUT)
        ),
        row=read_field(buffer, slot, 2, FIELDS, LAYOUT),
        offset=read_field(buffer, slot, 3, FIELDS, LAYOUT),
        begin=read_field(buffer, slot, 1, FIELDS, LAYOUT),
        end=read_field(buffer, slot, 0, FIELDS, LAYOUT),
    )


@gluon.jit
def read_field(buffer, slot, FIELD: gl.constexpr, FIELDS: gl.constexpr, LAYOUT: gl.constexpr):
    return gl.max(buffer.index(slot * FIELDS + FIELD).load(LAYOUT), 0)
