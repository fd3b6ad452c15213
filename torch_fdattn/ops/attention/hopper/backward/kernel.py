"""Attention backward on Hopper: one sweep over blocks of queries for each tile of keys, five products a step.

Keys are rows of all scores: Sᵀ = K Qᵀ and dPᵀ = V dOᵀ stay in registers, where Pᵀ and dSᵀ are left operands of
dV += Pᵀ dO and dK += dSᵀ Q. dSᵀ goes to shared memory too, of both warp groups, and dQ = dS K is made of it a step later, so
that no warp group waits for the other: each makes half of dQ's columns, which the storing warp (`storing.py`) adds to
float32 sums in memory, as those of other programs do (`sums.py`). In the ordered form `sums` is None, steps have four
products, and dQ has a launch of its own (`one_gradient.py`).

Where ALiBi's slopes want a gradient, -Σ dS · distance, each warp of a tile leaves its part of each head's in `slope_sums`.

Shapes: q, dout (B, H, M, D), k, v, dk, dv (B, H_kv, N, D), by descriptors of four dims; lse2 and delta: fp32 of all rows, each
head's padded, and each packed sequence's; sums: fp32, as many rows, in rows of 256 numbers; slope_sums: fp32
(B, H, tiles of keys, warp groups, warps). D is 64 or 128; bfloat16 or float16.

A block of queries of a packed sequence may end with rows of the next one, whatever these hold: NaN as well. They are zeros
in shared memory, and see no key.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_fdattn.ops.attention.hopper.backward.loading import load
from torch_fdattn.ops.attention.hopper.backward.scores import hide, product
from torch_fdattn.ops.attention.hopper.backward.slots import (
    ONE_OF_GROUP,
    SLOTS,
    next_tile,
    slots_of,
)
from torch_fdattn.ops.attention.hopper.backward.storing import hand_over, store_sums
from torch_fdattn.ops.attention.hopper.backward.sums import opaque_zero, store_warp_sums
from torch_fdattn.ops.attention.hopper.backward.tiles import GROUPS, QUERIES, key_blocks
from torch_fdattn.ops.attention.hopper.pipeline import keep_first, place_of
from torch_fdattn.ops.attention.hopper.rows import ROWS, store_rows, thread_sum
from torch_fdattn.ops.attention.hopper.scores import TileScores, distances
from torch_fdattn.ops.attention.hopper.tiles import Call


@gluon.jit(do_not_specialize=[
    "q_len", "capacity", "sequences", "kv_heads", "group", "section", "left", "right",
    "slope_of_sequence", "slope_of_head",
])  # fmt: skip
def attention_backward_kernel(
    q_blocks, k_blocks, v_blocks, dout_blocks, lse2, delta, sums, dk_blocks, dv_blocks, dk, dv, counter,
    kv_lens, q_start, kv_start, cu_seqlens_q, cu_seqlens_k,
    q_len, capacity, sequences, kv_heads, group, section, left, right,
    scale, softcap, slopes, slope_of_sequence, slope_of_head, slope_sums,
    SUBS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    KEYS: gl.constexpr = GROUPS * SUBS * ROWS
    call = Call(kv_lens, q_start, kv_start, cu_seqlens_q, cu_seqlens_k, q_len, capacity, sequences, kv_heads, group, section, left, right,
                HAS_LEFT, HAS_RIGHT, QUERIES, KEYS)  # fmt: skip
    changes = TileScores(scale, None, None, None, softcap, slopes, slope_of_sequence, slope_of_head, None, None)  # fmt: skip
    slots = slots_of(q_blocks, lse2, sums, SUBS, cu_seqlens_q is not None)
    fence_async_shared()
    if slots.DQ:
        gl.warp_specialize([
            (_multiply, (slots, dk_blocks, dv_blocks, dk, dv, slope_sums, call, changes, RAGGED, 0)),
            (_multiply, (slots, dk_blocks, dv_blocks, dk, dv, slope_sums, call, changes, RAGGED, 1)),
            (load, (slots, q_blocks, k_blocks, v_blocks, dout_blocks, lse2, delta, counter, call)),
            (store_sums, (slots, sums, call)),
        ], [4, 1, 1], [240, 24, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (slots, dk_blocks, dv_blocks, dk, dv, slope_sums, call, changes, RAGGED, 0)),
            (_multiply, (slots, dk_blocks, dv_blocks, dk, dv, slope_sums, call, changes, RAGGED, 1)),
            (load, (slots, q_blocks, k_blocks, v_blocks, dout_blocks, lse2, delta, counter, call)),
        ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit
def _multiply(
    slots, dk_blocks, dv_blocks, dk_out, dv_out, slope_sums, call, changes, RAGGED: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """Of a warp group: SUBS blocks of 64 keys of each tile."""
    turn = gl.to_tensor(0)
    step = gl.to_tensor(0)
    tile = next_tile(slots, turn, call, ONE_OF_GROUP)
    while tile.end > 0:
        step = _sweep(tile, turn, step, slots, dk_blocks, dv_blocks, dk_out, dv_out, slope_sums, call, changes, RAGGED, GROUP)  # fmt: skip
        turn += 1
        tile = next_tile(slots, turn, call, ONE_OF_GROUP)
    tma.store_wait(0)


@gluon.jit
def _sweep(
    tile, turn, step, slots, dk_blocks, dv_blocks, dk_out, dv_out, slope_sums, call, changes, RAGGED: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """A tile: all blocks of queries that see its keys, of all heads of the group. Returns the number of the step after."""
    D: gl.constexpr = slots.q.shape[4]
    SUBS: gl.constexpr = slots.SUBS
    KEYS_BY_D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dk = ()
    dv = ()
    for _ in gl.static_range(SUBS):
        dk = dk + (gl.zeros([ROWS, D], gl.float32, KEYS_BY_D),)  # noqa: RUF005 -- Triton knows no unpacking
        dv = dv + (gl.zeros([ROWS, D], gl.float32, KEYS_BY_D),)  # noqa: RUF005
    count = tile.end - tile.begin
    first_head = tile.kv_head * call.group
    slots.has_keys.wait_full(place_of(turn, 1))
    slots.has_values.wait_full(place_of(turn, 1))
    # Of packed sequences, those of the next one follow.
    if call.kv_lens is not None or tile.keys is not None:
        for sub in gl.static_range(SUBS):
            inside = tile.kv_len - tile.first - (GROUP * SUBS + sub) * ROWS
            if inside < ROWS:
                keep_first(slots.k.index(GROUP * SUBS + sub).reshape([ROWS, D]), inside)
                keep_first(slots.v.index(GROUP * SUBS + sub).reshape([ROWS, D]), inside)
    slots.has_queries.wait_full(place_of(step, SLOTS))
    scores = warpgroup_mma_wait(
        0, deps=(product(slots.k, GROUP * SUBS, slots.q, place_of(step, SLOTS).slot),)
    )
    unit = changes.unit(changes.scale)
    for member in range(call.group):
        slope = changes.slope_of(tile.sequence, first_head + member, unit)
        slope_sum = gl.to_tensor(0.0)
        if slope_sums is not None:
            SCORES: gl.constexpr = scores.type.layout
            slope_sum = thread_sum(gl.zeros([ROWS, QUERIES], gl.float32, SCORES))
        for i in range(count):
            here = tile.begin + i
            more = (member + 1 < call.group) | (i + 1 < count)
            later = (member > 0) | (i > 0)
            scores, dk, dv, slope_sum = _step(scores, dk, dv, slope_sum, step, here, more, later, tile, slots, call, changes, slope, RAGGED, GROUP)  # fmt: skip
            step += 1
        if slope_sums is not None:
            row = (tile.sequence * call.heads * call.group + first_head + member) * key_blocks(call)
            store_warp_sums(slope_sum, slope_sums, row + tile.first // call.KEYS, GROUP)
    slots.has_values.release(place_of(turn, 1))

    if slots.DQ:
        last = place_of(step - 1, SLOTS)
        slots.has_dscores.wait_full(last)
        dq = _dq(slots, last.slot, opaque_zero(step), GROUP)
        tma.store_wait(0)
        _store(dv, dv_out, dv_blocks, tile, slots, call, GROUP)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        slots.has_keys.release(place_of(turn, 1))
        slots.has_dscores.release(last)
        hand_over(dq, slots, step - 1, GROUP)
    else:
        slots.has_keys.release(place_of(turn, 1))
        tma.store_wait(0)
        _store(dv, dv_out, dv_blocks, tile, slots, call, GROUP)
    tma.store_wait(0)  # of dV, whose buffers dK takes
    scaled = ()
    for sub in gl.static_range(SUBS):
        scaled = scaled + (dk[sub] * changes.scale,)  # noqa: RUF005
    _store(scaled, dk_out, dk_blocks, tile, slots, call, GROUP)
    return step


@gluon.jit
def _step(
    scores, dk, dv, slope_sum, step, here, more, later, tile, slots, call, changes, slope, RAGGED: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """A block of queries, `here`, whose scores are there; dQ of the step before; and the scores of the next one.

    later: than the tile's first; dQ of a tile's last step is `_sweep`'s.
    """
    SUBS: gl.constexpr = slots.SUBS
    SCORES: gl.constexpr = scores.type.layout
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    D: gl.constexpr = slots.q.shape[4]
    place = place_of(step, SLOTS)
    unknown = opaque_zero(step)
    q = slots.q.index(place.slot).reshape([QUERIES, D])
    dout = slots.dout.index(place.slot).reshape([QUERIES, D])
    slots.has_dout.wait_full(place)
    if tile.queries is not None:
        inside = tile.queries.length - here * QUERIES
        if inside < QUERIES:
            keep_first(q, inside)
            keep_first(dout, inside)
    new_dk = ()
    new_dv = ()
    for sub in gl.static_range(SUBS):
        own = GROUP * SUBS + sub
        dp = product(slots.v, own + unknown, slots.dout, place.slot)
        capped = changes.capped(scores, changes.scale)
        # Distances are the same with keys as rows.
        key = tile.first + own * ROWS
        position = here * QUERIES + tile.offset
        scores = changes.biased(capped, slope, key, position)
        scores = hide(scores, key, here * QUERIES, tile, call, RAGGED, True)
        lse2 = slots.lse2.index(place.slot).load(gl.SliceLayout(0, SCORES))
        p = gl.exp2(scores * changes.unit(changes.scale) - gl.expand_dims(lse2, 0))
        # ptxas moves instructions within a basic block only, and would put the wait for dP before most exponentials.
        # Waiting for the slot of dS ends the block, or for what has been waited for.
        if slots.DQ:
            slots.has_dscores.wait_empty(place)
        else:
            slots.has_dout.wait_full(place)
        p_operand = gl.convert_layout(p.to(slots.q.dtype), OPERAND, assert_trivial=True)
        if changes.softcap is not None:
            slope_of_cap = changes.slope_of_cap(capped)
            if tile.queries is not None:
                # 0 for NaN, which the next sequence's queries may have given before they were zeros.
                slope_of_cap = gl.maximum(slope_of_cap, 0.0)
            p *= slope_of_cap
        delta = slots.delta.index(place.slot).load(gl.SliceLayout(0, SCORES))
        dp = warpgroup_mma_wait(0, deps=(dp,))
        added = warpgroup_mma(p_operand, dout, dv[sub], is_async=True)
        exact_dscores = p * (dp - gl.expand_dims(delta, 0))
        dscores = exact_dscores.to(slots.q.dtype)
        if slots.DQ:
            slots.dscores.index(place.slot * GROUPS * SUBS + own + unknown).store(dscores)
            fence_async_shared()
            if sub == SUBS - 1:
                slots.has_dscores.hand_over(place)
        operand = gl.convert_layout(dscores, OPERAND, assert_trivial=True)
        also_added = warpgroup_mma(operand, q, dk[sub], is_async=True)
        if slope_sum.type.is_block():
            # Plus 0, which ptxas does not know either: distances are computed anew, for there is no room to keep them.
            zero = gl.minimum(step, unknown)
            away = gl.abs(distances(exact_dscores, key - position + zero))
            slope_sum -= thread_sum(exact_dscores * away)
        if sub < SUBS - 1:
            scores = product(slots.k, own + 1 + unknown, slots.q, place.slot)
            scores, added, also_added, p_operand, operand = warpgroup_mma_wait(
                0, deps=(scores, added, also_added, p_operand, operand)
            )
        new_dk = new_dk + (also_added,)  # noqa: RUF005
        new_dv = new_dv + (added,)  # noqa: RUF005

    following = place_of(step + 1, SLOTS)  # the other slot, which the step before had, too
    if slots.DQ:
        slots.has_dscores.wait_full(place_of(step - 1, SLOTS), later)
        dq = _dq(slots, following.slot, unknown, GROUP)
        waited = warpgroup_mma_wait(GROUPS * SUBS, deps=(p_operand, operand) + new_dk + new_dv)  # noqa: RUF005
        slots.has_dout.release(place)
        slots.has_queries.release(place)
        slots.has_queries.wait_full(following, more)
        scores = product(slots.k, GROUP * SUBS + unknown, slots.q, following.slot)
        dq = warpgroup_mma_wait(1, deps=(dq,))
        if later:
            slots.has_dscores.release(place_of(step - 1, SLOTS))
            hand_over(dq, slots, step - 1, GROUP)
    else:
        # With slopes two blocks of keys leave too few registers for a product beside these: ptxas would let each one wait.
        OVERLAPS: gl.constexpr = SUBS == 1 or changes.slopes is None
        waited = (p_operand, operand) + new_dk + new_dv  # noqa: RUF005
        if not OVERLAPS:
            waited = warpgroup_mma_wait(0, deps=waited)
        slots.has_queries.wait_full(following, more)
        scores = product(slots.k, GROUP * SUBS + unknown, slots.q, following.slot)
        if OVERLAPS:
            waited = warpgroup_mma_wait(1, deps=waited)
        slots.has_dout.release(place)
        slots.has_queries.release(place)
    dk = waited[2 : 2 + SUBS]
    dv = waited[2 + SUBS :]
    scores = warpgroup_mma_wait(0, deps=(scores,))
    return scores, dk, dv, slope_sum


@gluon.jit
def _dq(slots, slot, unknown, GROUP: gl.constexpr):
    """This warp group's half of dQ's columns of a step: the sum over all keys of the tile, issued."""
    D: gl.constexpr = slots.k.shape[4]
    COLUMNS: gl.constexpr = D // GROUPS
    KEY_BLOCKS: gl.constexpr = slots.k.shape[0]
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    dq = gl.zeros([QUERIES, COLUMNS], gl.float32, DQ)
    for i in gl.static_range(KEY_BLOCKS):
        left = slots.dscores.index(slot * KEY_BLOCKS + i + unknown).permute((1, 0))
        right = slots.k.index(i + unknown).reshape([ROWS, D]).slice(GROUP * COLUMNS, COLUMNS, 1)
        dq = warpgroup_mma(left, right, dq, use_acc=i > 0, is_async=True)
    return dq


@gluon.jit
def _store(results, pointer, blocks, tile, slots, call, GROUP: gl.constexpr):
    """A warp group's rows of dK or dV."""
    D: gl.constexpr = slots.q.shape[4]
    # float32 has no buffer, and of packed sequences a block's copy would end in the next one.
    DIRECT: gl.constexpr = blocks.dtype == gl.float32
    for sub in gl.static_range(slots.SUBS):
        own = GROUP * slots.SUBS + sub
        first = tile.first + own * ROWS
        row = tile.row_of_key(first)
        found = results[sub].to(blocks.dtype)
        there = tile.rows_of_keys(call)
        if DIRECT or (tile.keys is not None and first + ROWS > there):
            rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, found.type.layout))
            store_rows(found, pointer, blocks, tile.batch(), tile.kv_head, row, 0, rows < there)
        else:
            slots.results.index(own).reshape([ROWS, D]).store(found)
            fence_async_shared()
            corner = [tile.batch(), tile.kv_head, row, 0]
            tma.async_copy_shared_to_global(blocks, corner, slots.results.index(own))
