"""Strategy `star`: a root gathers the partial states, merges them and hands the result out.

What travels: every rank's triple (numerator, denominator, maximum; see `exchange.py`) to rank 0, which merges
by log-sum-exp in rank order, and its result back by one broadcast, or to each rank its heads (head_sharded).
Cost: two collectives, one after the other; the root receives W states, the others one.
Wins where links are so slow that W states into every rank are too many, but not one into each: the multi-host
form. The root's link is the bottleneck, and two hops are twice the latency of `all_gather`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.dist.decode.exchange import Exchange, merge_rows, pack, unpack
from torch_fdattn.dist.ring_attention.layout import exchange as all_to_all

ROOT = 0


def merge(
    out: Tensor, lse: Tensor, dtype: torch.dtype, exchange: Exchange
) -> tuple[Tensor, Tensor]:
    """The merged (out in `dtype`, lse) from every rank's partial out (B, H, T, D), lse (B, H, T)."""
    rows, ranks = pack(out, lse), range(exchange.world_size)
    nothing = rows[:0]
    is_root = exchange.rank == ROOT
    parts = all_to_all(
        [rows if r == ROOT else nothing for r in ranks],
        [rows.shape if is_root else nothing.shape for _ in ranks],
        exchange.group_name,
    )
    if is_root:
        rows = pack(*merge_rows(torch.stack(parts), rows.dtype))
    if exchange.head_sharded:
        shares = rows.chunk(exchange.world_size, 1)
        received = all_to_all(
            shares if is_root else [nothing for _ in ranks],
            [shares[0].shape if r == ROOT else nothing.shape for r in ranks],
            exchange.group_name,
        )
        rows = received[ROOT]
    else:
        rows = torch.ops._c10d_functional.broadcast(rows, ROOT, exchange.group_name)
        rows = torch.ops._c10d_functional.wait_tensor(rows)
    return unpack(rows, dtype)
