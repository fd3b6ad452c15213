"""Strategy `two_shot`: each rank merges its own share of the rows, and sends the result to all.

First shot: every rank sends each row's fp32 partial result to the row's owner, as words (`fused.py`). The owner
merges them and, second shot, sends the row in the output's dtype to all others, two 16-bit numbers a word. All in
one launch. Cost: (W - 1) / W · R · ((DV + 1) · 8 + DV · 4 + 8) bytes sent by every rank with a 16-bit output,
2 / W of what `fused` sends and less, but two trips over the wire: for many rows.

An owner that waits in vain says in the second shot for whom, or else the others would blame the owner. They wait
for it twice as long as it may wait itself; but where they own rows, too, their own first shot ends it all sooner.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.channel import channel
from torch_fdattn.dist.decode import fused
from torch_fdattn.dist.decode.fused import receive_rows, send_rows
from torch_fdattn.dist.decode.rows import (
    Rows,
    merged,
    outputs,
    own_rows,
    starts_early,
    with_own,
    write_rows,
)
from torch_fdattn.dist.faults import timeout_ns
from torch_fdattn.dist.groups import rank_and_size
from torch_fdattn.dist.signals import (
    as_words,
    at_rank,
    leave_epoch,
    may_send,
    packed,
    payload,
    read_epoch,
    receive,
    report,
    unpacked,
    word,
)
from torch_fdattn.ops.dependent_launch import await_previous
from torch_fdattn.ops.launch import cdiv, on_device
from torch_fdattn.ops.library import launches
from torch_fdattn.ops.repeated_launch import launch

#: The lse of a row that lacks a rank's part, beside that rank's number + 1: bits that no arithmetic gives.
ABSENT = tl.constexpr(0x7FA00000)


@triton.jit(do_not_specialize=["half_bytes", "limit_ns", "rank", "batch", "rows", "share"])
def _two_shot_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, addresses_ptr, state_ptr, fault_ptr, part_strides, half_bytes,
    limit_ns, rank, batch, rows, share, heads: tl.constexpr, q_len: tl.constexpr, v_dim: tl.constexpr,
    WORLD: tl.constexpr, SOURCES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    WORDS: tl.constexpr = BLOCK_D // 2 if dtype.primitive_bitwidth == 16 else BLOCK_D
    shape = (batch, heads, q_len, v_dim)
    channel = (addresses_ptr, half_bytes, state_ptr, fault_ptr, limit_ns)
    epoch = read_epoch(state_ptr)
    owner = tl.program_id(0) % WORLD
    within = tl.program_id(0) // WORLD * BLOCK_R + tl.arange(0, BLOCK_R)
    row = owner * share + within
    row_in = (within < share) & (row < rows)
    d = tl.arange(0, BLOCK_D)
    values, lses = own_rows(row, row_in, d, (part_ptr, part_lse_ptr, part_strides), shape)
    target = (out_ptr, lse_ptr, 0, heads)
    address = at_rank(addresses_ptr, rank, epoch, half_bytes)

    # The second shot's words lie behind all of the first one's.
    second = (rows * (BLOCK_D + 1)).to(tl.int64) * WORLD
    w = tl.arange(0, WORDS)
    value_at = second + row.to(tl.int64)[:, None] * WORDS + w[None, :]
    lse_at = second + rows.to(tl.int64) * WORDS + row
    words_in = row_in[:, None] & (w[None, :] < tl.cdiv(v_dim * WORDS, BLOCK_D))
    if owner == rank:
        sources = tl.arange(0, SOURCES)
        others = (sources < WORLD) & (sources != rank)
        theirs, their_lses, came = receive_rows(
            row, row_in, d, sources, others, address, rows, epoch, channel, v_dim, WORLD, BLOCK_D
        )
        parts, part_lses = with_own(theirs, their_lses, values, lses, sources, rank, WORLD)
        out, lse = merged(parts, part_lses)
        lse_bits, sends = lse.to(tl.int32, bitcast=True), came
        if came == 0:
            lse_bits = tl.zeros_like(lse_bits) + (
                ABSENT | tl.load(fault_ptr, volatile=True).to(tl.int32)
            )
            sends = may_send(state_ptr, epoch)
        if sends:
            value_words, lse_words = word(packed(out, dtype), epoch), word(lse_bits, epoch)
            for i in tl.static_range(1, WORLD):
                base = as_words(at_rank(addresses_ptr, (rank + i) % WORLD, epoch, half_bytes))
                tl.store(base + value_at, value_words, mask=words_in)
                tl.store(base + lse_at, lse_words, mask=row_in)
        write_rows(out, lse, came, row, row_in, d, target, shape)
    else:
        send_rows(
            values, lses, row, row_in & may_send(state_ptr, epoch), d, owner, rank, rows, epoch, channel, v_dim,
            WORLD, BLOCK_D,
        )  # fmt: skip
        base = as_words(address)
        one = tl.arange(0, 1)
        value_words, lse_words, came = receive(
            base + value_at[None, :, :], base + lse_at[None, :], words_in[None, :, :], row_in[None, :],
            one + owner, epoch, state_ptr, fault_ptr, 2 * limit_ns,
        )  # fmt: skip
        bits = tl.reshape(payload(value_words, tl.int32), [BLOCK_R, WORDS])
        lse_bits = tl.reshape(payload(lse_words, tl.int32), [BLOCK_R])
        absent = tl.max(
            tl.where(row_in & (lse_bits >> 16 == ABSENT >> 16), lse_bits & 0xFFFF, -1), 0
        )
        if came & (absent >= 0):
            came = absent < 0
            # Or else it broke in an earlier call, which has said why.
            if may_send(state_ptr, epoch):
                other = (absent > 0) & (absent != rank + 1)  # this rank may be the late one
                report(tl.where(other, absent - 1, owner), epoch, state_ptr, fault_ptr)
        lse = lse_bits.to(tl.float32, bitcast=True)
        write_rows(unpacked(bits, dtype), lse, came, row, row_in, d, target, shape)
    leave_epoch(state_ptr, epoch, tl.num_programs(0))


def merge(part: Tensor, part_lse: Tensor, dtype: torch.dtype, group_name: str, head_sharded: bool):
    """The merged (out, lse) of all ranks' partial results."""
    if head_sharded:  # its first shot alone
        return fused.merge(part, part_lse, dtype, group_name, True)
    rows = Rows.of(part, rank_and_size(group_name)[1])
    second = rows.count * (rows.block_d + 1) * 8
    where = channel(group_name, "two_shot", fused.words_bytes(rows) + second, part.device)
    out, lse = outputs(part, dtype, rows.heads)
    block, tiles = rows.tile(rows.world)
    early = starts_early(part)
    where.enter()
    launches["dist_merge/two_shot"] += 1
    with on_device(part):
        launch(
            _two_shot_kernel, rows.world * tiles,
            part, part_lse, out, lse, where.memory.addresses, where.state, where.fault.tensor, part.stride(),
            where.half_bytes, timeout_ns(), where.rank, rows.batch, rows.count, cdiv(rows.count, rows.world),
            rows.heads, rows.q_len, rows.v_dim, rows.world, rows.sources, block, rows.block_d,
            early, num_warps=1, **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return out, lse
