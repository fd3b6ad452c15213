"""Which tile a number stands for: keys of one KV head, and the blocks of queries that see them.

As `hopper/tiles.py`: numbers run through sections of heads, within a section from the first keys, which most queries see,
to the last.

Of packed sequences a tile has keys of one, cut as `ops/packed.py` says, and so has numbers that stand for no
keys. Its blocks of queries count from the sequence's first query: the last one may end among those of the next sequence.
"""
# Without `from __future__ import annotations`: aggregates ask for the types of their fields.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from torch_fdattn.ops.attention.backward_rows import PADDING
from torch_fdattn.ops.attention.hopper.sequences import Span, begun_before, span
from torch_fdattn.ops.attention.hopper.tiles import position_at, read_field

QUERIES = gl.constexpr(64)  #: of a block
GROUPS = gl.constexpr(2)  #: warp groups that multiply
#: Room for a tile in shared memory, in int32.
FIELDS = gl.constexpr(7)
FIELDS_OF_PACKED = gl.constexpr(12)


@aggregate
class KeyTile:
    """Keys from `first` on, of `kv_len`, and the blocks of queries from `begin` to before `end`, at least one.

    Of packed sequences, where its tokens lie; else None.
    """

    sequence: gl.tensor
    kv_head: gl.tensor
    first: gl.tensor
    kv_len: gl.tensor
    offset: gl.tensor  # of the first query's position from the first key's
    begin: gl.tensor
    end: gl.tensor
    keys: Span | gl.constexpr  # all that there are, of which kv_len count
    queries: Span | gl.constexpr  # none for tokens of no sequence
    first_term: gl.tensor | gl.constexpr  # of lse2 and delta: where its rows begin among a head's

    @gluon.constexpr_function
    def __init__(self, sequence, kv_head, first, kv_len, offset, begin, end, keys, queries, first_term):  # fmt: skip
        self.sequence = sequence
        self.kv_head = kv_head
        self.first = first
        self.kv_len = kv_len
        self.offset = offset
        self.begin = begin
        self.end = end
        self.keys = gl.constexpr(None) if keys is None else keys
        self.queries = gl.constexpr(None) if queries is None else queries
        self.first_term = gl.constexpr(None) if first_term is None else first_term

    @gluon.jit
    def batch(self):
        """Where it lies in the tensors."""
        if self.keys is None:
            return self.sequence
        else:
            return gl.to_tensor(0)

    @gluon.jit
    def row_of_key(self, key):
        """In the tensors, of a key of the sequence."""
        if self.keys is None:
            return key
        else:
            return self.keys.first + key

    @gluon.jit
    def row_of_query(self, query):
        if self.queries is None:
            return query
        else:
            return self.queries.first + query

    @gluon.jit
    def rows_of_queries(self, call):
        """How many rows dQ has of the sequence."""
        if self.queries is None:
            return call.q_len
        else:
            return self.queries.length

    @gluon.jit
    def rows_of_keys(self, call):
        """How many rows dK and dV have of the sequence."""
        if self.keys is None:
            return call.capacity
        else:
            return self.keys.length


@gluon.jit
def key_blocks(call):
    """Of a head."""
    if call.cu_seqlens_k is not None:
        return call.capacity // call.KEYS + call.sequences + 2
    else:
        return (call.capacity + call.KEYS - 1) // call.KEYS


@gluon.jit
def key_tiles(call):
    """Of a call, whose `heads` are KV heads here."""
    if call.cu_seqlens_k is not None:
        return key_blocks(call) * call.heads
    else:
        return key_blocks(call) * call.sequences * call.heads


