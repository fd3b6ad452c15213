"""Strategy `hierarchical`: states are merged inside each node, and then between the nodes.

The ranks are a mesh (nodes, ranks of a node), `hierarchy` names this rank's row (inner group) and column (outer
group). What travels: fp32 rows, inside a node by the one-sided `fused` where its ranks can share symmetric
memory, or else by `all_gather`; then one state a node between ranks of equal place, by `all_gather`. A node's
ranks hold the same bits after the first step, and all columns merge the nodes in the same order.
Cost: two exchanges; between nodes W / (ranks of a node) states into every rank, in place of W.
Wins where the network between nodes is much slower than the links inside them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import get_process_group_ranks
from torch.distributed.distributed_c10d import _resolve_process_group

from torch_fdattn.dist.decode import all_gather, one_sided
from torch_fdattn.dist.decode.partial_states import MergeGroup
from torch_fdattn.dist.groups import is_traced, rank_and_size
from torch_fdattn.dist.symm import availability


def merge(out: Tensor, lse: Tensor, dtype: torch.dtype, group: MergeGroup) -> tuple[Tensor, Tensor]:
    """The merged (out in `dtype`, lse) from every rank's partial out (B, H, T, D), lse (B, H, T)."""
    inner = _part(group.inner_group, group)
    outer = _part(group.outer_group, group)
    if group.head_sharded:
        # Dealt first by place in the node, then by node, heads must end in the order of ranks.
        deal = (outer.world_size, inner.world_size, -1)
        out, lse = (
            x.unflatten(1, deal).transpose(1, 2).flatten(1, 3).contiguous() for x in (out, lse)
        )
    if inner.world_size > 1:
        out, lse = _merge_in_node(out, lse, inner)
    if outer.world_size > 1:
        return all_gather.merge(out, lse, dtype, outer)
    return out.to(dtype), lse


def _part(group_name: str, group: MergeGroup) -> MergeGroup:
    return MergeGroup(group_name, *rank_and_size(group_name), group.head_sharded)


def _merge_in_node(out: Tensor, lse: Tensor, node: MergeGroup) -> tuple[Tensor, Tensor]:
    maps = out.dtype == torch.float32 and not is_traced(out)
    if maps and availability.available(node.group_name, out.device):
        return one_sided.merge(out, lse, out.dtype, node.group_name, "fused", node.head_sharded)
    return all_gather.merge(out, lse, out.dtype, node)


def sizes(group: MergeGroup) -> tuple[int, int] | None:
    """Ranks of a node, and nodes; None without a hierarchy."""
    if group.inner_group is None:
        return None
    names = group.inner_group, group.outer_group
    return tuple(rank_and_size(name, "hierarchy")[1] for name in names)


def check_hierarchy(group: MergeGroup) -> None:
    """The groups must be this rank's row and column of the mesh, the ranks of a node in a run.

    Raises:
        ValueError: they are not.
    """
    names = group.group_name, group.inner_group, group.outer_group
    for name in names[1:]:
        rank_and_size(name, "hierarchy")
    ranks, inner, outer = (get_process_group_ranks(_resolve_process_group(name)) for name in names)
    node, place = divmod(group.rank, len(inner))
    row, column = ranks[node * len(inner) : (node + 1) * len(inner)], ranks[place :: len(inner)]
    if (inner, outer) != (row, column):
        raise ValueError(
            "hierarchy must name groups of this rank's row and column of a mesh (nodes, ranks of a node) of "
            f"the ranks {ranks}, got groups of {inner} and {outer} on rank {group.rank}"
        )
