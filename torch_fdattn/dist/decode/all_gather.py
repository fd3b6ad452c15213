"""Strategy `all_gather`: one packed functional all-gather of the partial states, then the merge.

Every rank sends its fp32 (out, lse) as rows of D + 1 numbers and merges all W parts in rank order, so
that all ranks hold the same bits. Runs wherever functional collectives do (NCCL, gloo), also between
nodes, and torch.compile traces it. Cost: W · B · H · T · (D + 1) · 4 bytes received by every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gather_and_merge(
    out: Tensor, lse: Tensor, dtype: torch.dtype, group_name: str, world_size: int
) -> tuple[Tensor, Tensor]:
    """The merged (out in `dtype`, lse) from every rank's fp32 partial out (B, H, T, D), lse (B, H, T)."""
    packed = torch.cat([out, lse.unsqueeze(-1)], -1)
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(packed, world_size, group_name)
    gathered = torch.ops._c10d_functional.wait_tensor(gathered)
    parts = gathered.view(world_size, *packed.shape)
    return torch.ops.fdattn.merge_states_forward(parts[..., :-1], parts[..., -1], dtype)
