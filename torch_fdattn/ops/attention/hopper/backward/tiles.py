"""Which tile a number stands for: keys of one KV head, and the blocks of queries that see them.

As `hopper/tiles.py`: numbers run through sections of heads, within a section from the first keys, which most queries see,
to the last.
"""
# Without `from __future__ import annotations`: aggregates ask for the types of their fields.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from torch_fdattn.ops.attention.backward_rows import PADDING
from torch_fdattn.ops.attention.hopper.tiles import position_at, read_field

QUERIES = gl.constexpr(64)  #: of a block
GROUPS = gl.constexpr(
    2
)  #: warp groups that multiply: each has half of a tile's keys, and of dQ's columns
#: Room for a tile in shared memory, in int32.
FIELDS = gl.constexpr(7)


@aggregate
class KeyTile:
    """Keys from `first` on, of `kv_len`, and the blocks of queries from `begin` to before `end`, at least one."""

    batch: gl.tensor
    kv_head: gl.tensor
    first: gl.tensor
    kv_len: gl.tensor
    offset: gl.tensor  # of the first query's position from the first key's
    begin: gl.tensor
    end: gl.tensor

    @gluon.constexpr_function
    def __init__(self, batch, kv_head, first, kv_len, offset, begin, end):
        self.batch = batch
        self.kv_head = kv_head
        self.first = first
        self.kv_len = kv_len
        self.offset = offset
        self.begin = begin
        self.end = end


@gluon.jit
def key_blocks(call):
    """Of a head."""
    return (call.capacity + call.KEYS - 1) // call.KEYS


@gluon.jit
def key_tiles(call):
    """Of a call, whose `heads` are KV heads here."""
    return key_blocks(call) * call.sequences * call.heads


@gluon.jit
def key_tile_of(number, call):
    blocks = key_blocks(call)
    each = call.section * blocks
    section = number // each
    number -= section * each
    heads = gl.minimum(call.section, call.sequences * call.heads - section * call.section)
    block = number // heads
    head = section * call.section + number - block * heads
    batch = head // call.heads
    first = block * call.KEYS
    kv_len = call.capacity
    if call.kv_lens is not None:
        given = gl.load(call.kv_lens + batch).to(gl.int64)
        kv_len = gl.minimum(gl.maximum(given, 0), kv_len).to(gl.int32)
    offset = kv_len - call.q_len
    if call.q_start is not None:
        offset = position_at(call.q_start + batch)
        if call.kv_start is not None:
            offset -= position_at(call.kv_start + batch)
    low = gl.to_tensor(0)
    high = call.q_len
    if call.HAS_RIGHT:
        low = gl.maximum(first - call.right - offset, 0)
    if call.HAS_LEFT:
        high = gl.minimum(high, first + call.KEYS + call.left - offset)
    begin = gl.minimum(low, call.q_len - 1) // QUERIES
    end = gl.maximum((high + QUERIES - 1) // QUERIES, begin + 1)
    return KeyTile(batch, head - batch * call.heads, first, kv_len, offset, begin, end)


@gluon.jit
def padded_row(head, row, call):
    """Where lse2, delta and sums of dQ of a row lie: each head's are padded. head: of those of all sequences."""
    return head * ((call.q_len + PADDING - 1) // PADDING * PADDING) + row


@gluon.jit
def write_key_tile(tile, end, buffer, slot, LAYOUT: gl.constexpr):
    """`end`, 0 for a tile that there is not, in place of the tile's own."""
    fields = (end, tile.begin, tile.first, tile.kv_len, tile.offset, tile.kv_head, tile.batch)
    for i in gl.static_range(FIELDS):
        buffer.index(slot * FIELDS + i).store(gl.full([1], fields[i], gl.int32, LAYOUT))


@gluon.jit
def read_key_tile(buffer, slot, LAYOUT: gl.constexpr):
    return KeyTile(
        batch=read_field(buffer, slot, 6, FIELDS, LAYOUT),
        kv_head=read_field(buffer, slot, 5, FIELDS, LAYOUT),
        first=read_field(buffer, slot, 2, FIELDS, LAYOUT),
        kv_len=read_field(buffer, slot, 3, FIELDS, LAYOUT),
        offset=read_field(buffer, slot, 4, FIELDS, LAYOUT),
        begin=read_field(buffer, slot, 1, FIELDS, LAYOUT),
        end=read_field(buffer, slot, 0, FIELDS, LAYOUT),
    )
