"""Attention forward on Hopper: two warp groups multiply and a warp loads, in one program for each SM.

The pipeline is FlashAttention-3's (arXiv:2407.08608): QK of a block of keys is issued before PV of the block before, so
that the softmax of one stands beside a product of the other. A program takes tile after tile (`tiles.py`); its loading
warp is ahead by a tile and two blocks of keys and values (`pipeline.py`).

Shapes: q (B, H, M, D), k and v (B, H_kv, N, D), out (B, H, M, D), by descriptors of four dims, any strides of which the
last is 1 and the others multiples of 16 bytes; lse (B, H, M). D is 64, 128 or 256; bfloat16 or float16.
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

from torch_fdattn.ops.attention.hopper.loading import load
from torch_fdattn.ops.attention.hopper.pipeline import blocks_of, place_of, wait_for_group
from torch_fdattn.ops.attention.hopper.rows import (
    MINUS_INFINITY,
    ROWS,
    as_column,
    halves,
    hide,
    joined,
    row_max,
    thread_sums,
)
from torch_fdattn.ops.attention.hopper.scores import Scores
from torch_fdattn.ops.attention.hopper.slots import GROUPS, SLOTS, own_place, slots_of
from torch_fdattn.ops.attention.hopper.tiles import Call, read_end, read_tile

_ONE_OF_GROUP = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit(do_not_specialize=[
    "q_len", "capacity", "sequences", "heads", "group", "section", "left", "right",
    "slope_of_sequence", "slope_of_head", "sink_of_head", "table_stride", "table_step",
])  # fmt: skip
def attention_forward_kernel(
    q_blocks, k_blocks, v_blocks, out_blocks, out, lse, counter, kv_lens, q_start, kv_start, cu_seqlens_q, cu_seqlens_k,
    q_len, capacity, sequences, heads, group, section, left, right,
    scale, softcap, slopes, slope_of_sequence, slope_of_head, sinks, sink_of_head,
    page_table, table_stride, table_step,
    KEYS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, RAGGED: gl.constexpr, Q_IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = q_blocks.block_type.shape[3]
    call = Call(kv_lens, q_start, kv_start, cu_seqlens_q, cu_seqlens_k, q_len, capacity, sequences, heads, group, section, left, right,
                HAS_LEFT, HAS_RIGHT, GROUPS * ROWS, KEYS)  # fmt: skip
    changes = Scores(scale, softcap, slopes, slope_of_sequence, slope_of_head, sinks, sink_of_head)
    Q_SLOTS: gl.constexpr = GROUPS if D > 128 else 2 * GROUPS
    slots = slots_of(q_blocks, Q_SLOTS, KEYS, D)
    if D > 128:  # no room for both
        outs = slots.q
    else:
        outs = blocks_of(out_blocks, GROUPS)
    fence_async_shared()
    gl.warp_specialize([
        (_multiply, (slots, outs, out_blocks, out, lse, call, changes, RAGGED, Q_IN_REGISTERS, 0)),
        (_multiply, (slots, outs, out_blocks, out, lse, call, changes, RAGGED, Q_IN_REGISTERS, 1)),
        (load, (slots, q_blocks, k_blocks, v_blocks, counter, call, page_table, table_stride, table_step)),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit
def _multiply(
    slots, outs, out_blocks, out, lse, call, changes,
    RAGGED: gl.constexpr, Q_IN_REGISTERS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Of a warp group: 64 rows of each tile.

    The first scores of a tile are issued before the results of the tile before are written.
    """
    KEYS: gl.constexpr = call.KEYS
    D: gl.constexpr = out_blocks.block_type.shape[3]
    SLOTS_OF_GROUP: gl.constexpr = slots.q.shape[0] // GROUPS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    turn = gl.to_tensor(0)
    step = gl.to_tensor(0)
    tile = _next_tile(slots, turn)
    own = own_place(GROUP, turn, SLOTS_OF_GROUP)
    q = _queries(slots, own, True, D, SCORES, Q_IN_REGISTERS)
    slots.has_keys.wait_full(place_of(step, SLOTS))
    scores = warpgroup_mma_wait(0, deps=(_scores(q, slots, step, D, SCORES),))
    while tile.end > 0:
        slots.has_keys.release(place_of(step, SLOTS))
        acc, p, top, sums = _attend(q, scores, tile, step, slots, call, changes, D, SCORES, OUT, RAGGED, GROUP)  # fmt: skip

        # A step of two tiles: PV of this one's last block, and QK of the next one's first.
        step += tile.end - tile.begin
        turn += 1
        place = place_of(turn, SLOTS)
        slots.has_tile.wait_full(place)
        more = read_end(slots.tiles, place.slot, _ONE_OF_GROUP) > 0
        row = tile.row + GROUP * ROWS
        slots.has_keys.wait_full(place_of(step, SLOTS), more | slots.TOGETHER)
        slots.wait_for_values(step)
        acc = _add_values(p, slots, step, acc, D)
        following_own = own_place(GROUP, turn, SLOTS_OF_GROUP)
        if SLOTS_OF_GROUP > 1:
            if not Q_IN_REGISTERS:
                slots.has_queries.release(own)
            q = _queries(slots, following_own, more, D, SCORES, Q_IN_REGISTERS)
            scores = _scores(q, slots, step, D, SCORES)
            acc, p, scores = warpgroup_mma_wait(1, deps=(acc, p, scores))
            slots.release_values(step)
            _finish(acc, top, sums, tile, row, outs.index(GROUP), out_blocks, out, lse, call, changes, D, SCORES)  # fmt: skip
        else:  # where results take the queries' place
            acc, p = warpgroup_mma_wait(0, deps=(acc, p))
            slots.release_values(step)
            _finish(acc, top, sums, tile, row, outs.index(GROUP), out_blocks, out, lse, call, changes, D, SCORES)  # fmt: skip
            tma.store_wait(0)
            slots.has_queries.release(own)
            q = _queries(slots, following_own, more, D, SCORES, Q_IN_REGISTERS)
            scores = _scores(q, slots, step, D, SCORES)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        own = following_own
        tile = _next_tile(slots, turn)
    tma.store_wait(0)


