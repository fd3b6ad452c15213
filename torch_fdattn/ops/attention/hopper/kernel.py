"""Attention forward on Hopper: two warp groups multiply and a warp loads, in one program for each SM.

The pipeline is FlashAttention-3's (arXiv:2407.08608): QK of a block of keys is issued before PV of the block before, so
that the softmax of one stands beside a product of the other. A program takes tile after tile (`tiles.py`); its loading
warp is ahead by a tile number and two blocks of keys and values (`pipeline.py`).

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

from torch_fdattn.ops.attention.hopper.pipeline import (
    Place,
    blocks_of,
    place_of,
    ring,
    wait_for_group,
)
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
from torch_fdattn.ops.attention.hopper.tiles import Call, take, tile_of

SLOTS = gl.constexpr(2)  #: of keys, of values, of tile numbers
GROUPS = gl.constexpr(2)  #: warp groups that multiply
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
_ONE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
_ONE_OF_GROUP = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit(do_not_specialize=["q_len", "capacity", "sequences", "heads", "group", "section", "left", "right"])  # fmt: skip
def attention_forward_kernel(
    q_blocks, k_blocks, v_blocks, out_blocks, lse, counter, kv_lens, q_start, kv_start,
    q_len, capacity, sequences, heads, group, section, left, right, scale,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, RAGGED: gl.constexpr, Q_IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    KEYS: gl.constexpr = k_blocks.block_type.shape[2]
    D: gl.constexpr = k_blocks.block_type.shape[3]
    call = Call(kv_lens, q_start, kv_start, q_len, capacity, sequences, heads, group, section, left, right,
                HAS_LEFT, HAS_RIGHT, GROUPS * ROWS, KEYS)  # fmt: skip
    Q_SLOTS: gl.constexpr = GROUPS if D > 128 else 2 * GROUPS
    queries = ring(blocks_of(q_blocks, Q_SLOTS), Q_SLOTS, 1)
    keys = ring(blocks_of(k_blocks, SLOTS), SLOTS, GROUPS)
    values = ring(blocks_of(v_blocks, SLOTS), SLOTS, GROUPS)
    number_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = ring(gl.allocate_shared_memory(gl.int32, [SLOTS, 1], number_layout), SLOTS, GROUPS)
    if D > 128:  # no room for both
        outs = queries.buffers
    else:
        outs = blocks_of(out_blocks, GROUPS)
    fence_async_shared()
    gl.warp_specialize([
        (_multiply, (numbers, queries, keys, values, outs, out_blocks, lse, call, scale, RAGGED, Q_IN_REGISTERS, 0)),
        (_multiply, (numbers, queries, keys, values, outs, out_blocks, lse, call, scale, RAGGED, Q_IN_REGISTERS, 1)),
        (_load, (numbers, queries, keys, values, q_blocks, k_blocks, v_blocks, counter, call)),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit
def _load(numbers, queries, keys, values, q_blocks, k_blocks, v_blocks, counter, call):
    """Of one warp: hands tile numbers over, and fills the rings in the order in which they are emptied."""
    tiles = call.tiles()
    number = gl.program_id(0)
    turn = gl.to_tensor(0)
    filled = gl.to_tensor(0)  # blocks of keys so far
    while number < tiles:
        following = take(counter, tiles)
        place = place_of(turn, SLOTS)
        numbers.wait_empty(place)
        numbers.buffers.index(place.slot).store(gl.full([1], following, gl.int32, _ONE))
        numbers.hand_over(place)

        tile = tile_of(number, call)
        kv_head = tile.head // call.group
        for i in gl.static_range(GROUPS):
            corner = [tile.sequence, tile.head, tile.row + i * ROWS, 0]
            queries.fill(q_blocks, corner, _own(i, turn, queries.buffers.shape[0] // GROUPS))
            if i == 0:
                corner = [tile.sequence, kv_head, (tile.end - 1) * call.KEYS, 0]
                keys.fill(k_blocks, corner, place_of(filled, SLOTS))
        # From right to left, the keys of a block before the values of the one before it.
        count = tile.end - tile.begin
        for i in range(1, count):
            row = (tile.end - 1 - i) * call.KEYS
            corner = [tile.sequence, kv_head, row, 0]
            keys.fill(k_blocks, corner, place_of(filled + i, SLOTS))
            corner = [tile.sequence, kv_head, row + call.KEYS, 0]
            values.fill(v_blocks, corner, place_of(filled + i - 1, SLOTS))
        corner = [tile.sequence, kv_head, tile.begin * call.KEYS, 0]
        values.fill(v_blocks, corner, place_of(filled + count - 1, SLOTS))
        filled += count
        number = following
        turn += 1


@gluon.jit
def _own(i, turn, SLOTS_OF_GROUP: gl.constexpr):
    """Where queries of a warp group lie in a program's turn-th tile: one filling a tile."""
    return Place((turn & (SLOTS_OF_GROUP - 1)) * GROUPS + i, (turn // SLOTS_OF_GROUP) & 1)


@gluon.jit
def _multiply(
    numbers, queries, keys, values, outs, out_blocks, lse, call, scale,
    RAGGED: gl.constexpr, Q_IN_REGISTERS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Of a warp group: 64 rows of each tile.

    The first scores of a tile are issued before the results of the tile before are written.
    """
    KEYS: gl.constexpr = call.KEYS
    D: gl.constexpr = out_blocks.block_type.shape[3]
    SLOTS_OF_GROUP: gl.constexpr = queries.buffers.shape[0] // GROUPS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    tiles = call.tiles()
    number = gl.program_id(0)
    turn = gl.to_tensor(0)
    used = gl.to_tensor(0)  # blocks of keys so far
    tile = tile_of(number, call)
    own = _own(GROUP, turn, SLOTS_OF_GROUP)
    held = _held(queries, own, True, D, SCORES, Q_IN_REGISTERS)
    scores = _first_scores(held, queries, own, keys, used, True, D, SCORES, Q_IN_REGISTERS)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    while number < tiles:
        keys.release(place_of(used, SLOTS))
        place = place_of(turn, SLOTS)
        numbers.wait_full(place)
        following = gl.max(numbers.buffers.index(place.slot).load(_ONE_OF_GROUP), 0)
        numbers.release(place)
        q = _operand(held, queries, own, D, Q_IN_REGISTERS)
        acc, p, top, sums = _attend(q, scores, tile, used, keys, values, call, scale, D, SCORES, OUT, RAGGED, GROUP)  # fmt: skip
        row = tile.row + GROUP * ROWS
        last = place_of(used + tile.end - tile.begin - 1, SLOTS)
        values.wait_full(last)
        v = values.buffers.index(last.slot).reshape([KEYS, D])
        acc = warpgroup_mma(p, v, acc, is_async=True)

        used += tile.end - tile.begin
        turn += 1
        more = following < tiles
        following_own = _own(GROUP, turn, SLOTS_OF_GROUP)
        if SLOTS_OF_GROUP > 1:
            if not Q_IN_REGISTERS:
                queries.release(own)
            held = _held(queries, following_own, more, D, SCORES, Q_IN_REGISTERS)
            scores = _first_scores(
                held, queries, following_own, keys, used, more, D, SCORES, Q_IN_REGISTERS
            )
            acc, p, scores = warpgroup_mma_wait(1, deps=(acc, p, scores))
            values.release(last)
            _finish(
                acc,
                top,
                sums,
                tile,
                row,
                outs.index(GROUP),
                out_blocks,
                lse,
                call,
                scale,
                D,
                SCORES,
            )
        else:  # where results take the queries' place
            acc, p = warpgroup_mma_wait(0, deps=(acc, p))
            values.release(last)
            _finish(
                acc,
                top,
                sums,
                tile,
                row,
                outs.index(GROUP),
                out_blocks,
                lse,
                call,
                scale,
                D,
                SCORES,
            )
            tma.store_wait(0)
            queries.release(own)
            scores = _first_scores(
                held, queries, following_own, keys, used, more, D, SCORES, Q_IN_REGISTERS
            )
        scores = warpgroup_mma_wait(0, deps=(scores,))
        own = following_own
        number = following
        tile = tile_of(gl.minimum(number, tiles - 1), call)
    tma.store_wait(0)


@gluon.jit
def _held(queries, own, needed, D: gl.constexpr, SCORES: gl.constexpr, Q_IN_REGISTERS: gl.constexpr):  # fmt: skip
    """What a warp group keeps of its queries in registers: all, or nothing."""
    if Q_IN_REGISTERS:
        queries.wait_full(own, needed)
        q = queries.buffers.index(own.slot).reshape([ROWS, D]).load(gl.DotOperandLayout(0, SCORES, 2))  # fmt: skip
        queries.release(own)
        return q
    else:
        return gl.to_tensor(0)


@gluon.jit
def _operand(held, queries, own, D: gl.constexpr, Q_IN_REGISTERS: gl.constexpr):
    """The queries as a product takes them."""
    if Q_IN_REGISTERS:
        return held
    else:
        return queries.buffers.index(own.slot).reshape([ROWS, D])


@gluon.jit
def _first_scores(
    held, queries, own, keys, used, needed, D: gl.constexpr, SCORES: gl.constexpr, Q_IN_REGISTERS: gl.constexpr
):  # fmt: skip
    """QK of a tile's first block, issued; of whatever lies there where there is no such tile."""
    place = place_of(used, SLOTS)
    if not Q_IN_REGISTERS:
        queries.wait_full(own, needed)
    keys.wait_full(place, needed)
    return _scores(_operand(held, queries, own, D, Q_IN_REGISTERS), keys, place, D, SCORES)


@gluon.jit
def _attend(
    q, scores, tile, used, keys, values, call, scale, D: gl.constexpr, SCORES: gl.constexpr,
    OUT: gl.constexpr, RAGGED: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """All of a tile but PV of its last block: its blocks of keys from right to left.

    scores: of the first one. Returns the sums of weighted values, the weights of the last block, rows' maxima, and what
    each thread has summed of the weights.
    """
    KEYS: gl.constexpr = call.KEYS
    EACH_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    scale2 = scale * LOG2_E
    row = tile.row + GROUP * ROWS
    place = place_of(used, SLOTS)
    if call.HAS_RIGHT or RAGGED:
        scores = hide(scores, tile, row, tile.end - 1, call, SCORES)
    top = row_max(scores, KEYS, EACH_ROW)
    weights = gl.exp2(scores * scale2 - as_column(_finite(top) * scale2, scores))
    sums = thread_sums(weights, KEYS)
    p = gl.convert_layout(
        weights.to(values.buffers.dtype), gl.DotOperandLayout(0, OUT, 2), assert_trivial=True
    )
    acc = gl.zeros([ROWS, D], gl.float32, OUT)
    if call.kv_lens is not None:
        kept = tile.kv_len - (tile.end - 1) * KEYS
        if kept < KEYS:
            values.wait_full(place)
            _keep_first(values.buffers.index(place.slot).reshape([KEYS, D]), kept, KEYS, D)
    count = tile.end - tile.begin
    keys.wait_full(place_of(used + 1, SLOTS), count > 1)
    seen_from, seen_to = _seen_by_all(tile, row, call)
    for i in range(1, count):
        block = tile.end - 1 - i
        hidden = (block < seen_from) | (block >= seen_to)
        acc, p, top, sums = _step(
            acc, p, top, sums, i, hidden, tile, row, used, q, keys, values, call, scale2, D, SCORES
        )
    return acc, p, top, sums


@gluon.jit
def _scores(q, keys, place, D: gl.constexpr, SCORES: gl.constexpr):
    """QK of a slot, issued."""
    KEYS: gl.constexpr = keys.buffers.shape[3]
    k = keys.buffers.index(place.slot).reshape([KEYS, D]).permute((1, 0))
    return warpgroup_mma(
        q, k, gl.zeros([ROWS, KEYS], gl.float32, SCORES), use_acc=False, is_async=True
    )


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
    end = tile.kv_len // call.KEYS
    if call.HAS_RIGHT:
        end = gl.minimum(end, gl.maximum(row + tile.offset + call.right + 1, 0) // call.KEYS)
    return begin, end


@gluon.jit
def _step(
    acc, p, top, sums, i, hidden, tile, row, used, q, keys, values, call, scale2,
    D: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """QK of the tile's i-th block from the right, whose keys have landed, beside PV of the block before.

    hidden: whether some row does not see some key of it.
    """
    KEYS: gl.constexpr = call.KEYS
    place, before = place_of(used + i, SLOTS), place_of(used + i - 1, SLOTS)
    scores = _scores(q, keys, place, D, SCORES)
    values.wait_full(before)
    acc = warpgroup_mma(p, values.buffers.index(before.slot).reshape([KEYS, D]), acc, is_async=True)
    # Waits for QK alone. p among what is waited for: ptxas may else give its registers away while PV reads them.
    scores, acc, p = warpgroup_mma_wait(1, deps=(scores, acc, p))
    keys.release(place)
    if (call.HAS_LEFT or call.HAS_RIGHT) and hidden:
        scores = hide(scores, tile, row, tile.end - 1 - i, call, SCORES)
    EACH_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    new_top = gl.maximum(top, row_max(scores, KEYS, EACH_ROW))
    subtracted = _finite(new_top) * scale2
    shrink = gl.exp2(top * scale2 - subtracted)
    left, right = halves(scores, KEYS)
    left = gl.exp2(left * scale2 - as_column(subtracted, left))
    sums = sums * as_column(shrink, sums)
    sums += gl.convert_layout(thread_sums(left, KEYS // 2), sums.type.layout, assert_trivial=True)
    left = left.to(values.buffers.dtype)
    # ptxas moves instructions within a basic block only, and would put the wait for PV before all exponentials. Waiting for
    # the next keys here ends the block.
    keys.wait_full(place_of(used + i + 1, SLOTS), i + 1 < tile.end - tile.begin)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    values.release(before)
    acc = acc * as_column(shrink, acc)
    right = gl.exp2(right * scale2 - as_column(subtracted, right))
    sums += gl.convert_layout(thread_sums(right, KEYS // 2), sums.type.layout, assert_trivial=True)
    p = gl.convert_layout(
        joined(left, right.to(values.buffers.dtype), KEYS), p.type.layout, assert_trivial=True
    )
    return acc, p, new_top, sums


@gluon.jit
def _finish(
    acc, top, sums, tile, row, buffer, out_blocks, lse, call, scale, D: gl.constexpr, SCORES: gl.constexpr
):  # fmt: skip
    """Writes the rows' out and lse."""
    EACH_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    total = gl.convert_layout(gl.sum(sums, 1), EACH_ROW, assert_trivial=True)
    inverse = gl.where(total == 0.0, 0.0, 1.0 / total)
    out = (acc * as_column(inverse, acc)).to(out_blocks.dtype)
    tma.store_wait(0)  # of the tile before, from this buffer
    buffer.reshape([ROWS, D]).store(out)
    fence_async_shared()
    tma.async_copy_shared_to_global(out_blocks, [tile.sequence, tile.head, row, 0], buffer)
    rows = row + gl.arange(0, ROWS, layout=EACH_ROW)
    lse += (tile.sequence * call.heads + tile.head).to(gl.int64) * call.q_len
    gl.store(lse + rows, top * scale + gl.log2(total) * LN_2, mask=rows < call.q_len)
