"""The scheduling warp of Hopper's forward: it finds out what the next tile of a program is, while the others work on one.

It takes a number from the counter, and searches the first tokens of packed sequences: the loading warp would come late meanwhile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_fdattn.ops.attention.hopper.pipeline import place_of
from torch_fdattn.ops.attention.hopper.slots import SLOTS
from torch_fdattn.ops.attention.hopper.tiles import take, tile_of, write_tile

_ONE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def schedule(slots, counter, call):
    """Of one warp: tiles that have rows, one after the other; at the end one without keys says that there is none."""
    tiles = call.tiles()
    number = gl.program_id(0)
    turn = gl.to_tensor(0)
    more = gl.to_tensor(True)
    while more:
        place = place_of(turn, SLOTS)
        slots.has_tile.wait_empty(place)
        if turn > 0:
            number = take(counter, tiles)
        tile = tile_of(gl.minimum(number, tiles - 1), call)
        if call.cu_seqlens_q is not None:
            while (number < tiles) & (tile.row >= tile.queries.length):
                number = take(counter, tiles)
                tile = tile_of(gl.minimum(number, tiles - 1), call)
        more = number < tiles
        write_tile(tile, gl.where(more, tile.end, 0), slots.tiles, place.slot, _ONE)
        slots.has_tile.hand_over(place)
        turn += 1