@gluon.jit
def _next_tile(slots, turn):
    place = place_of(turn, SLOTS)
    slots.has_tile.wait_full(place)
    tile = read_tile(slots.tiles, place.slot, _ONE_OF_GROUP)
    slots.has_tile.release(place)
    return tile


@gluon.jit
def _queries(slots, own, needed, D: gl.constexpr, SCORES: gl.constexpr, Q_IN_REGISTERS: gl.constexpr):  # fmt: skip
    """A warp group's queries of a tile, as a product takes them: whatever lies there where there is no such tile."""
    slots.has_queries.wait_full(own, needed)
    q = slots.q.index(own.slot).reshape([ROWS, D])
    if Q_IN_REGISTERS:
        held = q.load(gl.DotOperandLayout(0, SCORES, 2))
        slots.has_queries.release(own)
        return held
    else:
        return q


@gluon.jit
def _attend(
    q, scores, tile, step, slots, call, changes, D: gl.constexpr, SCORES: gl.constexpr,
    OUT: gl.constexpr, RAGGED: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """All of a tile but PV of its last block: its blocks of keys from right to left.

    scores: of the first one. Returns the sums of weighted values, the weights of the last block, rows' maxima, and what
    each thread has summed of the weights.
    """
    KEYS: gl.constexpr = call.KEYS
    EACH_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    unit = changes.unit()
    slope = changes.slope_of(tile)
    row = tile.row + GROUP * ROWS
    scores = changes.change(scores, slope, row + tile.offset, (tile.end - 1) * KEYS)
    if call.HAS_RIGHT or RAGGED:
        scores = hide(scores, tile, row, tile.end - 1, call, SCORES)
    top = row_max(scores, KEYS, EACH_ROW)
    weights = gl.exp2(scores * unit - as_column(_finite(top) * unit, scores))
    sums = thread_sums(weights, KEYS)
    p = gl.convert_layout(
        weights.to(slots.v.dtype), gl.DotOperandLayout(0, OUT, 2), assert_trivial=True
    )
    acc = gl.zeros([ROWS, D], gl.float32, OUT)
    count = tile.end - tile.begin
    slots.has_keys.wait_full(place_of(step + 1, SLOTS), count > 1)
    # Of packed sequences, those of the next one follow.
    if call.kv_lens is not None or call.cu_seqlens_q is not None:
        kept = tile.keys.length - (tile.end - 1) * KEYS
        if kept < KEYS:
            slots.has_values.wait_full(slots.place_of_values(step + 1))
            v = slots.v.index(slots.place_of_values(step + 1).slot).reshape([KEYS, D])
            _keep_first(v, kept, KEYS, D)
    seen_from, seen_to = _seen_by_all(tile, row, call)
    for i in range(1, count):
        block = tile.end - 1 - i
        hidden = (block < seen_from) | (block >= seen_to)
        acc, p, top, sums = _step(
            acc,
            p,
            top,
            sums,
            step + i,
            block,
            hidden,
            tile,
            row,
            q,
            slots,
            call,
            changes,
            unit,
            slope,
            D,
            SCORES,
        )
    return acc, p, top, sums


@gluon.jit
def _scores(q, slots, step, D: gl.constexpr, SCORES: gl.constexpr):
    """QK of a step, issued."""
    KEYS: gl.constexpr = slots.k.shape[3]
    k = slots.k.index(place_of(step, SLOTS).slot).reshape([KEYS, D]).permute((1, 0))
    return warpgroup_mma(
        q, k, gl.zeros([ROWS, KEYS], gl.float32, SCORES), use_acc=False, is_async=True
    )


@gluon.jit
def _add_values(p, slots, step, acc, D: gl.constexpr):
    """PV of a step, issued."""
    v = slots.v.index(slots.place_of_values(step).slot).reshape([slots.v.shape[3], D])
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def _keep_first(buffer, count, KEYS: gl.constexpr, D: gl.constexpr):
    """Zeros for all but the first rows of a block of values: what lies beyond a length may be NaN, and 0 · NaN is.

    The other warp group writes the same at the same time, or reads what is the same already.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    rows = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    found = buffer.load(LAYOUT)
    buffer.store(gl.where(gl.expand_dims(rows, 1) < count, found, gl.zeros_like(found)))
    fence_async_shared()
    wait_for_group()


@gluon.jit
def _finite(top):
    """Of a row that has seen no key so far: 0, for -inf - -inf is NaN."""
    return gl.where(top == MINUS_INFINITY, 0.0, top)


@gluon.jit
def _seen_by_all(tile, row, call):
    """(begin, end) of the blocks of whose keys each row of the warp group sees all."""
    begin = tile.begin
    if call.HAS_LEFT:
        begin = (
            gl.maximum(row + ROWS - 1 + tile.offset - call.left, 0) + call.KEYS - 1
        ) // call.KEYS
    end = tile.keys.length // call.KEYS
    if call.HAS_RIGHT:
        end = gl.minimum(end, gl.maximum(row + tile.offset + call.right + 1, 0) // call.KEYS)
    return begin, end


@gluon.jit
def _step(
    acc, p, top, sums, step, block, hidden, tile, row, q, slots, call, changes, unit, slope,
    D: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """QK of a block of keys, which have landed, beside PV of the block at its right.

    hidden: whether some row does not see some key of the block.
    """
    KEYS: gl.constexpr = call.KEYS
    EACH_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    scores = _scores(q, slots, step, D, SCORES)
    slots.wait_for_values(step)
    acc = _add_values(p, slots, step, acc, D)
    # Waits for QK alone. p among what is waited for: ptxas may else give its registers away while PV reads them.
    scores, acc, p = warpgroup_mma_wait(1, deps=(scores, acc, p))
    slots.release_keys(step)
    scores = changes.change(scores, slope, row + tile.offset, block * KEYS)
    if (call.HAS_LEFT or call.HAS_RIGHT) and hidden:
        scores = hide(scores, tile, row, block, call, SCORES)
    new_top = gl.maximum(top, row_max(scores, KEYS, EACH_ROW))
    subtracted = _finite(new_top) * unit
    shrink = gl.exp2(top * unit - subtracted)
    left, right = halves(scores, KEYS)
    left = gl.exp2(left * unit - as_column(subtracted, left))
    sums = sums * as_column(shrink, sums)
    sums += gl.convert_layout(thread_sums(left, KEYS // 2), sums.type.layout, assert_trivial=True)
    left = left.to(slots.v.dtype)
    # ptxas moves instructions within a basic block only, and would put the wait for PV before all exponentials, or after.
    # Waiting for the next slot here, where another step needs it, ends the block.
    slots.has_keys.wait_full(place_of(step + 1, SLOTS), block > tile.begin)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    slots.has_values.release(slots.place_of_values(step))
    acc = acc * as_column(shrink, acc)
    right = gl.exp2(right * unit - as_column(subtracted, right))
    sums += gl.convert_layout(thread_sums(right, KEYS // 2), sums.type.layout, assert_trivial=True)
    p = gl.convert_layout(
        joined(left, right.to(slots.v.dtype), KEYS), p.type.layout, assert_trivial=True
    )
    return acc, p, new_top, sums


@gluon.jit
def _finish(
    acc, top, sums, tile, row, buffer, out_blocks, out, lse, call, changes, D: gl.constexpr, SCORES: gl.constexpr
):  # fmt: skip
    """Writes the rows' out and lse."""
    EACH_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    total = gl.convert_layout(gl.sum(sums, 1), EACH_ROW, assert_trivial=True)
    inverse, row_lse = changes.finish(top, total, tile)
    results = (acc * as_column(inverse, acc)).to(out_blocks.dtype)
    first = tile.queries.first + row
    rows = row + gl.arange(0, ROWS, layout=EACH_ROW)
    seen = rows < tile.queries.length
    if call.cu_seqlens_q is not None and row + ROWS > tile.queries.length:
        # A block's copy would end in the next sequence.
        _store_rows(results, out, first, tile, out_blocks, seen, D)
    else:
        tma.store_wait(0)  # of the tile before, from this buffer
        buffer.reshape([ROWS, D]).store(results)
        fence_async_shared()
        tma.async_copy_shared_to_global(out_blocks, [tile.batch, tile.head, first, 0], buffer)
    lse += (tile.batch * call.heads + tile.head).to(gl.int64) * call.q_len + tile.queries.first
    gl.store(lse + rows, row_lse, mask=seen)


@gluon.jit
def _store_rows(results, out, first, tile, out_blocks, seen, D: gl.constexpr):
    """The seen ones of a warp group's rows, of packed sequences: `first` is the token of the first one."""
    OUT: gl.constexpr = results.type.layout
    seen = gl.convert_layout(seen, gl.SliceLayout(1, OUT), assert_trivial=True)
    tokens = gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    columns = gl.arange(0, D, layout=gl.SliceLayout(0, OUT))
    out += (
        tile.head.to(gl.int64) * out_blocks.strides[1] + first.to(gl.int64) * out_blocks.strides[2]
    )
    offsets = gl.expand_dims(tokens.to(gl.int64) * out_blocks.strides[2], 1) + gl.expand_dims(
        columns, 0
    )
    inside = gl.expand_dims(seen, 1) & (gl.expand_dims(columns, 0) < out_blocks.shape[3])
    gl.store(out + offsets, results, mask=inside)
