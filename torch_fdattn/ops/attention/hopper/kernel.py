"""Attention forward on Hopper: two warp groups multiply, a warp loads and a warp schedules, in one program for each SM.

The pipeline is FlashAttention-3's (arXiv:2407.08608): QK of a block of keys is issued before PV of the block before, so
that the softmax of one stands beside a product of the other. A program takes tile after tile (`scheduling.py`,
`tiles.py`); its loading warp is ahead by two blocks of keys and values (`pipeline.py`).

Shapes: q (B, H, M, D), k and v (B, H_kv, N, D), out (B, H, M, D), by descriptors of four dims, any strides of which the
last is 1 and the others multiples of 16 bytes; lse (B, H, M). D is 64, 128, 192 or 256; bfloat16, float16, or fp8: q, k, v
of float8_e4m3fn with a scale for each head, and values transposed (`fp8.py`).

Columns of heads come in PARTS, since sizes are powers of two: 192 in three of 64.
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
from torch_fdattn.ops.attention.hopper.pipeline import blocks_of, keep_first, place_of
from torch_fdattn.ops.attention.hopper.rows import (
    MINUS_INFINITY,
    ROWS,
    as_column,
    as_operand,
    halves,
    hide,
    joined,
    kept,
    row_max,
    store_rows,
    thread_sums,
    width_of,
)
from torch_fdattn.ops.attention.hopper.scheduling import schedule
from torch_fdattn.ops.attention.hopper.scores import TileScores
from torch_fdattn.ops.attention.hopper.slots import GROUPS, SLOTS, own_place, slots_of
from torch_fdattn.ops.attention.hopper.tiles import Call, read_end, read_tile

_ONE_OF_GROUP = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit(do_not_specialize=[
    "q_len", "capacity", "sequences", "heads", "group", "pairs", "section", "left", "right",
    "slope_of_sequence", "slope_of_head", "sink_of_head", "table_stride", "table_step",
])  # fmt: skip
def attention_forward_kernel(
    q_blocks, k_blocks, v_blocks, out_blocks, out, lse, counter, kv_lens, q_start, kv_start, cu_seqlens_q, cu_seqlens_k,
    q_len, capacity, sequences, heads, group, pairs, section, left, right,
    scale, q_scales, k_scales, v_scales,
    softcap, slopes, slope_of_sequence, slope_of_head, sinks, sink_of_head,
    page_table, table_stride, table_step,
    KEYS: gl.constexpr, PARTS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, RAGGED: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr, BIAS_FIRST: gl.constexpr,
):  # fmt: skip
    D: gl.constexpr = q_blocks.block_type.shape[3]
    call = Call(kv_lens, q_start, kv_start, cu_seqlens_q, cu_seqlens_k, q_len, capacity, sequences, heads, group, section, left, right,
                HAS_LEFT, HAS_RIGHT, GROUPS * ROWS, KEYS, pairs)  # fmt: skip
    changes = TileScores(scale, q_scales, k_scales, v_scales, softcap, slopes, slope_of_sequence, slope_of_head, sinks, sink_of_head, BIAS_FIRST)  # fmt: skip
    Q_SLOTS: gl.constexpr = GROUPS if PARTS * D > 128 else 2 * GROUPS
    PAGE: gl.constexpr = 0 if page_table is None else k_blocks.block_type.shape[2]
    slots = slots_of(q_blocks, v_blocks, Q_SLOTS, KEYS, PARTS, PAGE)
    if out_blocks.dtype == gl.float32 or (
        PARTS * D > 128 and q_blocks.dtype == out_blocks.dtype
    ):  # stored from registers
        outs = slots.q
    else:
        outs = blocks_of(out_blocks, GROUPS * PARTS)
    fence_async_shared()
    gl.warp_specialize([
        (_multiply, (slots, outs, out_blocks, out, lse, call, changes, RAGGED, Q_IN_REGISTERS, 0)),
        (_multiply, (slots, outs, out_blocks, out, lse, call, changes, RAGGED, Q_IN_REGISTERS, 1)),
        (load, (slots, q_blocks, k_blocks, v_blocks, call, page_table, table_stride, table_step)),
        (schedule, (slots, counter, call)),
    ], [4, 1, 1], [240, 24, 24])  # fmt: skip


@gluon.jit
def _multiply(
    slots, outs, out_blocks, out, lse, call, changes,
    RAGGED: gl.constexpr, Q_IN_REGISTERS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Of a warp group: 64 rows of each tile, next to each other or of two heads.

    The first scores of a tile are issued before the results of the tile before are written.
    """
    D: gl.constexpr = out_blocks.block_type.shape[3]
    PARTS: gl.constexpr = slots.PARTS
    SLOTS_OF_GROUP: gl.constexpr = slots.Q_SLOTS // GROUPS
    # Of the summed dim, by one instruction.
    SUMMED: gl.constexpr = 256 // slots.q.dtype.primitive_bitwidth
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, call.KEYS, SUMMED])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, SUMMED])
    turn = gl.to_tensor(0)
    step = gl.to_tensor(0)
    tile = _next_tile(slots, turn, GROUP)
    own = own_place(GROUP, turn, SLOTS_OF_GROUP)
    q = _queries(slots, own, tile.end > 0, SCORES, Q_IN_REGISTERS)
    slots.has_keys.wait_full(place_of(step, SLOTS), tile.end > 0)
    scores = warpgroup_mma_wait(0, deps=(_scores(q, slots, step, SCORES),))
    while tile.end > 0:
        missing = slots.missing_of(step, _ONE_OF_GROUP)
        slots.has_keys.release(place_of(step, SLOTS))
        scale = changes.scale_of(tile, call)
        acc, p, top, sums = _attend(q, scores, missing, tile, step, slots, call, changes, scale, SCORES, OUT, RAGGED)  # fmt: skip

        # A step of two tiles: PV of this one's last block, and QK of the next one's first.
        step += tile.end - tile.begin
        turn += 1
        place = place_of(turn, SLOTS)
        slots.has_tile.wait_full(place)
        more = read_end(slots.tiles, place.slot, _ONE_OF_GROUP) > 0
        slots.has_keys.wait_full(place_of(step, SLOTS), more | slots.TOGETHER)
        slots.wait_for_values(step)
        acc = _add_values(p, slots, step, acc)
        following_own = own_place(GROUP, turn, SLOTS_OF_GROUP)
        if SLOTS_OF_GROUP > 1:
            if not Q_IN_REGISTERS:
                slots.has_queries.release(own)
            q = _queries(slots, following_own, more, SCORES, Q_IN_REGISTERS)
            scores = _scores(q, slots, step, SCORES)
            acc = _wait_for(PARTS, p, acc)
            slots.release_values(step)
            _finish(acc, top, sums, tile, scale, outs, GROUP * PARTS, out_blocks, out, lse, call, changes, SCORES)  # fmt: skip
        else:  # where results take the queries' place
            acc = _wait_for(0, p, acc)
            slots.release_values(step)
            _finish(acc, top, sums, tile, scale, outs, GROUP * PARTS, out_blocks, out, lse, call, changes, SCORES)  # fmt: skip
            tma.store_wait(0)
            slots.has_queries.release(own)
            q = _queries(slots, following_own, more, SCORES, Q_IN_REGISTERS)
            scores = _scores(q, slots, step, SCORES)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        own = following_own
        tile = _next_tile(slots, turn, GROUP)
    tma.store_wait(0)


