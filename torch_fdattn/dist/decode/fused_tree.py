"""Strategy `fused` of `invariant_block`: one kernel merges a rank's blocks, sends the node, and merges the nodes of all ranks.

As `fused.py`, but for the order of sums: a program has one row, merges its states in the tree of their positions
(`ops/merge_states/tree_kernel.py`), sends what they merge to as LL packets, and merges the ranks' nodes in the same tree. So
the results have the bits that the launches of `rank_invariant.py` give, which are three in place of this one. Only where each
rank has one node, and for few rows, where latency counts: packets are twice their payload.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.decode.fused import packet_bytes, receive_rows, send_rows
from torch_fdattn.dist.decode.rows import RowExchange, coordinates, write_rows
from torch_fdattn.dist.symm.signals import at_rank, leave_epoch, may_send, read_epoch
from torch_fdattn.launch.launches import launch
from torch_fdattn.launch.pdl import await_previous, pdl_trigger
from torch_fdattn.ops.launch import power_of_two
from torch_fdattn.ops.library import launches
from torch_fdattn.ops.merge_states.tree_kernel import MAX_LEAVES, merge_two, merged_leaves
from torch_fdattn.ops.pdl import pdl_option, uses_pdl


@triton.jit
def _of_ranks(
    own, row, first, rank, address, rows, d, epoch, channel, v_dim, LEVEL: tl.constexpr, WORLD: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """State (1, D), (1,) of the nodes of 2^LEVEL ranks from `first` on, and whether they came; own: this rank's."""
    if LEVEL == 0:
        source = first + tl.arange(0, 1)
        mine = source == rank
        values, lses, came = receive_rows(
            row, row >= 0, d, source, (source < WORLD) & (source != rank), address, rows, epoch, channel, v_dim, WORLD,
            BLOCK_D,
        )  # fmt: skip
        values = tl.where(mine[:, None], own[0], tl.reshape(values, [1, BLOCK_D]))
        lses = tl.where(mine, own[1], tl.reshape(lses, [1]))
        return values, tl.where(source < WORLD, lses, float("-inf")), came
    else:
        half: tl.constexpr = 1 << (LEVEL - 1)
        where = (rank, address, rows, d, epoch, channel, v_dim)
        out, lse, came = _of_ranks(own, row, first, *where, LEVEL - 1, WORLD, BLOCK_D)
        other_out, other_lse, other_came = _of_ranks(
            own, row, first + half, *where, LEVEL - 1, WORLD, BLOCK_D
        )
        out, lse = merge_two(out, lse, other_out, other_lse)
        return out, lse, came & other_came


@triton.jit(do_not_specialize=["half_bytes", "limit_ns", "rank", "batch", "rows", "parts"])
def _fused_tree_kernel(
    outs_ptr, lses_ptr, out_ptr, lse_ptr, addresses_ptr, state_ptr, fault_ptr, outs_strides, lses_strides, half_bytes,
    limit_ns, rank, batch, rows, parts, heads: tl.constexpr, q_len: tl.constexpr, v_dim: tl.constexpr, WORLD: tl.constexpr,
    LEVELS: tl.constexpr, RANK_LEVELS: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """outs (parts, B, H, T, D), lses (parts, B, H, T) -> out (B, H, T, D), lse (B, H, T); the grid is the rows."""
    await_previous(PDL)
    pdl_trigger(PDL)
    epoch = read_epoch(state_ptr)
    channel = (addresses_ptr, half_bytes, state_ptr, fault_ptr, limit_ns)
    row, d = tl.program_id(0) + tl.arange(0, 1), tl.arange(0, BLOCK_D)
    b, h, t = coordinates(tl.program_id(0).to(tl.int64), batch, q_len)
    outs_ptr += b * outs_strides[1] + h * outs_strides[2] + t * outs_strides[3]
    lses_ptr += b * lses_strides[1] + h * lses_strides[2] + t * lses_strides[3]
    of_row = outs_ptr, outs_strides[0], outs_strides[4], lses_ptr, lses_strides[0]
    out, lse = merged_leaves(of_row, 0, parts, v_dim, LEVELS, BLOCK_D)
    sent = (row >= 0) & may_send(state_ptr, epoch)
    for i in tl.static_range(1, WORLD):
        peer = (rank + i) % WORLD
        send_rows(out, lse, row, sent, d, peer, rank, rows, epoch, channel, v_dim, WORLD, BLOCK_D)
    address = at_rank(addresses_ptr, rank, epoch, half_bytes)
    out, lse, came = _of_ranks(
        (out, lse), row, 0, rank, address, rows, d, epoch, channel, v_dim, RANK_LEVELS, WORLD, BLOCK_D
    )  # fmt: skip
    write_rows(
        out, lse, came, row, row >= 0, d, (out_ptr, lse_ptr, 0, heads), (batch, heads, q_len, v_dim)
    )
    leave_epoch(state_ptr, epoch, tl.num_programs(0))


def merge(outs: Tensor, lses: Tensor, dtype: torch.dtype, group_name: str) -> tuple[Tensor, Tensor]:
    """The merged (out in `dtype`, lse) of all ranks' states (parts, B, H, T, D), (parts, B, H, T), fp32; parts of each rank
    are one node of the tree."""
    while outs.shape[0] > MAX_LEAVES:
        outs, lses = torch.ops.fdattn.merge_tree(outs, lses, MAX_LEAVES)
    call = RowExchange.begin(outs[0], dtype, group_name, "fused_tree", packet_bytes, False)
    rows, pdl = call.rows, uses_pdl(outs)
    half_bytes, limit_ns, rank, *_ = call.numbers
    launches["dist_merge/fused_tree"] += 1
    launch(
        _fused_tree_kernel, rows.count,
        outs, lses, *call.memory, outs.stride(), lses.stride(), half_bytes, limit_ns, rank, rows.batch, rows.count,
        outs.shape[0], rows.heads, rows.q_len, rows.v_dim, rows.world, _levels(outs.shape[0]), _levels(rows.world),
        rows.block_d, pdl, num_warps=1, enable_fp_fusion=False, **pdl_option(pdl),
    )  # fmt: skip
    return call.out, call.lse


def _levels(leaves: int) -> int:
    return power_of_two(leaves).bit_length() - 1
