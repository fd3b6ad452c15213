"""The loading warp of Hopper's backward: it fills the slots (`slots.py`) in the order in which they are emptied."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_fdattn.ops.attention.hopper.backward.slots import SLOTS
from torch_fdattn.ops.attention.hopper.backward.tiles import (
    GROUPS,
    QUERIES,
    key_tile_of,
    key_tiles,
    padded_row_of,
    read_key_tile,
    write_key_tile,
)
from torch_fdattn.ops.attention.hopper.pipeline import place_of
from torch_fdattn.ops.attention.hopper.rows import ROWS
from torch_fdattn.ops.attention.hopper.tiles import take

_ONE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def load(slots, q_blocks, k_blocks, v_blocks, dout_blocks, lse2, delta, counter, call):
    """Of one warp."""
    turn = gl.to_tensor(0)
    step = gl.to_tensor(0)
    _hand_over(slots, gl.program_id(0), turn, counter, call)
    tile = read_key_tile(slots.tiles, place_of(turn, SLOTS).slot, call, _ONE)
    while tile.end > 0:
        count = tile.end - tile.begin
        for i in range(call.group * count):
            head = tile.kv_head * call.group + i // count
            block = tile.begin + i % count
            _load_queries(slots, q_blocks, lse2, delta, tile, head, block, call, step)
            if i == 0:
                _load_keys(slots.has_values, slots.v, v_blocks, tile, turn, slots.SUBS)
            _load_dout(slots, dout_blocks, tile, head, block, step)
            if i == 0:
                _load_keys(slots.has_keys, slots.k, k_blocks, tile, turn, slots.SUBS)
            step += 1
        # Only when all loads are under way: a number that is taken early is one that a program which has nothing left
        # to do cannot have.
        turn += 1
        _hand_over(slots, take(counter, key_tiles(call)), turn, counter, call)
        tile = read_key_tile(slots.tiles, place_of(turn, SLOTS).slot, call, _ONE)


@gluon.jit
def _hand_over(slots, number, turn, counter, call):
    """The tile of this number, or of the next one that has keys; or says that there is none."""
    tiles = key_tiles(call)
    tile = key_tile_of(gl.minimum(number, tiles - 1), call)
    if tile.keys is not None:
        while (number < tiles) & (tile.first >= tile.keys.length):
            number = take(counter, tiles)
            tile = key_tile_of(gl.minimum(number, tiles - 1), call)
    place = place_of(turn, SLOTS)
    slots.has_tile.wait_empty(place)
    write_key_tile(tile, gl.where(number < tiles, tile.end, 0), slots.tiles, place.slot, _ONE)
    slots.has_tile.hand_over(place)


@gluon.jit
def _load_queries(slots, q_blocks, lse2, delta, tile, head, block, call, step):
    place = place_of(step, SLOTS)
    slots.has_queries.wait_empty(place)
    slots.has_queries.expect(place, q_blocks.block_type.nbytes + 2 * lse2.block_type.nbytes)
    corner = [tile.batch(), head, tile.row_of_query(block * QUERIES), 0]
    slots.has_queries.fill(q_blocks, corner, slots.q.index(place.slot), place)
    row = padded_row_of(tile, head, block, call)
    slots.has_queries.fill(lse2, [row], slots.lse2.index(place.slot), place)
    slots.has_queries.fill(delta, [row], slots.delta.index(place.slot), place)


@gluon.jit
def _load_dout(slots, dout_blocks, tile, head, block, step):
    place = place_of(step, SLOTS)
    slots.has_dout.wait_empty(place)
    slots.has_dout.expect(place, dout_blocks.block_type.nbytes)
    corner = [tile.batch(), head, tile.row_of_query(block * QUERIES), 0]
    slots.has_dout.fill(dout_blocks, corner, slots.dout.index(place.slot), place)


@gluon.jit
def _load_keys(ring, buffers, blocks, tile, turn, SUBS: gl.constexpr):
    """Or values."""
    place = place_of(turn, 1)
    ring.wait_empty(place)
    ring.expect(place, GROUPS * SUBS * blocks.block_type.nbytes)
    for i in gl.static_range(GROUPS * SUBS):
        corner = [tile.batch(), tile.kv_head, tile.row_of_key(tile.first + i * ROWS), 0]
        ring.fill(blocks, corner, buffers.index(i), place)