@gluon.jit
def _next_tile(slots, turn, GROUP: gl.constexpr):
    place = place_of(turn, SLOTS)
    slots.has_tile.wait_full(place)
    tile = read_tile(slots.tiles, place.slot, _ONE_OF_GROUP)
    slots.has_tile.release(place)
    return tile.of_warp_group(GROUP)


@gluon.jit
def _queries(slots, own, needed, SCORES: gl.constexpr, Q_IN_REGISTERS: gl.constexpr):
    """A warp group's queries of a tile, as a product takes them: whatever lies there where there is no such tile."""
    slots.has_queries.wait_full(own, needed)
    D: gl.constexpr = slots.q.shape[4]
    HELD: gl.constexpr = gl.DotOperandLayout(0, SCORES, width_of(slots.q.dtype))
    q = ()
    for part in gl.static_range(slots.PARTS):
        found = slots.q.index(own.slot * slots.PARTS + part).reshape([ROWS, D])
        if Q_IN_REGISTERS:
            found = found.load(HELD)
        q = q + (found,)  # noqa: RUF005 -- Triton knows no unpacking
    if Q_IN_REGISTERS:
        slots.has_queries.release(own)
    return q


@gluon.jit
def _attend(
    q, scores, missing, tile, step, slots, call, changes, scale, SCORES: gl.constexpr, OUT: gl.constexpr,
    RAGGED: gl.constexpr,
):  # fmt: skip
    """All of a tile but PV of its last block: its blocks of keys from right to left.

    scores, missing: of the first one. Returns the sums of weighted values, the weights of the last block, rows' maxima, and what
    each thread has summed of the weights.
    """
    KEYS: gl.constexpr = call.KEYS
    EACH_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    unit = changes.unit(scale)
    slope = changes.slope_of(tile.sequence, tile.head, unit)
    scores = changes.change(scores, scale, slope, tile.row + tile.offset, (tile.end - 1) * KEYS)
    if call.HAS_LEFT or call.HAS_RIGHT or RAGGED:
        scores = hide(scores, tile, tile.end - 1, missing, call, slots.PAGE, SCORES)
    top = row_max(scores, KEYS, EACH_ROW)
    subtracted = _finite(top) * unit - changes.LOG2_OF_LARGEST
    weights = gl.exp2(scores * unit - as_column(subtracted, scores))
    sums = thread_sums(weights, KEYS)
    p = kept(weights, slots.v.dtype, OUT)
    D: gl.constexpr = slots.q.shape[4]
    acc = ()
    for _ in gl.static_range(slots.PARTS):
        acc = acc + (gl.zeros([ROWS, D], gl.float32, OUT),)  # noqa: RUF005
    count = tile.end - tile.begin
    slots.has_keys.wait_full(place_of(step + 1, SLOTS), count > 1)
    # Of packed sequences, those of the next one follow. Transposed values are 0 there.
    if (call.kv_lens is not None or call.cu_seqlens_q is not None) and not slots.TRANSPOSED:
        inside = tile.keys.length - (tile.end - 1) * KEYS
        if inside < KEYS:
            slots.has_values.wait_full(slots.place_of_values(step + 1))
            for part in gl.static_range(slots.PARTS):
                keep_first(slots.values_of(step + 1, part), inside)
    seen_from, seen_to = _seen_by_all(tile, call)
    for i in range(1, count):
        block = tile.end - 1 - i
        hidden = (block < seen_from) | (block >= seen_to)
        acc, p, top, sums = _step(
            acc, p, top, sums, step + i, block, hidden, tile, q, slots, call, changes, scale, unit, slope, SCORES, OUT
        )  # fmt: skip
    return acc, p, top, sums


