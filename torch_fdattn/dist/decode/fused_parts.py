"""Strategy `fused` where the local decode was split: its exchange merges the parts of this rank's rows itself.

Two launches in place of three: the splits, and this kernel, which is launched as their dependent. While the last
splits are read its programs find out how many parts there are and which call this is; then each merges the parts
of its rows in order (`ops/decode/merge.py`) and goes on as `fused.py` does. A program takes CHUNK_D dims of its
rows, as its one warp would otherwise merge the parts of a whole row alone; each chunk sends the same lses.

For work tiles that are all split alike: one sequence, or no lengths (`EvenCut`). Ranks may differ in whether they come
this way, as what they send is the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.decode.fused import exchange_rows, packet_bytes
from torch_fdattn.dist.decode.rows import (
    RowExchange,
    coordinates,
    own_rows,
    tile_of,
)
from torch_fdattn.dist.symm.signals import at_rank, may_send, take_epoch
from torch_fdattn.launch.launches import launch
from torch_fdattn.launch.pdl import FROM_L2, await_previous
from torch_fdattn.ops.decode.launch import Unmerged
from torch_fdattn.ops.decode.merge import merged_parts
from torch_fdattn.ops.decode.schedule import even_splits, key_bounds, units_between
from torch_fdattn.ops.launch import power_of_two
from torch_fdattn.ops.library import launches
from torch_fdattn.ops.pdl import pdl_option, uses_pdl

#: Dims a program, and fp32 elements of parts that its one warp holds at once: 128 registers a thread.
CHUNK, PART_ELEMENTS = 32, 4096


@triton.jit
def first_slot(row, splits, shape, kv_heads, BLOCK_M: tl.constexpr):
    """Where the first parts of rows (M,) lie: parts are in the order of work tiles, then splits (`schedule.py`)."""
    batch, heads, q_len, _ = shape
    b, h, t = coordinates(row, batch, q_len)
    group = heads // kv_heads
    packed = h % group * q_len + t
    work_tiles = kv_heads * tl.cdiv(group * q_len, BLOCK_M)
    work_tile = b * work_tiles + packed // BLOCK_M * kv_heads + h // group
    return (work_tile * splits).to(tl.int64) * BLOCK_M + packed % BLOCK_M


@triton.jit(
    do_not_specialize=[
        "half_bytes", "limit_ns", "rank", "batch", "rows", "share", "first_head", "kv_capacity", "window_left",
        "window_right", "kv_block", "kv_stride", "target_splits",
    ]
)  # fmt: skip
def _fused_parts_kernel(
    part_ptr, part_lse_ptr, parts_ptr, part_lses_ptr, kv_lens_ptr, q_start_ptr, kv_start_ptr, out_ptr, lse_ptr,
    addresses_ptr, state_ptr, fault_ptr, part_strides, half_bytes, limit_ns, rank, batch, rows, share, first_head,
    kv_capacity, window_left, window_right, kv_block, kv_stride, target_splits, global_lens, kv_heads: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK_CYCLIC: tl.constexpr, MIN_UNITS: tl.constexpr, TWICE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, MERGE_PARTS: tl.constexpr, heads: tl.constexpr,
    out_heads: tl.constexpr, q_len: tl.constexpr, v_dim: tl.constexpr, WORLD: tl.constexpr, SOURCES: tl.constexpr,
    OWNERS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    CHUNKS: tl.constexpr = BLOCK_D // CHUNK_D
    shape = (batch, heads, q_len, v_dim)
    channel = (addresses_ptr, half_bytes, state_ptr, fault_ptr, limit_ns)
    row, row_in, owner = tile_of(tl.program_id(0) // CHUNKS, share, OWNERS, BLOCK_R)
    d = tl.program_id(0) % CHUNKS * CHUNK_D + tl.arange(0, CHUNK_D)
    # Until the wait, what is older than the splits' kernel, which lets this one in behind its own wait.
    epoch = take_epoch(state_ptr, tl.num_programs(0))
    sent = row_in & may_send(state_ptr, epoch)
    address = at_rank(addresses_ptr, rank, epoch, half_bytes)
    _, _, _, _, begin, end = key_bounds(
        0, (kv_lens_ptr, q_start_ptr, kv_start_ptr, q_len, kv_capacity, global_lens),
        (window_left, window_right, kv_block, kv_stride), HAS_LEFT, HAS_RIGHT, BLOCK_CYCLIC, FROM_L2,
    )  # fmt: skip
    splits = even_splits(units_between(begin, end), target_splits, MIN_UNITS, TWICE, False)
    await_previous(PDL)
    if splits == 1:  # written by its one program
        values, lses = own_rows(row, row_in, d, (part_ptr, part_lse_ptr, part_strides), shape)
    else:
        slot = first_slot(row, splits, shape, kv_heads, BLOCK_M)
        values, lses = merged_parts(
            (parts_ptr, part_lses_ptr), slot, row_in, d, splits, BLOCK_M, BLOCK_DV, MERGE_PARTS
        )
    exchange_rows(
        (values, lses), row, sent, row_in, d, owner, rank, address, rows, epoch, channel,
        (out_ptr, lse_ptr, first_head, out_heads), shape, WORLD, SOURCES, OWNERS, BLOCK_D,
    )  # fmt: skip


def merge(
    part: Tensor, part_lse: Tensor, unmerged: Unmerged, dtype: torch.dtype, group_name: str, head_sharded: bool
):  # fmt: skip
    """The merged (out, lse) of all ranks' partial results, where this rank's are `unmerged`, or in (part, part_lse)."""
    call = RowExchange.begin(part, dtype, group_name, "fused", packet_bytes, head_sharded)
    cut, block_d = unmerged.cut, call.rows.block_d
    chunk = min(CHUNK, block_d)
    at_once = min(power_of_two(cut.splits), max(1, PART_ELEMENTS // (call.block * chunk)))
    pdl = uses_pdl(part)
    launches["dist_merge/fused_parts"] += 1
    launch(
        _fused_parts_kernel, call.owners * call.tiles * (block_d // chunk),
        part, part_lse, unmerged.parts, unmerged.part_lses, *unmerged.bounds, *call.memory, part.stride(),
        *call.numbers, *cut.numbers, cut.shard, cut.kv_heads, *cut.flags, cut.min_units, cut.twice, cut.block_m,
        cut.block_dv, at_once, *call.constants, chunk, pdl, num_warps=1, **pdl_option(pdl),
    )  # fmt: skip
    return call.out, call.lse