@gluon.jit
def key_tile_of(number, call):
    blocks = key_blocks(call)
    each = call.section * blocks
    section = number // each
    number -= section * each
    all_heads = call.sequences * call.heads
    if call.cu_seqlens_k is not None:
        all_heads = call.heads
    heads = gl.minimum(call.section, all_heads - section * call.section)
    block = number // heads
    head = section * call.section + number - block * heads
    if call.cu_seqlens_k is not None:
        begun = begun_before(block, call.cu_seqlens_k, call.sequences, call.capacity, call.KEYS)
        keys = span(call.cu_seqlens_k, begun - 1, call.sequences, call.capacity)
        queries = span(call.cu_seqlens_q, begun - 1, call.sequences, call.q_len)
        first_term = first_term_of(queries, begun)
        block = block - (keys.first // call.KEYS + begun)
        # Lengths that do not grow have blocks before their first: none of theirs, then.
        block = gl.where(block < 0, call.capacity // call.KEYS + 1, block)
        # Those of no sequence have neither keys nor queries, and read the entries of another one.
        owned = ((begun > 0) & (begun <= call.sequences)).to(gl.int32)
        kv_len = owned * keys.length
        queries = Span(queries.first, owned * queries.length)
        q_len = queries.length
        sequence = gl.minimum(gl.maximum(begun - 1, 0), call.sequences - 1)
    else:
        keys: gl.constexpr = None
        queries: gl.constexpr = None
        first_term: gl.constexpr = None
        sequence = head // call.heads
        kv_len = call.capacity
        q_len = call.q_len
    first = block * call.KEYS
    if call.kv_lens is not None:
        given = gl.load(call.kv_lens + sequence).to(gl.int64)
        kv_len = gl.minimum(gl.maximum(given, 0), kv_len).to(gl.int32)
    offset = kv_len - q_len
    if call.q_start is not None:
        offset = position_at(call.q_start + sequence)
        if call.kv_start is not None:
            offset -= position_at(call.kv_start + sequence)
    low = gl.to_tensor(0)
    high = q_len
    if call.HAS_RIGHT:
        low = gl.maximum(first - call.right - offset, 0)
    if call.HAS_LEFT:
        high = gl.minimum(high, first + call.KEYS + call.left - offset)
    last = q_len - 1
    if call.cu_seqlens_k is not None:
        last = gl.maximum(last, 0)
    begin = gl.minimum(low, last) // QUERIES
    end = gl.maximum((high + QUERIES - 1) // QUERIES, begin + 1)
    if call.cu_seqlens_k is None:
        head -= sequence * call.heads
    return KeyTile(sequence, head, first, kv_len, offset, begin, end, keys, queries, first_term)


@gluon.jit
def first_term_of(queries, begun):
    """Where rows of lse2, delta and sums of dQ of a packed sequence begin among a head's; begun: sequences, it included."""
    return (queries.first // PADDING + begun) * PADDING


@gluon.jit
def padded_row(tile, head, row, call):
    """Where lse2, delta and sums of dQ of a tile's row lie: each head's are padded, and each packed sequence's.

    head: of query heads, those of all sequences unless they are packed.
    """
    if tile.first_term is not None:
        padded = (call.q_len // PADDING + call.sequences + 2) * PADDING
        return head * padded + tile.first_term + row
    else:
        padded = (call.q_len + PADDING - 1) // PADDING * PADDING
        return head * padded + row


@gluon.jit
def padded_row_of(tile, head, block, call):
    """The same, of a block of queries of a query head; the call's heads are KV heads."""
    of_sequence = 0
    if tile.first_term is None:
        of_sequence = tile.sequence * call.heads * call.group
    return padded_row(tile, of_sequence + head, block * QUERIES, call)


@gluon.jit
def write_key_tile(tile, end, buffer, slot, LAYOUT: gl.constexpr):
    """`end`, 0 for a tile that there is not, in place of the tile's own."""
    fields = (end, tile.begin, tile.first, tile.kv_len, tile.offset, tile.kv_head, tile.sequence)
    if tile.keys is not None:
        fields = fields + (  # noqa: RUF005 -- Triton knows no unpacking
            tile.keys.first, tile.keys.length, tile.queries.first, tile.queries.length, tile.first_term,
        )  # fmt: skip
    for i in gl.static_range(len(fields)):
        buffer.index(slot * len(fields) + i).store(gl.full([1], fields[i], gl.int32, LAYOUT))


@gluon.jit
def read_key_tile(buffer, slot, call, LAYOUT: gl.constexpr):
    if call.cu_seqlens_k is not None:
        ALL: gl.constexpr = FIELDS_OF_PACKED
        keys = Span(read_field(buffer, slot, 7, ALL, LAYOUT), read_field(buffer, slot, 8, ALL, LAYOUT))  # fmt: skip
        queries = Span(read_field(buffer, slot, 9, ALL, LAYOUT), read_field(buffer, slot, 10, ALL, LAYOUT))  # fmt: skip
        first_term = read_field(buffer, slot, 11, ALL, LAYOUT)
    else:
        ALL: gl.constexpr = FIELDS
        keys: gl.constexpr = None
        queries: gl.constexpr = None
        first_term: gl.constexpr = None
    return KeyTile(
        sequence=read_field(buffer, slot, 6, ALL, LAYOUT),
        kv_head=read_field(buffer, slot, 5, ALL, LAYOUT),
        first=read_field(buffer, slot, 2, ALL, LAYOUT),
        kv_len=read_field(buffer, slot, 3, ALL, LAYOUT),
        offset=read_field(buffer, slot, 4, ALL, LAYOUT),
        begin=read_field(buffer, slot, 1, ALL, LAYOUT),
        end=read_field(buffer, slot, 0, ALL, LAYOUT),
        keys=keys,
        queries=queries,
        first_term=first_term,
    )