@gluon.jit
def _scores(q, slots, step, SCORES: gl.constexpr):
    """QK of a step, issued."""
    KEYS: gl.constexpr = slots.k.shape[3]
    zeros = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    return _add_scores(q, slots, step, zeros, False)


@gluon.jit
def _add_scores(q, slots, step, scores, USE_FIRST: gl.constexpr):
    """What is added to scores counts where USE_FIRST; else these are zeros, which no instruction writes."""
    for part in gl.static_range(slots.PARTS):
        k = slots.keys_of(step, part).permute((1, 0))
        scores = warpgroup_mma(q[part], k, scores, use_acc=USE_FIRST or part > 0, is_async=True)
    return scores


@gluon.jit
def _add_values(p, slots, step, acc):
    """PV of a step, issued."""
    OUT: gl.constexpr = acc[0].type.layout
    p = as_operand(p, slots.v.dtype, OUT)
    added = ()
    for part in gl.static_range(slots.PARTS):
        v = slots.values_of(step, part)
        added = added + (warpgroup_mma(p, v, acc[part], is_async=True),)  # noqa: RUF005
    return added


@gluon.jit
def _wait_for(PENDING: gl.constexpr, p, products):
    """For all but the last PENDING products that were issued, of which one reads the weights p.

    They are among what is waited for: ptxas may else give their registers away while they are read. Of those that are
    converted for the product (`rows.kept`) that is not possible.
    """
    if p.dtype == gl.float32:
        if len(products) == 1:
            return (warpgroup_mma_wait(PENDING, deps=products),)
        else:
            return warpgroup_mma_wait(PENDING, deps=products)
    else:
        return warpgroup_mma_wait(PENDING, deps=(p,) + products)[1:]  # noqa: RUF005


@gluon.jit
def _finite(top):
    """Of a row that has seen no key so far: 0, for -inf - -inf is NaN."""
    return gl.where(top == MINUS_INFINITY, 0.0, top)


