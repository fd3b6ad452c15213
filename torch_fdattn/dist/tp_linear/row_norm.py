"""An all-reduce of few rows, the residual's addition and RMSNorm in one launch, which are three otherwise.

A program has a row: it sends this rank's part of it to all others, with a flag behind it (`signals.py`), and, once
theirs have come, sums all parts in fp32 in the order of ranks: the same bits on all ranks. The sum is rounded to the
dtype before the residual is added, and so is what they give before it is normalised, as three launches round them.

A row takes several warps, so flags are waited for by one thread (`signals.await_flag`). The sum of squares
(Zhang and Sennrich 2019, equation 4) needs the whole row in one program: up to MOST_COLUMNS.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.channel import channel
from torch_fdattn.dist.decode.rows import starts_early
from torch_fdattn.dist.faults import timeout_ns
from torch_fdattn.dist.groups import rank_and_size
from torch_fdattn.dist.signals import (
    as_words,
    at_rank,
    await_flag,
    await_previous,
    leave_epoch,
    may_send,
    raise_flag,
    read_epoch,
)
from torch_fdattn.ops.launch import cdiv, on_device, power_of_two
from torch_fdattn.ops.library import INTERPRET, launches
from torch_fdattn.ops.repeated_launch import launch

MOST_COLUMNS = 8192
#: Columns that a warp has. Not measured yet.
_COLUMNS_PER_WARP = 1024


@triton.jit
def _parts(address, m, dtype: tl.constexpr, WORLD: tl.constexpr):
    """Where the ranks' parts (WORLD, m, n) begin, behind the flags (WORLD, m)."""
    first = address + tl.cdiv(WORLD * m, 2).to(tl.int64) * 16  # where wide stores may
    return tl.multiple_of(first.to(tl.pointer_type(dtype)), 16)


@triton.jit(do_not_specialize=["half_bytes", "limit_ns", "rank", "eps"])
def _sum_norm_kernel(
    x_ptr, bias_ptr, residual_ptr, weight_ptr, normed_ptr, added_ptr, addresses_ptr, state_ptr, fault_ptr, half_bytes,
    limit_ns, rank, n, eps, WORLD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x, residual (m, n), bias (n,) or None, weight (n,) -> added (m, n), the sum over ranks and more, normed (m, n)."""
    await_previous(PDL)
    dtype: tl.constexpr = added_ptr.dtype.element_ty
    row, m = tl.program_id(0), tl.num_programs(0)
    epoch = read_epoch(state_ptr)
    sends = may_send(state_ptr, epoch)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    at = row.to(tl.int64) * n + columns
    slot = m.to(tl.int64) * n
    own = tl.load(x_ptr + at, mask=inside, other=0.0)
    for i in tl.static_range(1, WORLD):
        there = at_rank(addresses_ptr, (rank + i) % WORLD, epoch, half_bytes)
        tl.store(_parts(there, m, dtype, WORLD) + rank * slot + at, own, mask=inside & sends)
    if sends:
        for i in tl.static_range(1, WORLD):
            there = at_rank(addresses_ptr, (rank + i) % WORLD, epoch, half_bytes)
            raise_flag(as_words(there) + rank * m + row, epoch)

    residual = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    here = at_rank(addresses_ptr, rank, epoch, half_bytes)
    total = tl.zeros([BLOCK], tl.float32)
    for source in tl.static_range(WORLD):
        part = own
        if source != rank:
            flag_ptr = as_words(here) + source * m + row
            came = await_flag(flag_ptr, source, epoch, state_ptr, fault_ptr, limit_ns)
            # Past the first-level cache, which does not see what other devices write.
            theirs = _parts(here, m, dtype, WORLD) + source * slot + at
            part = tl.load(theirs, mask=inside, other=0.0, volatile=True)
            total += tl.where(came, 0.0, float("nan"))
        total += part.to(tl.float32)
    y = total.to(dtype).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        y = y.to(dtype).to(tl.float32)
    added = (residual + y).to(dtype)
    tl.store(added_ptr + at, added, mask=inside)
    z = tl.where(inside, added.to(tl.float32), 0.0)
    normed = z * tl.rsqrt(tl.sum(z * z, 0) / n + eps) * weight
    tl.store(normed_ptr + at, normed.to(dtype), mask=inside)
    leave_epoch(state_ptr, epoch, m)


def sum_norm(
    x: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, eps: float, group_name: str
) -> tuple[Tensor, Tensor]:
    """(normed, added) (M, N) of this rank's part x (M, N), bias (N,), residual (M, N) and the norm's weight (N,); all
    contiguous and of one dtype of 16 bits or float32, N at most MOST_COLUMNS."""
    _, world = rank_and_size(group_name)
    (m, n), size = x.shape, x.element_size()
    normed, added = x.new_empty(m, n), x.new_empty(m, n)
    if not x.numel():
        return normed, added
    nbytes = cdiv(world * m, 2) * 16 + world * m * n * size
    where = channel(group_name, "low_latency/rows", nbytes, x.device)
    where.enter()
    launches["tp_linear/row_norm"] += 1
    early, block = starts_early(x), power_of_two(n)
    warps = 1 if INTERPRET else max(1, min(16, block // _COLUMNS_PER_WARP))
    with on_device(x):
        launch(
            _sum_norm_kernel, m,
            x, bias, residual, weight, normed, added, where.memory.addresses, where.state, where.fault.tensor,
            where.half_bytes, timeout_ns(), where.rank, n, eps, world, block, early, num_warps=warps,
            **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return normed, added
