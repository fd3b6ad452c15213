"""The storing warp of Hopper's backward: it adds what warp groups make of dQ to the sums in memory (`sums.py`), as they come."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from torch_fdattn.ops.attention.hopper.backward.slots import next_tile, place_of_sums
from torch_fdattn.ops.attention.hopper.backward.sums import add, by_threads
from torch_fdattn.ops.attention.hopper.backward.tiles import GROUPS, QUERIES, padded_row_of

_ONE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def hand_over(dq, slots, step, GROUP: gl.constexpr):
    """A warp group's columns of dQ of a step."""
    place = place_of_sums(GROUP, step)
    slots.has_sums.wait_empty(place)
    slots.sums.index(GROUP).store(by_threads(dq))
    fence_async_shared()
    slots.has_sums.hand_over(place)


@gluon.jit
def store_sums(slots, sums, call):
    """Of one warp: the steps of all tiles, in the order in which the loading warp fills their slots."""
    turn = gl.to_tensor(0)
    step = gl.to_tensor(0)
    tile = next_tile(slots, turn, call, _ONE)
    while tile.end > 0:
        count = tile.end - tile.begin
        for i in range(call.group * count):
            head = tile.kv_head * call.group + i // count
            block = tile.begin + i % count
            own = padded_row_of(tile, head, block, call) // QUERIES
            for group in gl.static_range(GROUPS):
                slots.has_sums.wait_full(place_of_sums(group, step))
                add(slots.sums.index(group), sums, own, group)
            tma.store_wait(0)
            for group in gl.static_range(GROUPS):
                slots.has_sums.release(place_of_sums(group, step))
            step += 1
        turn += 1
        tile = next_tile(slots, turn, call, _ONE)
