"""Split-KV decode in portable Triton, one launch: contiguous and paged caches, any lengths.

Flash-Decoding with the work shared out evenly (`schedule.py`): a program walks along its share of all
sequences' keys; where its share covers an item (a sequence's KV head) only in part, it leaves (out, lse) of
that part in fp32, and the item's last arriver merges the parts, in order, so that results do not depend on
who came last. The query heads of one KV head and the T query tokens are packed into the rows of one tile
(row = head_in_group · T + token): K and V are read once a group.

Shapes: q (B, H, T, D), out (B, H, T, DV); k (B, H_kv, N, D), v (B, H_kv, N, DV), or pages (P, H_kv, PAGE, D)
behind page_table (B, pages a sequence); any strides. parts (slots, BLOCK_M, BLOCK_DV) and part_lses (slots,
BLOCK_M) fp32; arrivals (B · items) int32, zero before and after every launch.
Limit: more than 64 rows a KV head are tiled and read the cache again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_fdattn.ops.decode.schedule import CHUNK, UNIT, line_ends, sequence_at
from torch_fdattn.ops.online_softmax import (
    LOG2E,
    merge_finish,
    merge_update,
    softmax_finish,
    softmax_update,
)
from torch_fdattn.ops.score_tiles import add_sinks, modify_scores
from torch_fdattn.ops.tiles import (
    key_position,
    key_range,
    keys_before,
    sequence_bounds,
    visible,
)

#: Quantised caches are multiplied in float16, whose smallest number is 6e-8: probabilities are made larger.
PROBABILITY_SCALE = tl.constexpr(16384.0)


@triton.jit(
    do_not_specialize=[
        "batch", "kv_capacity", "page_count", "table_stride", "table_step", "window_left", "window_right", "kv_block",
        "kv_stride", "pieces",
    ]
)  # fmt: skip
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, arrivals_ptr, parts_ptr, part_lses_ptr,
    kv_lens_ptr, q_start_ptr, kv_start_ptr, page_table_ptr, k_scale_ptr, v_scale_ptr, slopes_ptr, sinks_ptr,
    q_strides, k_strides, v_strides, out_strides, k_scale_strides, v_scale_strides, slope_strides, sink_stride,
    batch, q_len, kv_capacity, page_count, table_stride, table_step, window_left, window_right, kv_block, kv_stride,
    scale, softcap, pieces, kv_heads, group, head_dim: tl.constexpr, v_dim: tl.constexpr,
    PAGE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, STRIPED: tl.constexpr,
    SOFTCAP: tl.constexpr, K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, INVARIANT: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, MERGE_ROWS: tl.constexpr, MERGE_PARTS: tl.constexpr,
    MIN_SHARE: tl.constexpr,
):  # fmt: skip
    ALIBI: tl.constexpr = slopes_ptr is not None
    program = tl.program_id(0)
    items = kv_heads * tl.cdiv(group * q_len, BLOCK_M)
    bounds_of = (kv_lens_ptr, q_start_ptr, kv_start_ptr, q_len, kv_capacity)
    window = (window_left, window_right, kv_block, kv_stride)

    if INVARIANT:
        share = CHUNK
        first_slot = program // pieces * pieces
        item = program // pieces % items
        sequence = program // pieces // items
        item_begin = 0
        item_units = _units(sequence, bounds_of, window, HAS_LEFT, HAS_RIGHT, STRIPED)
        unit = program % pieces * CHUNK
        last = tl.minimum(unit + CHUNK, item_units)
    elif BLOCK_B == 1:
        one_units = _units(0, bounds_of, window, HAS_LEFT, HAS_RIGHT, STRIPED)
        total = one_units * items
        share = tl.maximum(tl.cdiv(total, tl.num_programs(0)), MIN_SHARE)
        unit = program * share
        last = tl.minimum(unit + share, total)
    else:
        sequences = tl.arange(0, BLOCK_B)
        within = tl.minimum(sequences, batch - 1)
        units = _units(within, bounds_of, window, HAS_LEFT, HAS_RIGHT, STRIPED)
        units = tl.where(sequences < batch, units, 0)
        ends = line_ends(units, items)
        total = tl.max(ends, 0)
        share = tl.maximum(tl.cdiv(total, tl.num_programs(0)), MIN_SHARE)
        unit = program * share
        last = tl.minimum(unit + share, total)

    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    while unit < last:
        if not INVARIANT:
            if BLOCK_B == 1:
                sequence, line_begin, item_units = program * 0, 0, one_units
            else:
                sequence, line_begin, item_units = sequence_at(unit, ends, units)
            item = (unit - line_begin) // item_units
            item_begin = line_begin + item * item_units
        _, q_start, kv_start, keys, begin, end = _key_bounds(
            sequence, bounds_of, window, HAS_LEFT, HAS_RIGHT, STRIPED
        )
        stop_unit = tl.minimum(last - item_begin, item_units)
        first_key = begin + (unit - item_begin) * UNIT
        stop_key = tl.minimum(begin + stop_unit * UNIT, end)

        kv_head = item % kv_heads
        row = item // kv_heads * BLOCK_M + tl.arange(0, BLOCK_M)
        rows_in = row < group * q_len
        head = kv_head * group + row // q_len
        q_pos = q_start + row % q_len
        b64 = sequence.to(tl.int64)
        kv_head64 = kv_head.to(tl.int64)
        q_rows = (
            b64 * q_strides[0] + head.to(tl.int64) * q_strides[1] + (row % q_len).to(tl.int64) * q_strides[2]
        )  # fmt: skip
        q = tl.load(
            q_ptr + q_rows[:, None] + d[None, :] * q_strides[3],
            mask=rows_in[:, None] & (d[None, :] < head_dim), other=0.0,
        )  # fmt: skip
        if ALIBI:
            slopes = tl.load(
                slopes_ptr + b64 * slope_strides[0] + head * slope_strides[1],
                mask=rows_in,
                other=0.0,
            ).to(tl.float32)
        else:
            slopes = 0.0
        # One byte becomes float16 by one instruction for two, bfloat16 only by a conversion at a quarter of the
        # rate. Rows of q scaled to below 2 by a power of two lose nothing in it that their sums would show.
        narrow: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth == 8
        if narrow and q.dtype == tl.bfloat16:
            q, row_factor = _to_half(q)
            scale_rows_too: tl.constexpr = True
        else:
            scale_rows_too: tl.constexpr = False
        head_scale = 1.0
        if K_SCALES == 1:
            head_scale = tl.load(
                k_scale_ptr + b64 * k_scale_strides[0] + kv_head64 * k_scale_strides[1]
            )
        if HAS_LEFT:
            oldest = keys_before(q_start - window_left, kv_start, kv_block, kv_stride, STRIPED)

        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        for start in tl.range(first_key, stop_key, BLOCK_N):
            index = start + n
            inside = index < stop_key
            if HAS_LEFT:  # not even read: a window that has moved on may have freed its pages
                inside = inside & (index >= oldest)
            base = b64
            slot = index
            if PAGE > 0:
                entry = (index // PAGE).to(tl.int64) * table_step
                page_ptrs = page_table_ptr + b64 * table_stride + entry
                page = tl.load(page_ptrs, mask=inside, other=-1)
                # Unsigned, a negative page is beyond the last one.
                inside = page.to(tl.uint32, bitcast=True) < page_count.to(tl.uint32)
                base = page.to(tl.int64)
                slot = index % PAGE
            slot = slot.to(tl.int64)
            k_rows = base * k_strides[0] + kv_head64 * k_strides[1] + slot * k_strides[2]
            k_mask = inside[None, :]
            if head_dim < BLOCK_D:
                k_mask = k_mask & (d[:, None] < head_dim)
            k = tl.load(k_ptr + k_rows[None, :] + d[:, None] * k_strides[3], mask=k_mask, other=0.0)
            scores = tl.dot(q, _unquantised(k, q.dtype), input_precision=PRECISION)
            if scale_rows_too:
                scores *= row_factor[:, None]
            if K_SCALES == 1:  # before the mask, not in the softmax's scale: it may be 0
                scores *= head_scale
            if K_SCALES == 2:
                scale_rows = base * k_scale_strides[0] + kv_head64 * k_scale_strides[1]
                key_scales = tl.load(
                    k_scale_ptr + scale_rows + slot * k_scale_strides[2], mask=inside, other=0.0
                )
                scores *= key_scales[None, :]
            units_of_score = scale * LOG2E
            if SOFTCAP or ALIBI:
                units_of_score = LOG2E
                position = key_position(index, kv_start, kv_block, kv_stride, STRIPED)
                scores = modify_scores(
                    scores * scale, position[None, :] - q_pos[:, None], softcap, slopes, SOFTCAP, ALIBI
                )  # fmt: skip
            seen = inside[None, :]
            if HAS_LEFT or HAS_RIGHT:
                seen = seen & visible(
                    q_pos[:, None], index[None, :], keys, HAS_LEFT, HAS_RIGHT, STRIPED
                )
            scores = tl.where(seen, scores, float("-inf"))
            p, row_max, row_sum, alpha = softmax_update(
                scores, row_max, row_sum, units_of_score, True
            )
            weight = PROBABILITY_SCALE if narrow else 1.0
            if V_SCALES == 2:
                scale_rows = base * v_scale_strides[0] + kv_head64 * v_scale_strides[1]
                value_scales = tl.load(
                    v_scale_ptr + scale_rows + slot * v_scale_strides[2], mask=inside, other=0.0
                )
                # Only their ratios within the tile go through the dots' dtype.
                largest = _power_of_two(tl.max(tl.abs(value_scales), 0))
                p *= (value_scales * (weight / largest))[None, :]
            elif narrow:
                p *= weight
            v_rows = base * v_strides[0] + kv_head64 * v_strides[1] + slot * v_strides[2]
            v_mask = inside[:, None]
            if v_dim < BLOCK_DV:
                v_mask = v_mask & (dv[None, :] < v_dim)
            v = tl.load(
                v_ptr + v_rows[:, None] + dv[None, :] * v_strides[3], mask=v_mask, other=0.0
            )
            v = _unquantised(v, q.dtype)
            if V_SCALES == 2:
                products = tl.dot(p.to(q.dtype), v, input_precision=PRECISION)
                acc = acc * alpha[:, None] + products * largest
            else:
                acc = tl.dot(p.to(q.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        if narrow:
            acc *= 1.0 / PROBABILITY_SCALE
        out, lse = softmax_finish(acc, row_max, row_sum)
        if V_SCALES == 1:
            out *= tl.load(v_scale_ptr + b64 * v_scale_strides[0] + kv_head64 * v_scale_strides[1])
            out = tl.where((lse == float("-inf"))[:, None], 0.0, out)  # whatever the scale is

        first_row = item // kv_heads * BLOCK_M
        target = (
            out_ptr, lse_ptr, sinks_ptr, out_strides, b64, kv_head, group, q_len, kv_heads, sink_stride
        )  # fmt: skip
        first = item_begin // share
        pieces_here = (item_begin + item_units - 1) // share - first + 1
        if pieces_here == 1:
            _write(out, lse, first_row + tl.arange(0, BLOCK_M), target, v_dim, BLOCK_DV)
        else:
            # Of a program's two slots the second is for the part with which an item begins.
            if INVARIANT:
                here = program
            else:
                here = program * 2 + (unit == item_begin).to(tl.int32)
            part_rows = here.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
            tl.store(part_lses_ptr + part_rows, lse, mask=rows_in)
            tl.store(
                parts_ptr + part_rows[:, None] * BLOCK_DV + dv[None, :], out, mask=rows_in[:, None]
            )
            # The barrier orders the other warps' stores before the one thread's release.
            tl.debug_barrier()
            arrival_ptr = arrivals_ptr + sequence * items + item
            if tl.atomic_add(arrival_ptr, 1, sem="acq_rel", scope="gpu") == pieces_here - 1:
                tl.store(arrival_ptr, 0)
                _merge_parts(
                    parts_ptr, part_lses_ptr, first_slot if INVARIANT else first, pieces_here, first_row, target,
                    v_dim, INVARIANT, BLOCK_M, BLOCK_DV, MERGE_ROWS, MERGE_PARTS,
                )  # fmt: skip
        unit = item_begin + stop_unit


@triton.jit
def _power_of_two(x):
    """The power of two below x >= 0, kept within 2**±100 so that it and what it divides stay finite."""
    exponent = tl.floor(tl.log2(tl.maximum(x, 1.1754944e-38)))
    return tl.exp2(tl.minimum(tl.maximum(exponent, -100.0), 100.0))


@triton.jit
def _to_half(q):
    """(q (M, D) with each row scaled to below 2, in float16; the powers of two taken out)."""
    q = q.to(tl.float32)
    factor = _power_of_two(tl.max(tl.abs(q), 1))
    return (q * (1.0 / factor)[:, None]).to(tl.float16), factor


@triton.jit
def _unquantised(x, dtype: tl.constexpr):
    """A tile of a cache in the dtype of the dots; uint8 are the bytes of float8_e4m3fn."""
    if x.dtype == tl.uint8:
        # Its exponent and mantissa at float16's place are its value, subnormals included, times 2**-8.
        wide = x.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        value = bits.to(tl.float16, bitcast=True) * 256.0
        return tl.where((wide & 0x7F) == 0x7F, float("nan"), value).to(dtype)
    elif x.dtype == tl.int8 and dtype == tl.float16:
        # 1024 + n is float16's bits 0x6400 + n for n below 1024: no conversion, which is slow for integers.
        bits = (x.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
        return bits.to(tl.float16, bitcast=True) - 1152.0
    else:
        return x.to(dtype)


@triton.jit
def _key_bounds(
    sequence, bounds_of, window,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, STRIPED: tl.constexpr,
):  # fmt: skip
    """(kv_len, q_start, kv_start, keys, begin, end) of one sequence, or of many at once."""
    q_len = bounds_of[3]
    kv_len, q_start, kv_start = sequence_bounds(
        sequence, bounds_of[0], bounds_of[1], bounds_of[2], q_len, bounds_of[4]
    )
    keys = (kv_len, kv_start, window[0], window[1], window[2], window[3])
    begin, _, _, end = key_range(
        q_start, q_start + q_len - 1, keys, HAS_LEFT, HAS_RIGHT, STRIPED, UNIT
    )
    return kv_len, q_start, kv_start, keys, begin, end


@triton.jit
def _units(
    sequence, bounds_of, window,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, STRIPED: tl.constexpr,
):  # fmt: skip
    """Units of a sequence's visible keys; one at least, so that every sequence's output is written."""
    _, _, _, _, begin, end = _key_bounds(sequence, bounds_of, window, HAS_LEFT, HAS_RIGHT, STRIPED)
    return tl.maximum(tl.cdiv(end - begin, UNIT), 1)


@triton.jit
def _merge_parts(
    parts_ptr, part_lses_ptr, first, pieces, first_row, target, v_dim: tl.constexpr,
    INVARIANT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
    MERGE_ROWS: tl.constexpr, MERGE_PARTS: tl.constexpr,
):  # fmt: skip
    """Merges an item's parts in order and writes its rows; `first` is its first program, or slot."""
    rows_in_all = target[6] * target[7]
    dv = tl.arange(0, BLOCK_DV)
    for start in tl.range(0, tl.minimum(rows_in_all - first_row, BLOCK_M), MERGE_ROWS):
        row = start + tl.arange(0, MERGE_ROWS)
        row_in = first_row + row < rows_in_all
        acc = tl.zeros([MERGE_ROWS, BLOCK_DV], tl.float32)
        row_max = tl.full([MERGE_ROWS], float("-inf"), tl.float32)
        row_sum = tl.zeros([MERGE_ROWS], tl.float32)
        for chunk in tl.range(0, pieces, MERGE_PARTS):
            part = chunk + tl.arange(0, MERGE_PARTS)
            if INVARIANT:
                slot = first + part
            else:
                slot = (first + part) * 2 + (part == 0).to(tl.int32)
            inside = (part < pieces)[:, None] & row_in[None, :]
            rows = slot.to(tl.int64)[:, None] * BLOCK_M + row[None, :]
            # Past the L1 cache, which does not see what other multiprocessors write.
            lses = tl.load(
                part_lses_ptr + rows, mask=inside, other=float("-inf"), cache_modifier=".cg"
            )
            outs = tl.load(
                parts_ptr + rows[:, :, None] * BLOCK_DV + dv[None, None, :],
                mask=inside[:, :, None], other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            acc, row_max, row_sum = merge_update(acc, row_max, row_sum, outs, lses)
        out, lse = merge_finish(acc, row_max, row_sum)
        _write(out, lse, first_row + row, target, v_dim, BLOCK_DV)


@triton.jit
def _write(out, lse, row, target, v_dim: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Writes the finished rows of an item."""
    out_ptr, lse_ptr, sinks_ptr, strides, b64, kv_head, group, q_len, kv_heads, sink_stride = target
    head = kv_head * group + row // q_len
    rows_in = row < group * q_len
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + head * sink_stride, mask=rows_in, other=float("-inf")).to(
            tl.float32
        )
        out, lse = add_sinks(out, lse, sinks)
    head64 = head.to(tl.int64)
    token = (row % q_len).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    rows = b64 * strides[0] + head64 * strides[1] + token * strides[2]
    tl.store(
        out_ptr + rows[:, None] + dv[None, :] * strides[3], out.to(out_ptr.dtype.element_ty),
        mask=rows_in[:, None] & (dv[None, :] < v_dim),
    )  # fmt: skip
    tl.store(lse_ptr + (b64 * kv_heads * group + head64) * q_len + token, lse, mask=rows_in)
