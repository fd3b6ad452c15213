"""Strategy `auto`: which one a call takes, by measured crossovers, and saying which it was."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from torch_fdattn.dist.decode.partial_states import MergeGroup
from torch_fdattn.dist.groups import Group, is_traced, name_of, rank_and_size
from torch_fdattn.dist.symm.availability import available
from torch_fdattn.dist.tuned import entries_on_all_ranks
from torch_fdattn.ops.decode.inputs import MAX_QUERY_TOKENS

#: Up to so many rows (batch · heads · query tokens) latency decides, and beyond it bytes; where `fdattn tune` has
#: measured nothing for as many ranks on this machine.
FUSED_ROWS = 256

_log = logging.getLogger("torch_fdattn")


def choose(
    rows: int, world_size: int, one_sided: bool, head_sharded: bool, fused_rows: int = FUSED_ROWS
) -> str:
    """The strategy for `rows` rows; one_sided: whether the ranks can share symmetric memory."""
    if world_size == 1:
        return "none"
    if not one_sided:
        return "all_gather"
    return "fused" if head_sharded or rows <= fused_rows else "two_shot"


def chosen_strategy(
    q: Tensor, group: Group, *, head_sharded: bool = False, batch_invariant: bool = False
) -> str:
    """What strategy "auto" of `torch_fdattn.dist.decode` takes for queries like q (B, H, T, D).

    "none" where the group has one rank. The same on every rank, which all call it: the first time that a group
    is asked on GPUs its ranks tell each other what memory they can map. With gradients wanted
    and under torch.compile "auto" is "all_gather", which this does not know.

    Examples:
        >>> q = torch.randn(1, 8, 1, 64)
        >>> torch_fdattn.dist.chosen_strategy(q, None) in ("none", "all_gather", "fused", "two_shot")
        True
    """
    group_name = name_of(group)
    group = MergeGroup(group_name, *rank_and_size(group_name), head_sharded)
    return choose_for(q, group, batch_invariant)


def choose_for(q: Tensor, group: MergeGroup, batch_invariant: bool) -> str:
    """`choose` for a call in eager mode without gradients, logged."""
    tokens, world_size, head_sharded = q.shape[2], group.world_size, group.head_sharded
    # Chunks of a prompt are megabytes, for which workspaces would grow and stay.
    one_sided = (
        world_size > 1
        and tokens <= MAX_QUERY_TOKENS
        and q.dtype != torch.float64
        and _maps_peers(group.group_name, q)
    )
    # A strategy that changes with the batch might change bits with it.
    rows = 0 if batch_invariant else q.shape[0] * q.shape[1] * tokens
    fused_rows = _fused_rows(group.group_name, q, world_size) if one_sided else FUSED_ROWS
    chosen = choose(rows, world_size, one_sided, head_sharded, fused_rows)
    _log.debug(
        "dist.decode: strategy %s for %d rows on %d ranks (one-sided exchange: %s, head_sharded: %s)",
        chosen, rows, world_size, one_sided, head_sharded,
    )  # fmt: skip
    return chosen


def _fused_rows(group_name: str, q: Tensor, world_size: int) -> int:
    """The crossover that was measured with as many ranks on this machine, where all ranks have the same; else the constant."""
    for entry in entries_on_all_ranks("dist_decode", group_name, q):
        if entry["ranks"] == world_size:
            return entry["fused_rows"]
    return FUSED_ROWS


def _maps_peers(group_name: str, q: Tensor) -> bool:
    """On CPUs the kernels would be interpreted, which is slower than gloo."""
    if q.device.type != "cuda" or is_traced(q):
        return False
    return available(group_name, q.device)
