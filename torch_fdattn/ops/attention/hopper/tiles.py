"""Which tile a number stands for: rows of queries of one head, and the blocks of keys that these rows see.

Programs take numbers from a counter (`take`). Numbers run through sections of heads whose keys and values fit into the
L2 cache together, and within a section from the tiles with the most keys to those with the fewest: what is left at the
end of a launch are short tiles.
"""
# Without `from __future__ import annotations`: aggregates ask for the types of their fields.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

#: Positions are clamped to this (`ops/positions.py`).
_FAR = gl.constexpr(1 << 29)


@aggregate
class Call:
    """What a call's tiles have in common."""

    kv_lens: gl.tensor | gl.constexpr  # pointers, or None
    q_start: gl.tensor | gl.constexpr
    kv_start: gl.tensor | gl.constexpr
    q_len: gl.tensor
    capacity: gl.tensor  # keys of a sequence at most
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

    @gluon.constexpr_function
    def __init__(self, kv_lens, q_start, kv_start, q_len, capacity, sequences, heads, group, section, left, right,
                 HAS_LEFT, HAS_RIGHT, ROWS, KEYS):  # fmt: skip
        self.kv_lens = gl.constexpr(None) if kv_lens is None else kv_lens
        self.q_start = gl.constexpr(None) if q_start is None else q_start
        self.kv_start = gl.constexpr(None) if kv_start is None else kv_start
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

    @gluon.jit
    def row_blocks(self):
        return (self.q_len + self.ROWS - 1) // self.ROWS

    @gluon.jit
    def tiles(self):
        return self.row_blocks() * self.heads * self.sequences


@aggregate
class Tile:
    """Rows from `row` on, and the blocks of keys from `begin` to before `end`, at least one."""

    sequence: gl.tensor
    head: gl.tensor
    row: gl.tensor
    kv_len: gl.tensor
    offset: gl.tensor  # of the first query's position from the first key's
    begin: gl.tensor
    end: gl.tensor

    @gluon.constexpr_function
    def __init__(self, sequence, head, row, kv_len, offset, begin, end):
        self.sequence = sequence
        self.head = head
        self.row = row
        self.kv_len = kv_len
        self.offset = offset
        self.begin = begin
        self.end = end


@gluon.jit
def tile_of(number, call):
    row_blocks = call.row_blocks()
    each = call.section * row_blocks
    section = number // each
    number -= section * each
    heads = gl.minimum(call.section, call.heads * call.sequences - section * call.section)
    block = number // heads
    head = section * call.section + number - block * heads
    if call.HAS_RIGHT:
        block = row_blocks - 1 - block
    sequence = head // call.heads
    head -= sequence * call.heads
    row = block * call.ROWS

    kv_len = call.capacity
    if call.kv_lens is not None:
        kv_len = gl.minimum(
            gl.maximum(gl.load(call.kv_lens + sequence).to(gl.int32), 0), call.capacity
        )
    offset = kv_len - call.q_len
    if call.q_start is not None:
        offset = _position(call.q_start + sequence)
        if call.kv_start is not None:
            offset -= _position(call.kv_start + sequence)
    low = gl.to_tensor(0)
    high = kv_len
    if call.HAS_LEFT:
        low = gl.maximum(offset + row - call.left, 0)
    if call.HAS_RIGHT:
        last = gl.minimum(row + call.ROWS, call.q_len) - 1
        high = gl.minimum(high, offset + last + call.right + 1)
    begin = low // call.KEYS
    end = gl.maximum((high + call.KEYS - 1) // call.KEYS, begin + 1)
    return Tile(sequence, head, row, kv_len, offset, begin, end)


@gluon.jit
def _position(pointer):
    found = gl.load(pointer).to(gl.int64)
    return gl.minimum(gl.maximum(found, -_FAR), _FAR).to(gl.int32)


@gluon.jit
def take(counter, tiles):
    """The next number that no program has. The last one that is taken in a launch leaves the counter at 0."""
    taken = gl.atomic_add(counter, 1, sem="relaxed")
    if taken == tiles - 1:
        gl.store(counter, 0)
    return taken + gl.num_programs(0)
