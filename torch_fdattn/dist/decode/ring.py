"""Strategy `ring`: partial states travel from rank to rank and are merged at each hop.

What travels: the heads are dealt in W shares. The triple (see `partial_states.py`) of share c starts at rank c + 1, is
merged with the own one of every rank on its way, and is complete at rank c; then the complete shares go round once
more. Each share is merged by one chain, in one order, and its result is copied: the same bits on all ranks,
whatever the batch. With head_sharded the first round is all there is.
Cost: 2 (W - 1) hops, one after the other, but only 2 states through every link, however many ranks there are.
Wins where each rank has one link to its neighbours and states are large: many sequences, long prefill chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.dist.collectives import split_evenly
from torch_fdattn.dist.decode.partial_states import MergeGroup, pack, unpack
from torch_fdattn.dist.point_to_point import send_to_next
from torch_fdattn.ops.merge_states.op import merge_rows


def merge(out: Tensor, lse: Tensor, dtype: torch.dtype, group: MergeGroup) -> tuple[Tensor, Tensor]:
    """The merged (out in `dtype`, lse) from every rank's partial out (B, H, T, D), lse (B, H, T)."""
    rank, world_size = group.rank, group.world_size
    ring = rank, world_size, group.group_name
    shares = list(pack(out, lse).split(split_evenly(out.shape[1], world_size), 1))
    travelling = shares[(rank - 1) % world_size]
    for hop in range(1, world_size):
        own = shares[(rank - 1 - hop) % world_size]
        travelling = send_to_next(travelling, own.shape, *ring)
        travelling = pack(*merge_rows(torch.stack([travelling, own]), own.dtype))
    if group.head_sharded:
        return unpack(travelling, dtype)
    shares[rank] = travelling
    for hop in range(1, world_size):
        source = (rank - hop) % world_size
        travelling = shares[source] = send_to_next(travelling, shares[source].shape, *ring)
    return unpack(torch.cat(shares, 1), dtype)
