"""The storing warp of Hopper's backward: it adds what warp groups make of dQ to the sums in memory (`sums.py`).

Without `turns` tiles of keys add to a block of queries as they come. With it, in the ordered form, they add from the last
keys to the first, so that the sums have the same bits on every run: `turns` counts the tiles that have added to each block
of each query head. A tile waits for tiles of lower numbers alone (`tiles.py`), and programs that run take numbers upward:
of the tiles that are not done, the one of the lowest number waits for none.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from torch_fdattn.ops.attention.hopper.backward.slots import next_tile, place_of_sums
from torch_fdattn.ops.attention.hopper.backward.sums import add, by_threads
from torch_fdattn.ops.attention.hopper.backward.tiles import GROUPS, QUERIES, padded_row_of, rank_of
from torch_fdattn.ops.attention.hopper.pipeline import wait_for_group

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
def store_sums(slots, sums, turns, call):
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
            rank = rank_of(tile, block, call)
            # Before the sums are there: the other tiles have this long to add.
            if turns is not None:
                _wait_for_turn(turns + own, rank)
            for group in gl.static_range(GROUPS):
                slots.has_sums.wait_full(place_of_sums(group, step))
                add(slots.sums.index(group), sums, own, group)
            tma.store_wait(0)
            for group in gl.static_range(GROUPS):
                slots.has_sums.release(place_of_sums(group, step))
            if turns is not None:
                _end_turn(turns + own, rank)
            step += 1
        turn += 1
        tile = next_tile(slots, turn, call, _ONE)


@gluon.jit
def _wait_for_turn(turn, rank):
    """Until as many tiles as the rank have added."""
    while gl.atomic_add(turn, 0, sem="acquire") < rank:
        pass
    # Additions are accesses of another proxy, which what is acquired says nothing about (PTX ISA, async proxy). Of
    # global memory alone: a fence of all memory is a MEMBAR, which costs a sixth of the rate.
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [rank], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def _end_turn(turn, rank):
    """Says that this tile has added, when its sums are in memory, which is later than their buffers are read."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [rank], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
    wait_for_group()
    if rank >= 0:
        gl.atomic_add(turn, 1, sem="release")