@gluon.jit
def _seen_by_all(tile, call):
    """(begin, end) of the blocks of whose keys each row of the warp group sees all."""
    begin = tile.begin
    if call.HAS_LEFT:
        begin = (
            gl.maximum(tile.row + ROWS - 1 + tile.offset - call.left, 0) + call.KEYS - 1
        ) // call.KEYS
    end = tile.keys.length // call.KEYS
    if call.HAS_RIGHT:
        end = gl.minimum(end, gl.maximum(tile.row + tile.offset + call.right + 1, 0) // call.KEYS)
    return begin, end


@gluon.jit
def _step(
    acc, p, top, sums, step, block, hidden, tile, q, slots, call, changes, scale, unit, slope,
    SCORES: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """QK of a block of keys, which have landed, beside PV of the block at its right.

    hidden: whether some row does not see some key of the block.
    """
    KEYS: gl.constexpr = call.KEYS
    EACH_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    position = tile.row + tile.offset
    start = changes.start(slope, position, block * KEYS, KEYS, SCORES)
    scores = _add_scores(q, slots, step, start, changes.BIAS_FIRST)
    slots.wait_for_values(step)
    acc = _add_values(p, slots, step, acc)
    # Waits for QK alone.
    waited = _wait_for(slots.PARTS, p, (scores,) + acc)  # noqa: RUF005
    scores, acc = waited[0], waited[1:]
    missing = slots.missing_of(step, _ONE_OF_GROUP)
    slots.release_keys(step)
    scores = changes.changed(scores, scale, slope, position, block * KEYS)
    if (call.HAS_LEFT or call.HAS_RIGHT or slots.PAGE > 0) and (hidden | (missing != 0)):
        scores = hide(scores, tile, block, missing, call, slots.PAGE, SCORES)
    new_top = gl.maximum(top, row_max(scores, KEYS, EACH_ROW))
    highest = _finite(new_top) * unit
    shrink = gl.exp2(top * unit - highest)
    subtracted = highest - changes.LOG2_OF_LARGEST
    left, right = halves(scores, KEYS)
    left = gl.exp2(left * unit - as_column(subtracted, left))
    sums = sums * as_column(shrink, sums)
    sums += gl.convert_layout(thread_sums(left, KEYS // 2), sums.type.layout, assert_trivial=True)
    left = kept(left, slots.v.dtype, OUT)
    # ptxas moves instructions within a basic block only, and would put the wait for PV before all exponentials, or after.
    # Waiting for the next slot here, where another step needs it, ends the block.
    slots.has_keys.wait_full(place_of(step + 1, SLOTS), block > tile.begin)
    acc = _wait_for(0, p, acc)
    slots.has_values.release(slots.place_of_values(step))
    acc = _scaled(acc, shrink)
    right = gl.exp2(right * unit - as_column(subtracted, right))
    sums += gl.convert_layout(thread_sums(right, KEYS // 2), sums.type.layout, assert_trivial=True)
    right = kept(right, slots.v.dtype, OUT)
    p = gl.convert_layout(joined(left, right, KEYS), p.type.layout, assert_trivial=True)
    return acc, p, new_top, sums


@gluon.jit
def _scaled(acc, factor):
    """All parts, by a factor for each row."""
    scaled = ()
    for part in gl.static_range(len(acc)):
        scaled = scaled + (acc[part] * as_column(factor, acc[part]),)  # noqa: RUF005
    return scaled


@gluon.jit
def _finish(
    acc, top, sums, tile, scale, outs, FIRST_OUT: gl.constexpr, out_blocks, out, lse, call, changes,
    SCORES: gl.constexpr,
):  # fmt: skip
    """Writes the rows' out and lse."""
    EACH_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    D: gl.constexpr = out_blocks.block_type.shape[3]
    total = gl.convert_layout(gl.sum(sums, 1), EACH_ROW, assert_trivial=True)
    inverse, row_lse = changes.finish(top, total, tile, call, scale)
    results = _scaled(acc, inverse)
    first = tile.queries.first + tile.row
    rows = tile.row + gl.arange(0, ROWS, layout=EACH_ROW)
    seen = rows < tile.queries.length
    # float32 has no buffer, and of packed sequences a block's copy would end in the next one.
    DIRECT: gl.constexpr = out_blocks.dtype == gl.float32
    if DIRECT or (call.cu_seqlens_q is not None and tile.row + ROWS > tile.queries.length):
        for part in gl.static_range(len(acc)):
            found = results[part].to(out_blocks.dtype)
            store_rows(found, out, out_blocks, tile.batch, tile.head, first, part * D, seen)
    else:
        tma.store_wait(0)  # of the tile before, from these buffers
        for part in gl.static_range(len(acc)):
            buffer = outs.index(FIRST_OUT + part).reshape([ROWS, D])
            buffer.store(results[part].to(out_blocks.dtype))
        fence_async_shared()
        for part in gl.static_range(len(acc)):
            corner = [tile.batch, tile.head, first, part * D]
            tma.async_copy_shared_to_global(out_blocks, corner, outs.index(FIRST_OUT + part))
    lse += (tile.batch * call.heads + tile.head).to(gl.int64) * call.q_len + tile.queries.first
    gl.store(lse + rows, row_lse, mask=seen)
