"""One gradient of attention on Hopper: a program keeps 128 rows of it, and sweeps over what it sums.

    dQ = Σ dS K over keys,    dK = Σ dSᵀ Q over queries,    dV = Σ Pᵀ dO over queries

No sums in memory, no zeros before and no conversion after, and the same bits on every run. Of dQ in the ordered form, where
dK and dV come from `kernel.py`: seven products in place of five. Above head dim 128 of all three, eight in place of five: dK
and dV of 64 keys would fill the registers of both warp groups there, and sums of dQ in memory would be twice as many for a
product as at head dim 128.

Rows are what the gradient has, queries or keys, and columns what it sums over. `rows` and `columns` make scores, QKᵀ or its
transpose, `other_rows` and `other_columns` dP:

    gradient | rows  other_rows  columns  other_columns
    dq       | Q     dO          K        V
    dk       | K     V           Q        dO
    dv       | K     not read    Q        dO

Shapes: (B, H or H_kv, M or N, D) by descriptors of four dims, D up to 256; lse2 and delta: fp32 of all queries, each head's
padded, and each packed sequence's. bfloat16 or float16. Packed sequences: dQ alone, as their dK and dV are the sweep's; above
head dim 128 these are not built.

Where ALiBi's slopes want a gradient, -Σ dS · distance, each warp of a tile of "dq" leaves its part in `slope_sums`: fp32
(B, H, tiles of queries, warp groups, warps).
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

from torch_fdattn.ops.attention.hopper.backward.one_gradient_slots import gradient_slots_of, load
from torch_fdattn.ops.attention.hopper.backward.scores import hide, product
from torch_fdattn.ops.attention.hopper.backward.slots import ONE_OF_GROUP, SLOTS, next_tile
from torch_fdattn.ops.attention.hopper.backward.sums import opaque_zero, store_warp_sums
from torch_fdattn.ops.attention.hopper.backward.tiles import GROUPS, padded_row
from torch_fdattn.ops.attention.hopper.pipeline import keep_first, place_of
from torch_fdattn.ops.attention.hopper.rows import ROWS, store_rows, thread_sum
from torch_fdattn.ops.attention.hopper.scores import TileScores, distances
from torch_fdattn.ops.attention.hopper.tiles import Call


@gluon.jit(do_not_specialize=[
    "q_len", "capacity", "sequences", "heads", "group", "section", "left", "right",
    "slope_of_sequence", "slope_of_head",
])  # fmt: skip
def attention_gradient_kernel(
    row_blocks, other_row_blocks, column_blocks, other_column_blocks, lse2_blocks, delta_blocks, lse2, delta,
    out_blocks, out, counter, kv_lens, q_start, kv_start, cu_seqlens_q, cu_seqlens_k, q_len, capacity, sequences, heads, group, section, left, right,
    scale, softcap, slopes, slope_of_sequence, slope_of_head, slope_sums,
    GRADIENT: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """heads: of the gradient."""
    OF_QUERIES: gl.constexpr = GRADIENT == "dq"
    COLUMNS: gl.constexpr = column_blocks.block_type.shape[2]
    BLOCK: gl.constexpr = GROUPS * ROWS if OF_QUERIES else COLUMNS
    KEYS: gl.constexpr = COLUMNS if OF_QUERIES else GROUPS * ROWS
    call = Call(kv_lens, q_start, kv_start, cu_seqlens_q, cu_seqlens_k, q_len, capacity, sequences, heads, group, section, left, right,
                HAS_LEFT, HAS_RIGHT, BLOCK, KEYS)  # fmt: skip
    changes = TileScores(scale, None, None, None, softcap, slopes, slope_of_sequence, slope_of_head, None, None)  # fmt: skip
    slots = gradient_slots_of(
        row_blocks, column_blocks, lse2_blocks, GRADIENT, cu_seqlens_q is not None
    )
    fence_async_shared()
    gl.warp_specialize([
        (_multiply, (slots, lse2, delta, out_blocks, out, slope_sums, call, changes, GRADIENT, RAGGED, 0)),
        (_multiply, (slots, lse2, delta, out_blocks, out, slope_sums, call, changes, GRADIENT, RAGGED, 1)),
        (load, (slots, row_blocks, other_row_blocks, column_blocks, other_column_blocks, lse2_blocks, delta_blocks, counter,
                call, GRADIENT)),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit
def _multiply(
    slots, lse2, delta, out_blocks, out, slope_sums, call, changes, GRADIENT: gl.constexpr, RAGGED: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Of a warp group: 64 rows of each tile."""
    turn = gl.to_tensor(0)
    step = gl.to_tensor(0)
    tile = next_tile(slots, turn, call, ONE_OF_GROUP)
    while tile.end > 0:
        acc, step = _sum(tile, turn, step, slots, lse2, delta, slope_sums, call, changes, GRADIENT, RAGGED, GROUP)  # fmt: skip
        if GRADIENT != "dv":
            acc *= changes.scale
        if tile.queries is not None:  # noqa: SIM102 -- the first is known to the compiler
            if tile.kv_len == 0:  # what tokens of no sequence hold may be NaN, and 0 · NaN is
                acc = gl.zeros_like(acc)
        _write(acc, tile, slots, out_blocks, out, call, GRADIENT, GROUP)
        slots.has_rows.release(place_of(turn, 1))
        turn += 1
        tile = next_tile(slots, turn, call, ONE_OF_GROUP)


