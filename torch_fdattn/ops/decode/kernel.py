"""Split-KV decode in portable Triton: contiguous and paged caches, any lengths.

Flash-Decoding: each program walks along one split of one work tile's keys (`schedule.py`). Where a work tile has
more than one split, its programs leave (out, lse) in fp32 for the merge kernel (`merge.py`), in slots in the
order of work tiles, then splits. The query heads of one KV head and the T query tokens are packed into the rows
of one tile (row = head_in_group · T + token): K and V are read once a group.

Shapes: q (B, H, T, D), out (B, H, T, DV); k (B, H_kv, N, D), v (B, H_kv, N, DV), or pages (P, H_kv, PAGE, D)
behind page_table (B, pages a sequence); any strides. parts (slots, BLOCK_M, BLOCK_DV) and part_lses (slots,
BLOCK_M) fp32.
Limit: more than 64 rows a KV head (32 in fp32) are tiled and read the cache again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_fdattn.launch.pdl import await_previous, pdl_trigger
from torch_fdattn.ops.decode.merge import write_rows
from torch_fdattn.ops.decode.one_byte import both, load_queries, power_of_two, unquantised
from torch_fdattn.ops.decode.schedule import (
    UNIT,
    cut,
    even_splits,
    key_bounds,
    place_of,
    splits_of,
    units_between,
)
from torch_fdattn.ops.online_softmax import LOG2E, softmax_finish, softmax_update
from torch_fdattn.ops.score_tiles import (
    mask_scores,
    mask_stride,
    modify_scores,
)
from torch_fdattn.ops.tiles import key_position, keys_before, visible

#: Quantised caches are multiplied in float16, whose smallest number is 6e-8: probabilities are made larger.
PROBABILITY_SCALE = tl.constexpr(16384.0)


@triton.jit(
    do_not_specialize=[
        "batch", "kv_capacity", "page_count", "table_stride", "window_left", "window_right", "kv_block",
        "kv_stride", "target_splits", "ragged_target_splits", "group_size",
    ]
)  # fmt: skip
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, parts_ptr, part_lses_ptr,
    kv_lens_ptr, q_start_ptr, kv_start_ptr, page_table_ptr, k_scale_ptr, v_scale_ptr, slopes_ptr, mask_ptr,
    sinks_ptr,
    q_strides, k_strides, v_strides, out_strides, k_scale_strides, v_scale_strides, slope_strides, mask_strides,
    sink_stride,
    batch, q_len, kv_capacity, page_count, table_stride, table_step, window_left, window_right, kv_block, kv_stride,
    global_lens, scale, softcap, target_splits, ragged_target_splits, group_size, kv_heads: tl.constexpr, group: tl.constexpr,
    head_dim: tl.constexpr, v_dim: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, PAGE: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, BLOCK_CYCLIC: tl.constexpr, SOFTCAP: tl.constexpr, K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr, MASK_ROWS: tl.constexpr, INVARIANT: tl.constexpr, MIN_UNITS: tl.constexpr,
    TWICE: tl.constexpr, SPLIT: tl.constexpr, GROUPED: tl.constexpr, PDL: tl.constexpr, KEYS_FIRST: tl.constexpr, HEADS_FIRST: tl.constexpr,
    PAIRS: tl.constexpr, PTX: tl.constexpr, CAST_FIRST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    ALIBI: tl.constexpr = slopes_ptr is not None
    MASKED: tl.constexpr = mask_ptr is not None
    k_row = K_ROW if K_ROW > 0 else k_strides[2]
    v_row = V_ROW if V_ROW > 0 else v_strides[2]
    await_previous(PDL)
    pdl_trigger(PDL)
    work_tiles = kv_heads * tl.cdiv(group * q_len, BLOCK_M)
    bounds_of = (kv_lens_ptr, q_start_ptr, kv_start_ptr, q_len, kv_capacity, global_lens)
    window = (window_left, window_right, kv_block, kv_stride)
    if BLOCK_B == 1:
        place, work_tile = tl.program_id(HEADS_FIRST), tl.program_id(not HEADS_FIRST)
        sequence = tl.program_id(2)
    else:
        program = tl.program_id(0)
        first, first_slot = 0, 0
        if GROUPED:
            first, first_slot = tl.program_id(1) * group_size, tl.program_id(1) * tl.num_programs(0)
            batch = tl.minimum(batch - first, group_size)
        share, all_splits = cut(
            first, batch, bounds_of, window, work_tiles, target_splits, ragged_target_splits, HAS_LEFT, HAS_RIGHT, BLOCK_CYCLIC, MIN_UNITS,
            TWICE, INVARIANT, BLOCK_B,
        )  # fmt: skip
        sequence, before = place_of(program, all_splits, work_tiles)
        if sequence < 0:  # beyond the last split
            return
        sequence += first
    _, q_start, kv_start, keys, begin, end = key_bounds(
        sequence, bounds_of, window, HAS_LEFT, HAS_RIGHT, BLOCK_CYCLIC
    )
    units = units_between(begin, end)
    if BLOCK_B == 1:
        splits = 1
        if SPLIT:
            splits = even_splits(units, target_splits, MIN_UNITS, TWICE, INVARIANT)
            if place >= splits:
                return
        part = (sequence * work_tiles + work_tile) * splits + place
    else:
        splits = splits_of(units, share, INVARIANT)
        work_tile, place = (program - before) // splits, (program - before) % splits
        if HEADS_FIRST:
            work_tile, place = (program - before) % work_tiles, (program - before) // work_tiles
        part = first_slot + before + work_tile * splits + place

    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    # PAIRS: two neighbours of one byte each are read as one int16, and strides of k and v count these. Tiles then go
    # through shared memory to where the products want them as those of 16-bit caches do, where bytes would be moved one by
    # one, and come apart there, into dims 0, 2, 4 … and dims 1, 3, 5 …: two products in place of one.
    # CAST_FIRST: other tiles of bytes are cast as they were loaded, and go through shared memory as 16 bits.
    WIDTH: tl.constexpr = 2 if PAIRS else 1
    dk = tl.arange(0, BLOCK_D // WIDTH).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV // WIDTH).to(tl.int64)
    # The splits of a work tile take its tiles in turn, so that all of them read the same part of memory at a time.
    first_key = begin + place * BLOCK_N
    step = splits * BLOCK_N
    kv_head = work_tile % kv_heads
    row = work_tile // kv_heads * BLOCK_M + tl.arange(0, BLOCK_M)
    rows_in = row < group * q_len
    head = kv_head * group + row // q_len
    q_pos = q_start + row % q_len
    b64 = sequence.to(tl.int64)
    kv_head64 = kv_head.to(tl.int64)
    q_rows = (
        b64 * q_strides[0] + head.to(tl.int64) * q_strides[1] + (row % q_len).to(tl.int64) * q_strides[2]
    )  # fmt: skip
    # One byte becomes float16 by one instruction for two, bfloat16 only by a conversion at a quarter of the
    # rate. Rows of q scaled to below 2 by a power of two lose nothing in it that their sums would show.
    narrow: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth == 8
    scale_rows_too: tl.constexpr = narrow and q_ptr.dtype.element_ty == tl.bfloat16
    q_ptrs = q_ptr + q_rows[:, None] + d[None, :] * q_strides[3]
    q_mask = rows_in[:, None] & (d[None, :] < head_dim)
    q, row_factor = load_queries(q_ptrs, q_mask, scale_rows_too)
    q_odd = q
    if PAIRS:
        q, q_odd = tl.split(tl.reshape(q, [BLOCK_M, BLOCK_D // 2, 2]))
    if KEYS_FIRST:
        # Set in the first step of the loop: there the loads of the first tiles, which the compiler puts before
        # the loop, are under way; here it would wait for q, which goes through shared memory, before them.
        loaded_q, loaded_odd = q, q_odd
        q, q_odd = tl.zeros_like(q), tl.zeros_like(q)
    if ALIBI:
        slopes = tl.load(
            slopes_ptr + b64 * slope_strides[0] + head.to(tl.int64) * slope_strides[1],
            mask=rows_in,
            other=0.0,
        ).to(tl.float32)
    else:
        slopes = tl.zeros([BLOCK_M], tl.float32)
    if MASKED:
        mask_head_ptr = mask_ptr + b64 * mask_stride(mask_strides, 0)
        mask_rows = head.to(tl.int64) * mask_stride(mask_strides, 1)
        mask_rows += (row % q_len).to(tl.int64) * mask_stride(mask_strides, 2)
    head_scale = 1.0
    if K_SCALES == 1:
        head_scale = tl.load(
            k_scale_ptr + b64 * k_scale_strides[0] + kv_head64 * k_scale_strides[1]
        )

    acc = tl.zeros([BLOCK_M, BLOCK_DV // WIDTH], tl.float32)
    acc_odd = acc
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    oldest = first_key
    if HAS_LEFT:  # older keys are not even read: a window may have freed their pages
        oldest = keys_before(q_start - window_left, kv_start, kv_block, kv_stride, BLOCK_CYCLIC)
    if PAIRS:
        k_tile_ptr = k_ptr.to(tl.pointer_type(tl.int16))
        v_tile_ptr = v_ptr.to(tl.pointer_type(tl.int16))
    else:
        k_tile_ptr, v_tile_ptr = k_ptr, v_ptr
    k_head_ptr = k_tile_ptr + kv_head64 * k_strides[1]
    v_head_ptr = v_tile_ptr + kv_head64 * v_strides[1]
    if PAGE > 0:
        pages_ptr = page_table_ptr + b64 * table_stride
        # One tile ahead, so that the loads of keys do not wait for the numbers of their pages; the first ones
        # without waiting for the length, too: all kv_capacity keys have an entry, if perhaps garbage.
        next_page = _pages(
            pages_ptr, first_key + n, oldest, kv_capacity, table_step, HAS_LEFT, PAGE
        )
        next_page = tl.where(first_key + n < end, next_page, -1)
    else:
        k_head_ptr += b64 * k_strides[0]
        v_head_ptr += b64 * v_strides[0]
    for start in tl.range(first_key, end, step):
        index = start + n
        if PAGE > 0:
            page = next_page
            next_page = _pages(pages_ptr, index + step, oldest, end, table_step, HAS_LEFT, PAGE)
            # Unsigned, a negative page is beyond the last one; so is the -1 of keys that do not count.
            inside = page.to(tl.uint32, bitcast=True) < page_count.to(tl.uint32)
            base = page.to(tl.int64)
            # Tiles begin at multiples of UNIT: in small pages a tile's rows have the same slots every time.
            slot = ((n if UNIT % PAGE == 0 else index) % PAGE).to(tl.int64)
            k_rows = base * k_strides[0] + slot * k_row
            v_rows = base * v_strides[0] + slot * v_row
        else:
            inside = index < end
            if HAS_LEFT:
                inside = inside & (index >= oldest)
            base = b64
            slot = index.to(tl.int64)
            k_rows = slot * k_row
            v_rows = slot * v_row
        k_mask = inside[None, :]
        if head_dim < BLOCK_D:
            k_mask = k_mask & (dk[:, None] < head_dim // WIDTH)
        k = tl.load(
            k_head_ptr + k_rows[None, :] + dk[:, None] * k_strides[3], mask=k_mask, other=0.0
        )
        if KEYS_FIRST:  # noqa: SIM102 (one is known to the compiler, the other is not)
            if start == first_key:
                q = _opaque(loaded_q)
                if PAIRS:
                    q_odd = _opaque(loaded_odd)
        if PAIRS:
            even, odd = both(k, k_ptr.dtype.element_ty, q.dtype, PTX)
            scores = tl.dot(q_odd, odd, tl.dot(q, even))
        else:
            k = unquantised(k, q.dtype)
            if CAST_FIRST:
                k = _opaque(k)
            scores = tl.dot(q, k, input_precision=PRECISION)
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
            position = key_position(index, kv_start, kv_block, kv_stride, BLOCK_CYCLIC)
            scores = modify_scores(
                scores * scale, position[None, :] - q_pos[:, None], softcap, slopes[:, None], SOFTCAP, ALIBI
            )  # fmt: skip
        if MASKED:
            columns = index.to(tl.int64) * mask_stride(mask_strides, 3)
            if MASK_ROWS:
                entries = tl.load(
                    mask_head_ptr + mask_rows[:, None] + columns[None, :],
                    mask=rows_in[:, None] & inside[None, :],
                    other=0,
                )
            else:  # the same for all: padding, as a rule
                entries = tl.load(mask_head_ptr + columns, mask=inside, other=0)[None, :]
            scores, units_of_score = mask_scores(scores, entries, units_of_score)
        seen = inside[None, :]
        if HAS_LEFT or HAS_RIGHT:
            seen = seen & visible(
                q_pos[:, None], index[None, :], keys, HAS_LEFT, HAS_RIGHT, BLOCK_CYCLIC
            )
        scores = tl.where(seen, scores, float("-inf"))
        p, row_max, row_sum, alpha = softmax_update(scores, row_max, row_sum, units_of_score, True)
        weight = PROBABILITY_SCALE if narrow else 1.0
        largest = 1.0
        if V_SCALES == 2:
            scale_rows = base * v_scale_strides[0] + kv_head64 * v_scale_strides[1]
            value_scales = tl.load(
                v_scale_ptr + scale_rows + slot * v_scale_strides[2], mask=inside, other=0.0
            )
            # Only their ratios within the tile go through the dots' dtype.
            largest = power_of_two(tl.max(tl.abs(value_scales), 0))
            p *= (value_scales * (weight / largest))[None, :]
        elif narrow:
            p *= weight
        v_mask = inside[:, None]
        if v_dim < BLOCK_DV:
            v_mask = v_mask & (dv[None, :] < v_dim // WIDTH)
        v = tl.load(
            v_head_ptr + v_rows[:, None] + dv[None, :] * v_strides[3], mask=v_mask, other=0.0
        )
        p = p.to(q.dtype)
        if PAIRS:
            even, odd = both(v, v_ptr.dtype.element_ty, q.dtype, PTX)
            acc = _add_values(acc, alpha, p, even, largest, V_SCALES == 2, PRECISION)
            acc_odd = _add_values(acc_odd, alpha, p, odd, largest, V_SCALES == 2, PRECISION)
        else:
            v = unquantised(v, q.dtype)
            if CAST_FIRST:
                v = _opaque(v)
            acc = _add_values(acc, alpha, p, v, largest, V_SCALES == 2, PRECISION)
    if PAIRS:
        acc = tl.interleave(acc, acc_odd)
    if narrow:
        acc *= 1.0 / PROBABILITY_SCALE
    out, lse = softmax_finish(acc, row_max, row_sum)
    if V_SCALES == 1:
        out *= tl.load(v_scale_ptr + b64 * v_scale_strides[0] + kv_head64 * v_scale_strides[1])
        out = tl.where((lse == float("-inf"))[:, None], 0.0, out)  # whatever the scale is

    target = (
        out_ptr, lse_ptr, sinks_ptr, out_strides, b64, kv_head, group, q_len, kv_heads, sink_stride
    )  # fmt: skip
    if SPLIT and splits > 1:
        slots = part.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(part_lses_ptr + slots, lse, mask=rows_in)
        columns = tl.arange(0, BLOCK_DV)
        tl.store(
            parts_ptr + slots[:, None] * BLOCK_DV + columns[None, :], out, mask=rows_in[:, None]
        )
    else:
        write_rows(out, lse, row, tl.arange(0, BLOCK_DV), True, target, v_dim)


@triton.jit
def _pages(ptr, index, oldest, stop, step, HAS_LEFT: tl.constexpr, PAGE: tl.constexpr):
    """The pages of keys (N,); -1 for keys that do not count."""
    inside = index < stop
    if HAS_LEFT:
        inside = inside & (index >= oldest)
    return tl.load(ptr + (index // PAGE).to(tl.int64) * step, mask=inside, other=-1)


@triton.jit
def _add_values(acc, alpha, p, v, largest, SCALED: tl.constexpr, PRECISION: tl.constexpr):
    """acc * alpha + p v * largest; without SCALED largest is 1."""
    if SCALED:
        return acc * alpha[:, None] + tl.dot(p, v, input_precision=PRECISION) * largest
    return tl.dot(p, v, acc * alpha[:, None], input_precision=PRECISION)


@triton.jit
def _opaque(x):
    """x, by an instruction that the compiler moves nowhere; NVIDIA's only."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 4 // (x.dtype.primitive_bitwidth // 8)
    )
