"""Strategy `star`: a root gathers the partial states, merges them and hands the result out.

What travels: every rank's triple (numerator, denominator, maximum; see `partial_states.py`) to rank 0, which merges
by log-sum-exp in rank order, and its result back by one broadcast, or to each rank its heads (head_sharded).
Cost: two collectives, one after the other; the root receives W states, the others one.
Wins where links are so slow that W states into every rank are too many, but not one into each: the multi-host
form. The root's link is the bottleneck, and two hops are twice the latency of `all_gather`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.dist.decode.partial_states import MergeGroup, pack, unpack
from torch_fdattn.dist.point_to_point import all_to_all, with_dependency
from torch_fdattn.ops.merge_states.op import merge_rows

ROOT = 0


def merge(out: Tensor, lse: Tensor, dtype: torch.dtype, group: MergeGroup) -> tuple[Tensor, Tensor]:
    """The merged (out in `dtype`, lse) from every rank's partial out (B, H, T, D), lse (B, H, T)."""
    rows, ranks = pack(out, lse), range(group.world_size)
    nothing = rows[:0]
    is_root = group.rank == ROOT
    parts = all_to_all(
        [rows if r == ROOT else nothing for r in ranks],
        [rows.shape if is_root else nothing.shape for _ in ranks],
        group.group_name,
    )
    if is_root:
        rows = pack(*merge_rows(torch.stack(parts), rows.dtype))
    else:
        rows = with_dependency(rows, parts[ROOT])
    if group.head_sharded:
        shares = rows.chunk(group.world_size, 1)
        received = all_to_all(
            shares if is_root else [nothing for _ in ranks],
            [shares[0].shape if r == ROOT else nothing.shape for r in ranks],
            group.group_name,
        )
        rows = received[ROOT]
    else:
        rows = torch.ops._c10d_functional.broadcast(rows, ROOT, group.group_name)
        rows = torch.ops._c10d_functional.wait_tensor(rows)
    return unpack(rows, dtype)