@gluon.jit
def _sum(
    tile, turn, step, slots, lse2, delta, slope_sums, call, changes, GRADIENT: gl.constexpr, RAGGED: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """A tile's gradient before it is scaled, and the number of the step after."""
    OF_QUERIES: gl.constexpr = GRADIENT == "dq"
    D: gl.constexpr = slots.rows.shape[4]
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    COLUMNS: gl.constexpr = slots.columns.shape[3]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    EACH_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    first = tile.first + GROUP * ROWS
    place = place_of(turn, 1)
    slots.has_rows.wait_full(place)
    row_lse2 = gl.full([ROWS], 0.0, gl.float32, EACH_ROW)
    row_delta = gl.full([ROWS], 0.0, gl.float32, EACH_ROW)
    members = gl.to_tensor(1)
    first_head = tile.kv_head
    if OF_QUERIES:
        head = tile.kv_head
        if tile.queries is None:
            head += tile.sequence * call.heads
        rows = padded_row(tile, head, first, call) + gl.arange(0, ROWS, layout=EACH_ROW)
        row_lse2 = gl.load(lse2 + rows)
        row_delta = gl.load(delta + rows)
    else:
        members = call.group
        first_head = tile.kv_head * call.group
    slots.has_columns.wait_full(place_of(step, SLOTS))
    scores = warpgroup_mma_wait(
        0, deps=(product(slots.rows, GROUP, slots.columns, place_of(step, SLOTS).slot),)
    )
    if GRADIENT != "dv":
        slots.has_other_rows.wait_full(place)
        if call.kv_lens is not None and not OF_QUERIES:  # noqa: SIM102 -- the first is known to the compiler
            if tile.kv_len - first < ROWS:
                keep_first(slots.other_rows.index(GROUP).reshape([ROWS, D]), tile.kv_len - first)
    acc = gl.zeros([ROWS, D], gl.float32, OUT)
    unit = changes.unit(changes.scale)
    count = tile.end - tile.begin
    slope_sum = gl.to_tensor(0.0)
    if slope_sums is not None:
        slope_sum = thread_sum(gl.zeros([ROWS, COLUMNS], gl.float32, SCORES))
    for member in range(members):
        slope = changes.slope_of(tile.sequence, first_head + member, unit)
        for i in range(count):
            more = (member + 1 < members) | (i + 1 < count)
            block = tile.begin + i
            scores, acc, slope_sum = _step(scores, acc, slope_sum, row_lse2, row_delta, step, block, more, first, tile, slots, call, changes, slope, GRADIENT, RAGGED, GROUP)  # fmt: skip
            step += 1
    if GRADIENT != "dv":
        slots.has_other_rows.release(place)
    if slope_sums is not None:  # of queries alone
        row = (tile.sequence * call.heads + tile.kv_head) * gl.cdiv(call.q_len, GROUPS * ROWS)
        store_warp_sums(slope_sum, slope_sums, row + tile.first // (GROUPS * ROWS), GROUP)
    return acc, step


@gluon.jit
def _step(
    scores, acc, slope_sum, row_lse2, row_delta, step, block, more, first, tile, slots, call, changes, slope,
    GRADIENT: gl.constexpr, RAGGED: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A block of columns, whose scores are there, and the scores of the next one."""
    OF_QUERIES: gl.constexpr = GRADIENT == "dq"
    D: gl.constexpr = slots.rows.shape[4]
    COLUMNS: gl.constexpr = slots.columns.shape[3]
    SCORES: gl.constexpr = scores.type.layout
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    place = place_of(step, SLOTS)
    other = place_of(step, slots.OTHER_SLOTS)
    unknown = opaque_zero(step)
    slots.has_other_columns.wait_full(other)
    if OF_QUERIES:
        _zero_beyond(slots.columns, place, block, tile, call)
        _zero_beyond(slots.other_columns, other, block, tile, call)
    if GRADIENT != "dv":
        dp = product(slots.other_rows, GROUP + unknown, slots.other_columns, other.slot)
    if OF_QUERIES:
        key, query = block * COLUMNS, first
        lse2 = gl.expand_dims(row_lse2, 1)
        delta = gl.expand_dims(row_delta, 1)
    else:
        key, query = first, block * COLUMNS
        lse2 = gl.expand_dims(slots.lse2.index(place.slot).load(gl.SliceLayout(0, SCORES)), 0)
    capped = changes.capped(scores, changes.scale)
    if OF_QUERIES:
        scores = changes.biased(capped, slope, query + tile.offset, key)
    else:
        scores = changes.biased(capped, slope, key, query + tile.offset)
    scores = hide(scores, key, query, tile, call, RAGGED, not OF_QUERIES)
    weights = gl.exp2(scores * changes.unit(changes.scale) - lse2)
    if GRADIENT == "dv":
        columns = slots.other_columns.index(other.slot).reshape([COLUMNS, D])
    else:
        columns = slots.columns.index(place.slot).reshape([COLUMNS, D])
        if changes.softcap is not None:
            slope_of_cap = changes.slope_of_cap(capped)
            if call.kv_lens is not None or tile.keys is not None:
                # 0 for NaN, which keys beyond the length may have given, whose weights are 0.
                slope_of_cap = gl.maximum(slope_of_cap, 0.0)
            weights *= slope_of_cap
        if not OF_QUERIES:
            delta = gl.expand_dims(slots.delta.index(place.slot).load(gl.SliceLayout(0, SCORES)), 0)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        slots.has_other_columns.release(other)
        weights *= dp - delta
        if slope_sum.type.is_block():
            # Plus 0, which ptxas does not know either, so that distances are computed anew and not kept.
            zero = gl.minimum(step, unknown)
            away = gl.abs(distances(weights, query + tile.offset - key + zero))
            slope_sum -= thread_sum(weights * away)
    weights = gl.convert_layout(weights.to(slots.rows.dtype), OPERAND, assert_trivial=True)
    added = warpgroup_mma(weights, columns, acc, is_async=True)
    following = place_of(step + 1, SLOTS)
    slots.has_columns.wait_full(following, more)
    scores = product(slots.rows, GROUP + unknown, slots.columns, following.slot)
    added, weights = warpgroup_mma_wait(1, deps=(added, weights))
    if GRADIENT == "dv":
        slots.has_other_columns.release(other)
    slots.has_columns.release(place)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    return scores, added, slope_sum


@gluon.jit
def _zero_beyond(columns, place, block, tile, call):
    """Keys or values beyond the length; behind those of a packed sequence come the next one's."""
    COLUMNS: gl.constexpr = columns.shape[3]
    if call.kv_lens is not None or tile.keys is not None:
        inside = tile.kv_len - block * COLUMNS
        if inside < COLUMNS:
            keep_first(columns.index(place.slot).reshape([COLUMNS, columns.shape[4]]), inside)


@gluon.jit
def _write(result, tile, slots, out_blocks, out, call, GRADIENT: gl.constexpr, GROUP: gl.constexpr):
    """Where the rows were, and from there to memory.

    float32 has no room there, and of packed sequences a block's copy would end in the next one.
    """
    first = tile.first + GROUP * ROWS
    found = result.to(out_blocks.dtype)
    there = call.capacity
    row = first
    if GRADIENT == "dq":
        there = tile.rows_of_queries(call)
        row = tile.row_of_query(first)
    DIRECT: gl.constexpr = out_blocks.dtype == gl.float32
    if DIRECT or (tile.queries is not None and first + ROWS > there):
        rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, found.type.layout))
        store_rows(found, out, out_blocks, tile.batch(), tile.kv_head, row, 0, rows < there)
    else:
        buffer = slots.rows.index(GROUP)
        buffer.reshape([ROWS, slots.rows.shape[4]]).store(found)
        fence_async_shared()
        tma.async_copy_shared_to_global(out_blocks, [tile.batch(), tile.kv_head, row, 0], buffer)
        tma.store_wait(0)
