"""From sequence shards to all positions and back, by collectives.

x is (…, S, D) with the sequence in dim -2. Uneven shards travel by all-to-alls with split sizes, which no
padding slows down; sums are taken in rank order on the receiving rank, so that their bits do not depend on
the collective's algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fdattn.dist.collectives import all_gather
from torch_fdattn.dist.point_to_point import all_to_all
from torch_fdattn.dist.ring_attention.local import Problem


def with_length(shape: Sequence[int], length: int) -> list[int]:
    return [*shape[:-2], length, shape[-1]]


def gather(x: Tensor, problem: Problem) -> Tensor:
    """All ranks' shards (…, S_r, D) joined in the order of positions."""
    shapes = [with_length(x.shape, length) for length in problem.shards.lengths]
    if len(set(problem.shards.lengths)) > 1:
        parts = all_to_all([x] * problem.world_size, shapes, problem.group_name)
    else:
        gathered = all_gather(x, problem.world_size, problem.group_name)
        parts = list(gathered.view(problem.world_size, *x.shape).unbind())
    return problem.shards.join(parts, dim=-2)


def scatter_sum(parts: Sequence[Tensor], problem: Problem) -> Tensor:
    """The sum over all ranks of what they have of this rank's shard; parts: (…, S_r, D) of each rank's."""
    own = with_length(parts[0].shape, problem.shards.lengths[problem.rank])
    received = all_to_all(list(parts), [own] * problem.world_size, problem.group_name)
    return torch.stack(received).sum(0)


def gather_mask(problem: Problem, rows: int) -> Tensor | None:
    """The explicit mask (…, total, keys) of all ranks' rows, of which this one has as many."""
    mask = problem.scores.attn_mask
    if mask is None:
        return None
    given = mask.expand(*mask.shape[:2], rows, mask.shape[3])
    is_bool = mask.dtype == torch.bool
    found = gather(given.to(torch.uint8) if is_bool else given, problem)
    return found.bool() if is_bool else found


def in_order_of(q: Tensor, out: Tensor) -> Tensor:
    """An output in q's order of memory, as that of attention on one rank is: a later `view` may rely on it."""
    ordered = torch.empty_like(q)
    return out if out.stride() == ordered.stride() else ordered.copy_(out)
