"""The loading warp of Hopper's forward: it fills the slots (`slots.py`) in the order in which they are emptied."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_fdattn.ops.attention.hopper.pipeline import place_of
from torch_fdattn.ops.attention.hopper.rows import ROWS
from torch_fdattn.ops.attention.hopper.slots import GROUPS, SLOTS, own_place
from torch_fdattn.ops.attention.hopper.tiles import take, tile_of

_ONE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def load(slots, q_blocks, k_blocks, v_blocks, counter, call):
    """Of one warp: hands tile numbers over, and fills the slots in the order in which they are emptied."""
    tiles = call.tiles()
    number = gl.program_id(0)
    turn = gl.to_tensor(0)
    step = gl.to_tensor(0)
    corner_of_values = [gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0), 0]
    while number < tiles:
        following = take(counter, tiles)
        place = place_of(turn, SLOTS)
        slots.has_number.wait_empty(place)
        slots.numbers.index(place.slot).store(gl.full([1], following, gl.int32, _ONE))
        slots.has_number.hand_over(place)

        tile = tile_of(number, call)
        for i in range(tile.end - tile.begin):
            first_key = tile.keys.first + (tile.end - 1 - i) * call.KEYS
            corner = [tile.batch, tile.head // call.group, first_key, 0]
            _load_keys(slots, k_blocks, v_blocks, corner, step)
            if step > 0:
                _load_values(slots, v_blocks, corner_of_values, step, True)
            # After the last values of the tile before, without which no queries are released.
            if i == 0:
                _load_queries(slots, q_blocks, tile, turn)
            corner_of_values = corner
            step += 1
        number = following
        turn += 1
    _load_values(slots, v_blocks, corner_of_values, step, False)


@gluon.jit
def _load_keys(slots, k_blocks, v_blocks, corner, step):
    """Of a step that has keys: of the whole step, where its values lie beside them."""
    K_BYTES: gl.constexpr = k_blocks.block_type.nbytes
    V_BYTES: gl.constexpr = v_blocks.block_type.nbytes
    place = place_of(step, SLOTS)
    slots.has_keys.wait_empty(place)
    if slots.TOGETHER:
        slots.has_keys.expect(place, K_BYTES, step == 0)
        slots.has_keys.expect(place, K_BYTES + V_BYTES, step > 0)
    else:
        slots.has_keys.expect(place, K_BYTES)
    slots.has_keys.fill(k_blocks, corner, slots.k.index(place.slot), place)


@gluon.jit
def _load_values(slots, v_blocks, corner, step, HAS_KEYS: gl.constexpr):
    """Of a step, whether or not it has keys: the block before its keys."""
    place = slots.place_of_values(step)
    if not (slots.TOGETHER and HAS_KEYS):
        slots.has_values.wait_empty(place)
        slots.has_values.expect(place, v_blocks.block_type.nbytes)
    slots.has_values.fill(v_blocks, corner, slots.v.index(place.slot), place)


@gluon.jit
def _load_queries(slots, q_blocks, tile, turn):
    for i in gl.static_range(GROUPS):
        place = own_place(i, turn, slots.q.shape[0] // GROUPS)
        slots.has_queries.wait_empty(place)
        slots.has_queries.expect(place, q_blocks.block_type.nbytes)
        corner = [tile.batch, tile.head, tile.queries.first + tile.row + i * ROWS, 0]
        slots.has_queries.fill(q_blocks, corner, slots.q.index(place.slot), place)
