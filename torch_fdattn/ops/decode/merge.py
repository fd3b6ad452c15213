"""The second kernel of a split decode: merges the parts of each work tile, in order, and writes its rows.

It is launched as a dependent of the first (programmatic dependent launch, from capability 9.0): its programs
start while the last splits are still being read, and wait for them on the device. A program takes a few
rows of a work tile and MERGE_D of their dims, so that even one sequence's merge is spread over the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from torch_fdattn.launch.pdl import FROM_L2, await_previous, pdl_trigger
from torch_fdattn.ops.decode.schedule import (
    cut,
    even_splits,
    first_program,
    key_bounds,
    splits_of,
    units_between,
)
from torch_fdattn.ops.online_softmax import merge_finish, merge_update
from torch_fdattn.ops.score_tiles import add_sinks


@triton.jit(
    do_not_specialize=[
        "batch", "kv_capacity", "window_left", "window_right", "kv_block", "kv_stride", "target_splits", "ragged_target_splits",
        "group_size", "group_slots",
    ]
)  # fmt: skip
def _merge_kernel(
    out_ptr, lse_ptr, parts_ptr, part_lses_ptr, kv_lens_ptr, q_start_ptr, kv_start_ptr, sinks_ptr,
    out_strides, sink_stride, batch, q_len, kv_capacity, window_left, window_right, kv_block, kv_stride, global_lens,
    target_splits, ragged_target_splits, group_size, group_slots, kv_heads: tl.constexpr, group: tl.constexpr, v_dim: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_CYCLIC: tl.constexpr, GROUPED: tl.constexpr,
    INVARIANT: tl.constexpr, MIN_UNITS: tl.constexpr, TWICE: tl.constexpr, PDL: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, MERGE_ROWS: tl.constexpr, MERGE_PARTS: tl.constexpr,
    MERGE_D: tl.constexpr,
):  # fmt: skip
    CHUNKS: tl.constexpr = BLOCK_DV // MERGE_D
    blocks = tl.cdiv(group * q_len, MERGE_ROWS)
    chunk = tl.program_id(0) % CHUNKS
    first_row = tl.program_id(0) // CHUNKS % blocks * MERGE_ROWS
    kv_head = tl.program_id(0) // (CHUNKS * blocks) % kv_heads
    sequence = tl.program_id(0) // (CHUNKS * blocks * kv_heads)

    work_tiles = kv_heads * tl.cdiv(group * q_len, BLOCK_M)
    work_tile = first_row // BLOCK_M * kv_heads + kv_head
    bounds_of = (kv_lens_ptr, q_start_ptr, kv_start_ptr, q_len, kv_capacity, global_lens)
    window = (window_left, window_right, kv_block, kv_stride)
    first = 0
    if BLOCK_B > 1:
        first_sequence, first_slot = 0, 0
        if GROUPED:
            first_sequence = sequence // group_size * group_size
            first_slot = sequence // group_size * group_slots
            batch = tl.minimum(batch - first_sequence, group_size)
        share, all_splits = cut(
            first_sequence, batch, bounds_of, window, work_tiles, target_splits, ragged_target_splits, HAS_LEFT, HAS_RIGHT, BLOCK_CYCLIC,
            MIN_UNITS, TWICE, INVARIANT, BLOCK_B, FROM_L2,
        )  # fmt: skip
        first = first_slot + first_program(sequence - first_sequence, all_splits, work_tiles)
    _, _, _, _, begin, end = key_bounds(
        sequence, bounds_of, window, HAS_LEFT, HAS_RIGHT, BLOCK_CYCLIC, FROM_L2
    )
    units = units_between(begin, end)
    if BLOCK_B == 1:
        splits = even_splits(units, target_splits, MIN_UNITS, TWICE, INVARIANT)
        first = sequence * work_tiles * splits
    else:
        splits = splits_of(units, share, INVARIANT)
    first += work_tile * splits
    await_previous(PDL)
    pdl_trigger(PDL)
    if splits == 1:  # written by its one program
        return

    row = first_row + tl.arange(0, MERGE_ROWS)
    row_in = row < group * q_len
    d = chunk * MERGE_D + tl.arange(0, MERGE_D)
    slot = first.to(tl.int64) * BLOCK_M + row % BLOCK_M
    out, lse = merged_parts(
        (parts_ptr, part_lses_ptr), slot, row_in, d, splits, BLOCK_M, BLOCK_DV, MERGE_PARTS
    )
    target = (
        out_ptr, lse_ptr, sinks_ptr, out_strides, sequence.to(tl.int64), kv_head, group, q_len, kv_heads, sink_stride
    )  # fmt: skip
    write_rows(out, lse, row, d, chunk == 0, target, v_dim)


@triton.jit
def merged_parts(
    parts, slot, row_in, d, splits, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, MERGE_PARTS: tl.constexpr
):  # fmt: skip
    """(out (M, D), lse (M,)) of rows, of which the first part's is at `slot` (M,) and the next part's BLOCK_M further."""
    parts_ptr, part_lses_ptr = parts
    acc = tl.zeros([slot.shape[0], d.shape[0]], tl.float32)
    row_max = tl.full([slot.shape[0]], float("-inf"), tl.float32)
    row_sum = tl.zeros([slot.shape[0]], tl.float32)
    for start in tl.range(0, splits, MERGE_PARTS):
        part = start + tl.arange(0, MERGE_PARTS)
        inside = (part < splits)[:, None] & row_in[None, :]
        rows = slot[None, :] + part.to(tl.int64)[:, None] * BLOCK_M
        lses = tl.load(part_lses_ptr + rows, mask=inside, other=float("-inf"))
        outs = tl.load(
            parts_ptr + rows[:, :, None] * BLOCK_DV + d[None, None, :], mask=inside[:, :, None], other=0.0
        )  # fmt: skip
        acc, row_max, row_sum = merge_update(acc, row_max, row_sum, outs, lses)
    return merge_finish(acc, row_max, row_sum)


@triton.jit
def write_rows(out, lse, row, d, writes_lse, target, v_dim: tl.constexpr):
    """Writes finished rows (M,) of a work tile: their dims d, and their lse."""
    out_ptr, lse_ptr, sinks_ptr, strides, b64, kv_head, group, q_len, kv_heads, sink_stride = target
    head = kv_head * group + row // q_len
    rows_in = row < group * q_len
    head64 = head.to(tl.int64)
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + head64 * sink_stride, mask=rows_in, other=float("-inf"))
        out, lse = add_sinks(out, lse, sinks.to(tl.float32))
    token = (row % q_len).to(tl.int64)
    rows = b64 * strides[0] + head64 * strides[1] + token * strides[2]
    tl.store(
        out_ptr + rows[:, None] + d.to(tl.int64)[None, :] * strides[3], out.to(out_ptr.dtype.element_ty),
        mask=rows_in[:, None] & (d[None, :] < v_dim),
    )  # fmt: skip
    lse_ptrs = lse_ptr + (b64 * kv_heads * group + head64) * q_len + token
    tl.store(lse_ptrs, lse, mask=rows_in & writes_lse)
