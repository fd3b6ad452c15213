"""Rows of partial results on their way to other ranks: the device code that the one-sided strategies share.

A row is one query of one head, and rows are numbered heads first, row = (h · B + b) · T + t: the heads of a rank
are one run of rows. Shapes: part (B, H, T, DV) fp32, part_lse (B, H, T) fp32 contiguous; out (B, H', T, DV),
lse (B, H', T) contiguous, of all H heads or of one rank's from first_head on; S: the ranks, padded to a power of
two; M: rows of a tile; D: the dims of a tile, all of DV padded unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.groups import rank_and_size
from torch_fdattn.dist.symm.channel import Channel, channel
from torch_fdattn.dist.symm.faults import timeout_ns
from torch_fdattn.ops.launch import cdiv, padded, power_of_two
from torch_fdattn.ops.library import INTERPRET
from torch_fdattn.ops.online_softmax import merge_finish, merge_update

#: Packets of all ranks' parts that a program, of one warp (`signals.py`), looks at together at most.
TILE_PACKETS = 512
#: Programs that are as good as more of them.
ENOUGH = 2 if INTERPRET else 2048


class Rows(NamedTuple):
    """The shape of an exchange, from which its tiles follow."""

    batch: int
    heads: int
    q_len: int
    v_dim: int
    world: int

    @classmethod
    def of(cls, part: Tensor, world: int) -> Rows:
        batch, heads, q_len, v_dim = part.shape
        return cls(batch, heads, q_len, v_dim, world)

    @property
    def count(self) -> int:
        return self.batch * self.heads * self.q_len

    @property
    def block_d(self) -> int:
        return padded(self.v_dim)

    @property
    def sources(self) -> int:
        return power_of_two(self.world)

    def tile(self, owners: int = 1) -> tuple[int, int]:
        """(rows a tile, tiles of each owner's rows)."""
        share, rows = cdiv(self.count, owners), 1
        in_a_warp = max(1, TILE_PACKETS // (self.sources * self.block_d))
        limit = share if INTERPRET else in_a_warp
        while rows < limit and owners * cdiv(share, rows) > ENOUGH:
            rows *= 2
        return rows, cdiv(share, rows)


class RowExchange(NamedTuple):
    """A call of a one-sided strategy, on the host: its results, its channel and its tiles."""

    rows: Rows
    channel: Channel
    out: Tensor
    lse: Tensor
    first_head: int  # of this rank's result
    heads: int  # of this rank's result
    owners: int  # ranks among which rows are dealt; 1: every rank merges all of them
    block: int  # rows a tile
    tiles: int  # of each owner

    @classmethod
    def begin(
        cls, part: Tensor, dtype: torch.dtype, group_name: str, purpose: str, nbytes: Callable[[Rows], int],
        head_sharded: bool,
    ) -> RowExchange:  # fmt: skip
        """For partial results like `part`; nbytes: of a half of the channel's memory. The launches come next."""
        rows = Rows.of(part, rank_and_size(group_name)[1])
        where = channel(group_name, purpose, nbytes(rows), part.device)
        heads = rows.heads // rows.world if head_sharded else rows.heads
        owners = rows.world if head_sharded else 1
        out, lse = outputs(part, dtype, heads)
        first_head = heads * where.rank if head_sharded else 0
        where.enter()
        return cls(rows, where, out, lse, first_head, heads, owners, *rows.tile(owners))

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """The kernels' arguments from out_ptr to fault_ptr."""
        where = self.channel
        return self.out, self.lse, where.memory.addresses, where.state, where.fault.tensor

    @property
    def numbers(self) -> tuple[int, ...]:
        """From half_bytes to first_head."""
        where, rows = self.channel, self.rows
        share = rows.count // self.owners
        return (
            where.half_bytes, timeout_ns(), where.rank, rows.batch, rows.count, share, self.first_head,
        )  # fmt: skip

    @property
    def constants(self) -> tuple[int, ...]:
        """From heads to BLOCK_D."""
        rows = self.rows
        return (
            rows.heads, self.heads, rows.q_len, rows.v_dim, rows.world, rows.sources, self.owners, self.block,
            rows.block_d,
        )  # fmt: skip


def outputs(part: Tensor, dtype: torch.dtype, heads: int) -> tuple[Tensor, Tensor]:
    """Unwritten (out, lse) of so many heads."""
    batch, _, q_len, v_dim = part.shape
    out = torch.empty(batch, heads, q_len, v_dim, dtype=dtype, device=part.device)
    return out, torch.empty(batch, heads, q_len, dtype=torch.float32, device=part.device)


@triton.jit
def coordinates(row, batch, q_len):
    """(b, h, t) of rows."""
    return row // q_len % batch, row // (q_len * batch), row % q_len


@triton.jit
def tile_of(tile, share, OWNERS: tl.constexpr, BLOCK_R: tl.constexpr):
    """(rows (M,), which of them exist, their owner) of a tile; all ranks take the tiles in the same order."""
    # With owners, tile t of owner p is number t · OWNERS + p: on all ranks at the same time.
    owner = tile % OWNERS
    within = tile // OWNERS * BLOCK_R + tl.arange(0, BLOCK_R)
    return owner * share + within, within < share, owner


@triton.jit
def own_rows(row, row_in, d, part, shape):
    """(values (M, D), lses (M,)) of this rank's partial results."""
    part_ptr, part_lse_ptr, strides = part
    batch, heads, q_len, v_dim = shape
    b, h, t = coordinates(row, batch, q_len)
    at = b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1] + t.to(tl.int64) * strides[2]
    inside = row_in[:, None] & (d[None, :] < v_dim)
    values = tl.load(part_ptr + at[:, None] + d[None, :] * strides[3], mask=inside, other=0.0)
    lses = tl.load(
        part_lse_ptr + (b * heads + h).to(tl.int64) * q_len + t, mask=row_in, other=float("-inf")
    )
    return values.to(tl.float32), lses


@triton.jit
def merged(values, lses):
    """(out (M, D), lse (M,)) of parts (S, M, D), (S, M): the same bits wherever the parts are the same."""
    acc = tl.zeros([values.shape[1], values.shape[2]], tl.float32)
    row_max = tl.full([values.shape[1]], float("-inf"), tl.float32)
    row_sum = tl.zeros([values.shape[1]], tl.float32)
    acc, row_max, row_sum = merge_update(acc, row_max, row_sum, values, lses)
    return merge_finish(acc, row_max, row_sum)


@triton.jit
def with_own(values, lses, own_values, own_lses, sources, rank, WORLD: tl.constexpr):
    """The received parts and this rank's own among them, in the order of ranks."""
    mine = sources == rank
    values = tl.where(mine[:, None, None], own_values[None, :, :], values)
    lses = tl.where(mine[:, None], own_lses[None, :], lses)
    return values, tl.where((sources < WORLD)[:, None], lses, float("-inf"))


@triton.jit
def write_rows(values, lses, came, row, row_in, d, target, shape):
    """Writes finished rows' dims d; NaN where they did not come."""
    out_ptr, lse_ptr, first_head, out_heads = target
    batch, _, q_len, v_dim = shape
    b, h, t = coordinates(row, batch, q_len)
    at = (b * out_heads + h - first_head).to(tl.int64) * q_len + t
    values = tl.where(came, values, float("nan"))
    lses = tl.where(came, lses, float("nan"))
    tl.store(
        out_ptr + at[:, None] * v_dim + d[None, :], values.to(out_ptr.dtype.element_ty),
        mask=row_in[:, None] & (d[None, :] < v_dim),
    )  # fmt: skip
    tl.store(lse_ptr + at, lses, mask=row_in)
