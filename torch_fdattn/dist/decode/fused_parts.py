"""Strategy `fused` where the local decode was split: its exchange merges the parts of this rank's rows itself.

Two launches in place of three: the pieces, and this kernel, which is launched as their dependent. While the last
pieces are read its programs find out how many parts there are and which call this is; then each merges the parts
of its rows in order (`ops/decode/merge.py`) and goes on as `fused.py` does. A program takes CHUNK_D dims of its
rows, as its one warp would otherwise merge the parts of a whole row alone; each chunk sends the same lses.

For items that are all cut alike: one sequence, or no lengths (`EvenCut`). Ranks may differ in whether they come
this way, as what they send is the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.channel import channel
from torch_fdattn.dist.decode.fused import exchange_rows, tile_of, words_bytes
from torch_fdattn.dist.decode.rows import (
    Rows,
    coordinates,
    outputs,
    own_heads,
    own_rows,
    starts_early,
)
from torch_fdattn.dist.faults import timeout_ns
from torch_fdattn.dist.groups import rank_and_size
from torch_fdattn.dist.signals import at_rank, may_send, take_epoch
from torch_fdattn.launch.launches import launch
from torch_fdattn.launch.pdl import await_previous
from torch_fdattn.ops.decode.launch import Unmerged
from torch_fdattn.ops.decode.merge import merged_parts
from torch_fdattn.ops.decode.schedule import even_splits, key_bounds, units_between
from torch_fdattn.ops.launch import on_device, power_of_two
from torch_fdattn.ops.library import launches

#: Dims a program, and fp32 elements of parts that its one warp holds at once: 128 registers a thread.
CHUNK, PART_ELEMENTS = 32, 4096


@triton.jit
def first_slot(row, pieces, shape, kv_heads, BLOCK_M: tl.constexpr):
    """Where the first parts of rows (M,) lie: parts are in the order of items, then pieces (`schedule.py`)."""
    batch, heads, q_len, _ = shape
    b, h, t = coordinates(row, batch, q_len)
    group = heads // kv_heads
    packed = h % group * q_len + t
    items = kv_heads * tl.cdiv(group * q_len, BLOCK_M)
    item = b * items + packed // BLOCK_M * kv_heads + h // group
    return (item * pieces).to(tl.int64) * BLOCK_M + packed % BLOCK_M


@triton.jit(
    do_not_specialize=[
        "half_bytes", "limit_ns", "rank", "batch", "rows", "share", "first_head", "kv_capacity", "window_left",
        "window_right", "kv_block", "kv_stride", "wanted",
    ]
)  # fmt: skip
def _fused_parts_kernel(
    part_ptr, part_lse_ptr, parts_ptr, part_lses_ptr, kv_lens_ptr, q_start_ptr, kv_start_ptr, out_ptr, lse_ptr,
    addresses_ptr, state_ptr, fault_ptr, part_strides, half_bytes, limit_ns, rank, batch, rows, share, first_head,
    kv_capacity, window_left, window_right, kv_block, kv_stride, wanted, whole, kv_heads: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, STRIPED: tl.constexpr, LEAST: tl.constexpr, TWICE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, MERGE_PARTS: tl.constexpr, heads: tl.constexpr,
    out_heads: tl.constexpr, q_len: tl.constexpr, v_dim: tl.constexpr, WORLD: tl.constexpr, SOURCES: tl.constexpr,
    OWNERS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    CHUNKS: tl.constexpr = BLOCK_D // CHUNK_D
    shape = (batch, heads, q_len, v_dim)
    channel = (addresses_ptr, half_bytes, state_ptr, fault_ptr, limit_ns)
    row, row_in, owner = tile_of(tl.program_id(0) // CHUNKS, share, OWNERS, BLOCK_R)
    d = tl.program_id(0) % CHUNKS * CHUNK_D + tl.arange(0, CHUNK_D)
    # Until the wait, what is older than the pieces' kernel, which itself does not start early.
    epoch = take_epoch(state_ptr, tl.num_programs(0))
    sent = row_in & may_send(state_ptr, epoch)
    address = at_rank(addresses_ptr, rank, epoch, half_bytes)
    _, _, _, _, begin, end = key_bounds(
        0, (kv_lens_ptr, q_start_ptr, kv_start_ptr, q_len, kv_capacity, whole),
        (window_left, window_right, kv_block, kv_stride), HAS_LEFT, HAS_RIGHT, STRIPED,
    )  # fmt: skip
    pieces = even_splits(units_between(begin, end), wanted, LEAST, TWICE, False)
    await_previous(PDL)
    if pieces == 1:  # written by its one program
        values, lses = own_rows(row, row_in, d, (part_ptr, part_lse_ptr, part_strides), shape)
    else:
        slot = first_slot(row, pieces, shape, kv_heads, BLOCK_M)
        values, lses = merged_parts(
            (parts_ptr, part_lses_ptr), slot, row_in, d, pieces, BLOCK_M, BLOCK_DV, MERGE_PARTS
        )
    exchange_rows(
        (values, lses), row, sent, row_in, d, owner, rank, address, rows, epoch, channel,
        (out_ptr, lse_ptr, first_head, out_heads), shape, WORLD, SOURCES, OWNERS, BLOCK_D,
    )  # fmt: skip


def merge(
    part: Tensor, part_lse: Tensor, unmerged: Unmerged, dtype: torch.dtype, group_name: str, head_sharded: bool
):  # fmt: skip
    """The merged (out, lse) of all ranks' partial results, where this rank's are `unmerged`, or in (part, part_lse)."""
    rows, cut = Rows.of(part, rank_and_size(group_name)[1]), unmerged.cut
    where = channel(group_name, "fused", words_bytes(rows), part.device)
    first_head, heads = own_heads(rows.heads, where, head_sharded)
    out, lse = outputs(part, dtype, heads)
    owners = rows.world if head_sharded else 1
    block, tiles = rows.tile(owners)
    chunk = min(CHUNK, rows.block_d)
    at_once = min(
        power_of_two(cut.splits), max(1, PART_ELEMENTS // (block * chunk))
    )  # fmt: skip
    early = starts_early(part)
    where.enter()
    launches["dist_merge/fused_parts"] += 1
    with on_device(part):
        launch(
            _fused_parts_kernel, owners * tiles * (rows.block_d // chunk),
            part, part_lse, unmerged.parts, unmerged.part_lses, *unmerged.bounds, out, lse, where.memory.addresses,
            where.state, where.fault.tensor, part.stride(), where.half_bytes, timeout_ns(), where.rank, rows.batch,
            rows.count, rows.count // owners, first_head, *cut.numbers, cut.shard, cut.kv_heads, *cut.flags,
            cut.min_units, cut.twice, cut.block_m, cut.block_dv, at_once, rows.heads, heads, rows.q_len, rows.v_dim,
            rows.world, rows.sources, owners, block, rows.block_d, chunk, early, num_warps=1,
            **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return out, lse
