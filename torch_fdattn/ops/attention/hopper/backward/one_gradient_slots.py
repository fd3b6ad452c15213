"""What a warp loads and two warp groups read where a launch makes one gradient (`one_gradient.py`)."""
# Without `from __future__ import annotations`: aggregates ask for the types of their fields.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from torch_fdattn.ops.attention.hopper.backward.slots import SLOTS
from torch_fdattn.ops.attention.hopper.backward.tiles import (
    FIELDS,
    FIELDS_OF_PACKED,
    GROUPS,
    KeyTile,
    first_term_of,
    key_tile_of,
    key_tiles,
    padded_row_of,
    read_key_tile,
    write_key_tile,
)
from torch_fdattn.ops.attention.hopper.pipeline import Ring, blocks_of, place_of, ring
from torch_fdattn.ops.attention.hopper.rows import ROWS
from torch_fdattn.ops.attention.hopper.tiles import take, tile_of

_ONE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@aggregate
class GradientSlots:
    """Rows lie in blocks of 64, one of each warp group; a slot has a block of columns, with lse2 and delta where these are queries."""

    tiles: gl.shared_memory_descriptor
    rows: gl.shared_memory_descriptor
    other_rows: gl.shared_memory_descriptor
    columns: gl.shared_memory_descriptor
    other_columns: gl.shared_memory_descriptor
    lse2: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    has_tile: Ring
    has_rows: Ring  # one slot
    has_other_rows: Ring  # one slot
    has_columns: Ring
    has_other_columns: Ring
    OTHER_SLOTS: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, tiles, rows, other_rows, columns, other_columns, lse2, delta, has_tile, has_rows, has_other_rows,
        has_columns, has_other_columns, OTHER_SLOTS,
    ):  # fmt: skip
        self.tiles = tiles
        self.rows = rows
        self.other_rows = other_rows
        self.columns = columns
        self.other_columns = other_columns
        self.lse2 = lse2
        self.delta = delta
        self.has_tile = has_tile
        self.has_rows = has_rows
        self.has_other_rows = has_other_rows
        self.has_columns = has_columns
        self.has_other_columns = has_other_columns
        self.OTHER_SLOTS = gl.constexpr(OTHER_SLOTS)


@gluon.jit
def gradient_slots_of(
    blocks, column_blocks, rows_of_terms, GRADIENT: gl.constexpr, PACKED: gl.constexpr
):
    # Above head dim 128 what dP needs of rows takes the room of a second slot of what it needs of columns.
    OTHER_SLOTS: gl.constexpr = (
        SLOTS if GRADIENT == "dv" or blocks.block_type.shape[3] <= 128 else 1
    )
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    FIELDS_OF_TILE: gl.constexpr = FIELDS_OF_PACKED if PACKED else FIELDS
    tiles = gl.allocate_shared_memory(gl.int32, [SLOTS * FIELDS_OF_TILE, 1], layout)
    rows = blocks_of(blocks, GROUPS)
    has_rows = ring(1, GROUPS)
    other_rows = rows
    has_other_rows = has_rows
    if GRADIENT != "dv":
        other_rows = blocks_of(blocks, GROUPS)
        has_other_rows = ring(1, GROUPS)
    return GradientSlots(
        tiles, rows, other_rows, blocks_of(column_blocks, SLOTS), blocks_of(column_blocks, OTHER_SLOTS),
        blocks_of(rows_of_terms, SLOTS), blocks_of(rows_of_terms, SLOTS),
        ring(SLOTS, GROUPS), has_rows, has_other_rows, ring(SLOTS, GROUPS), ring(OTHER_SLOTS, GROUPS),
        OTHER_SLOTS,
    )  # fmt: skip


