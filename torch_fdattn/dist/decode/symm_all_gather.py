"""Strategy `symm_all_gather`: `all_gather` with the one-sided all-gather in place of the group's collective.

Three steps, each useful by itself: the packed fp32 rows of D + 1 numbers, their all-gather through symmetric
memory, and the merge in rank order. Cost: the bytes of `all_gather` (twice as many for few rows, which travel as
LL packets), three launches. The yardstick for the strategies that do these steps in one kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.dist.decode.partial_states import pack
from torch_fdattn.dist.groups import rank_and_size
from torch_fdattn.dist.symm.one_sided_gather import all_gather
from torch_fdattn.ops.library import launches
from torch_fdattn.ops.merge_states.op import merge_rows


def merge(part: Tensor, part_lse: Tensor, dtype: torch.dtype, group_name: str, head_sharded: bool):
    """The merged (out, lse) of all ranks' partial results."""
    launches["dist_merge/symm_all_gather"] += 1
    parts = all_gather(pack(part, part_lse), group_name)
    if head_sharded:
        rank, world = rank_and_size(group_name)
        parts = parts.chunk(world, 2)[rank]
    out, lse = merge_rows(parts, dtype)
    return out.contiguous(), lse.contiguous()
