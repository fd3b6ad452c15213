"""Strategy `all_gather`: one packed collective over the partial states, then the merge.

What travels: every rank's fp32 rows, to every rank, which merges all W parts in rank order, so that all
ranks hold the same bits. With head_sharded an all-to-all takes to each rank the rows of its heads alone.
Cost: one collective; each rank receives W · B · H · T · (D + 1) · 4 bytes, or a W-th of it with head_sharded.
Wins where ranks cannot share symmetric memory (between nodes, gloo), and is what torch.compile traces.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.dist.collectives import all_gather
from torch_fdattn.dist.decode.partial_states import MergeGroup, pack
from torch_fdattn.ops.merge_states.op import merge_rows


def merge(out: Tensor, lse: Tensor, dtype: torch.dtype, group: MergeGroup) -> tuple[Tensor, Tensor]:
    """The merged (out in `dtype`, lse) from every rank's partial out (B, H, T, D), lse (B, H, T)."""
    rows, name, world_size = pack(out, lse), group.group_name, group.world_size
    if group.head_sharded:
        by_rank = rows.unflatten(1, (world_size, -1)).movedim(1, 0).contiguous()
        shape, share = by_rank.shape, [by_rank[0].numel()] * world_size
        received = torch.ops._c10d_functional.all_to_all_single(
            by_rank.flatten(), share, share, name
        )
        received = torch.ops._c10d_functional.wait_tensor(received)
    else:
        shape = (world_size, *rows.shape)
        received = all_gather(rows, world_size, name)
    return merge_rows(received.view(shape), dtype)