@gluon.jit
def load(
    slots, row_blocks, other_row_blocks, column_blocks, other_column_blocks, lse2, delta, counter, call,
    GRADIENT: gl.constexpr,
):  # fmt: skip
    """Of one warp."""
    OF_QUERIES: gl.constexpr = GRADIENT == "dq"
    BYTES: gl.constexpr = column_blocks.block_type.nbytes
    turn = gl.to_tensor(0)
    step = gl.to_tensor(0)
    _hand_over(slots, gl.program_id(0), turn, counter, call, OF_QUERIES)
    tile = read_key_tile(slots.tiles, place_of(turn, SLOTS).slot, call, _ONE)
    while tile.end > 0:
        count = tile.end - tile.begin
        steps = count
        head = tile.kv_head // call.group
        if not OF_QUERIES:
            steps = call.group * count
        _load_rows(slots.has_rows, slots.rows, row_blocks, tile, turn, OF_QUERIES)
        for i in range(steps):
            block = tile.begin + i % count
            if not OF_QUERIES:
                head = tile.kv_head * call.group + i // count
            place = place_of(step, SLOTS)
            slots.has_columns.wait_empty(place)
            if OF_QUERIES:
                slots.has_columns.expect(place, BYTES)
            else:
                slots.has_columns.expect(place, BYTES + 2 * lse2.block_type.nbytes)
                row = padded_row_of(tile, head, block, call)
                slots.has_columns.fill(lse2, [row], slots.lse2.index(place.slot), place)
                slots.has_columns.fill(delta, [row], slots.delta.index(place.slot), place)
            first = block * column_blocks.block_type.shape[2]
            if OF_QUERIES:
                first = tile.row_of_key(first)
            corner = [tile.batch(), head, first, 0]
            slots.has_columns.fill(column_blocks, corner, slots.columns.index(place.slot), place)
            if GRADIENT != "dv":  # noqa: SIM102 -- the first is known to the compiler
                if i == 0:
                    _load_rows(slots.has_other_rows, slots.other_rows, other_row_blocks, tile, turn, OF_QUERIES)  # fmt: skip
            other = place_of(step, slots.OTHER_SLOTS)
            slots.has_other_columns.wait_empty(other)
            slots.has_other_columns.expect(other, BYTES)
            slots.has_other_columns.fill(
                other_column_blocks, corner, slots.other_columns.index(other.slot), other
            )
            step += 1
        # Only when all loads are under way, as in `loading.py`.
        turn += 1
        tiles = call.tiles() if OF_QUERIES else key_tiles(call)
        _hand_over(slots, take(counter, tiles), turn, counter, call, OF_QUERIES)
        tile = read_key_tile(slots.tiles, place_of(turn, SLOTS).slot, call, _ONE)


@gluon.jit
def _load_rows(ring, buffers, blocks, tile, turn, OF_QUERIES: gl.constexpr):
    place = place_of(turn, 1)
    ring.wait_empty(place)
    ring.expect(place, GROUPS * blocks.block_type.nbytes)
    for i in gl.static_range(GROUPS):
        first = tile.first + i * ROWS
        if OF_QUERIES:
            first = tile.row_of_query(first)
        ring.fill(blocks, [tile.batch(), tile.kv_head, first, 0], buffers.index(i), place)


@gluon.jit
def _hand_over(slots, number, turn, counter, call, OF_QUERIES: gl.constexpr):
    """The tile of this number, or of the next one that has rows, if there is one."""
    if OF_QUERIES:
        tiles = call.tiles()
        found = tile_of(gl.minimum(number, tiles - 1), call)
        if call.cu_seqlens_q is not None:
            while (number < tiles) & (found.row >= found.queries.length):
                number = take(counter, tiles)
                found = tile_of(gl.minimum(number, tiles - 1), call)
        tile = _with_queries_as_rows(found, call)
    else:
        tiles = key_tiles(call)
        tile = key_tile_of(gl.minimum(number, tiles - 1), call)
    place = place_of(turn, SLOTS)
    slots.has_tile.wait_empty(place)
    write_key_tile(tile, gl.where(number < tiles, tile.end, 0), slots.tiles, place.slot, _ONE)
    slots.has_tile.hand_over(place)


@gluon.jit
def _with_queries_as_rows(tile, call):
    """The forward's tile with the fields of one of keys: of a query head, `first` and what follows count queries and keys."""
    keys: gl.constexpr = None
    queries: gl.constexpr = None
    first_term: gl.constexpr = None
    if call.cu_seqlens_q is not None:
        keys = tile.keys
        queries = tile.queries
        first_term = first_term_of(queries, tile.sequence + 1)
    return KeyTile(tile.sequence, tile.head, tile.row, tile.keys.length, tile.offset, tile.begin, tile.end, keys, queries, first_term)  # fmt: skip
