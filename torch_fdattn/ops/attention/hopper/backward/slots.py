"""Where Hopper's backward keeps in shared memory what its warps hand to each other.

A step has a block of queries, with their gradients of out, and all keys of the tile.
"""
# Without `from __future__ import annotations`: aggregates ask for the types of their fields.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from torch_fdattn.ops.attention.hopper.backward.tiles import (
    FIELDS,
    FIELDS_OF_PACKED,
    GROUPS,
    QUERIES,
    read_key_tile,
)
from torch_fdattn.ops.attention.hopper.pipeline import Place, Ring, blocks_of, place_of, ring
from torch_fdattn.ops.attention.hopper.rows import ROWS

#: One number, in each thread of a warp group.
ONE_OF_GROUP = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
SLOTS = gl.constexpr(2)  #: of all that a step has, and of tiles


@aggregate
class BackwardSlots:
    """Keys and values lie in blocks of 64, SUBS of each warp group; gradients of scores have keys as rows."""

    tiles: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor
    dout: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    lse2: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    dscores: gl.shared_memory_descriptor  # where there is DQ
    sums: (
        gl.shared_memory_descriptor
    )  # of dQ, on their way to memory: each warp group's columns; where there is DQ
    results: gl.shared_memory_descriptor  # dK and dV, on their way to memory
    has_tile: Ring
    has_queries: Ring  # with their lse2 and delta
    has_dout: Ring
    has_keys: Ring  # one slot
    has_values: Ring  # one slot
    has_dscores: Ring  # where there is DQ
    has_sums: Ring  # a slot of each warp group; where there is DQ
    SUBS: gl.constexpr
    DQ: gl.constexpr  # whether steps make dQ, too

    @gluon.constexpr_function
    def __init__(
        self, tiles, q, dout, k, v, lse2, delta, dscores, sums, results, has_tile, has_queries, has_dout,
        has_keys, has_values, has_dscores, has_sums, SUBS, DQ,
    ):  # fmt: skip
        self.tiles = tiles
        self.q = q
        self.dout = dout
        self.k = k
        self.v = v
        self.lse2 = lse2
        self.delta = delta
        self.dscores = dscores
        self.sums = sums
        self.results = results
        self.has_tile = has_tile
        self.has_queries = has_queries
        self.has_dout = has_dout
        self.has_keys = has_keys
        self.has_values = has_values
        self.has_dscores = has_dscores
        self.has_sums = has_sums
        self.SUBS = gl.constexpr(SUBS)
        self.DQ = gl.constexpr(DQ)


@gluon.jit
def slots_of(q_blocks, rows_of_terms, sums, SUBS: gl.constexpr, PACKED: gl.constexpr):
    KEY_BLOCKS: gl.constexpr = GROUPS * SUBS
    dtype: gl.constexpr = q_blocks.dtype
    FIELDS_OF_TILE: gl.constexpr = FIELDS_OF_PACKED if PACKED else FIELDS
    TILES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    DSCORES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    DQ: gl.constexpr = sums is not None
    q = blocks_of(q_blocks, SLOTS)
    has_queries = ring(SLOTS, GROUPS)
    # What no warp uses must not be made (`pipeline.ring`), but has to be something.
    dscores = q
    buffer_of_sums = q
    has_dscores = has_queries
    has_sums = has_queries
    if DQ:
        dscores = gl.allocate_shared_memory(dtype, [SLOTS * KEY_BLOCKS, ROWS, QUERIES], DSCORES)
        buffer_of_sums = blocks_of(sums, GROUPS)
        has_dscores = ring(SLOTS, GROUPS, GROUPS)
        has_sums = ring(GROUPS, 1)
    return BackwardSlots(
        gl.allocate_shared_memory(gl.int32, [SLOTS * FIELDS_OF_TILE, 1], TILES),
        q,
        blocks_of(q_blocks, SLOTS),
        blocks_of(q_blocks, KEY_BLOCKS),
        blocks_of(q_blocks, KEY_BLOCKS),
        blocks_of(rows_of_terms, SLOTS),
        blocks_of(rows_of_terms, SLOTS),
        dscores,
        buffer_of_sums,
        blocks_of(q_blocks, KEY_BLOCKS),
        ring(SLOTS, GROUPS + 1 if DQ else GROUPS),  # the storing warp walks through them, too
        has_queries,
        ring(SLOTS, GROUPS),
        ring(1, GROUPS),
        ring(1, GROUPS),
        has_dscores,
        has_sums,
        SUBS,
        DQ,
    )


@gluon.jit
def place_of_sums(GROUP: gl.constexpr, step):
    """A warp group's, which it fills once a step."""
    return Place(gl.to_tensor(GROUP), step & 1)


@gluon.jit
def next_tile(slots, turn, call, LAYOUT: gl.constexpr):
    place = place_of(turn, SLOTS)
    slots.has_tile.wait_full(place)
    tile = read_key_tile(slots.tiles, place.slot, call, LAYOUT)
    slots.has_tile.release(place)
    return tile
