"""Strategy `star`: every rank attends all queries over its own keys, a root merges and broadcasts.

The queries of all ranks are gathered, and the ranks' partial states merged as by `decode/star.py`. K and V never
move: right where keys outweigh queries by far (a long context, few queries). Memory: all queries and results on every
rank, and those of all ranks on the root.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fdattn.dist.decode.partial_states import MergeGroup
from torch_fdattn.dist.decode.star import merge
from torch_fdattn.dist.point_to_point import with_dependency
from torch_fdattn.dist.ring_attention.layout import gather, gather_mask, scatter_sum
from torch_fdattn.dist.ring_attention.local import (
    Problem,
    Saved,
    State,
    add_gradients,
    state_dtype,
    zero_gradients,
)
from torch_fdattn.dist.ring_attention.plan import BlockCall
from torch_fdattn.dist.ring_attention.sequence_shards import Run
from torch_fdattn.ops.scores import add_sinks


def _calls(problem: Problem) -> Sequence[BlockCall]:
    everything = [Run(0, problem.shards.total)]
    return problem.calls(everything, problem.shards.ranks[problem.rank])


def _of_all_queries(problem: Problem, rows: int) -> Problem:
    """With the explicit mask's rows of all ranks."""
    return problem._replace(scores=problem.scores._replace(attn_mask=gather_mask(problem, rows)))


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor, Saved]:
    problem = _of_all_queries(problem, q.shape[2])
    all_queries = gather(q, problem)
    state = State(all_queries, problem)
    state.add(k, v, _calls(problem))
    group = MergeGroup(problem.group_name, problem.rank, problem.world_size)
    sinks = problem.scores.sinks
    part, part_lse = state.parts()
    part = with_dependency(part, all_queries, problem.scores.attn_mask)
    # Sinks join what is not rounded yet.
    out, lse = merge(part, part_lse, q.dtype if sinks is None else state_dtype(q), group)
    out, lse = add_sinks(out, lse, sinks)
    out = out.to(q.dtype)
    saved = Saved(all_queries, k, v, out, lse)
    own_out, own_lse = (problem.shards.shard(x, problem.rank, dim=2) for x in (out, lse))
    return torch.empty_like(q).copy_(own_out), own_lse.clone(), saved


def backward(
    dout: Tensor, dlse: Tensor | None, saved: Saved, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    problem = _of_all_queries(problem, dout.shape[2])
    dout = gather(dout, problem)
    if dlse is not None:
        dlse = gather(dlse.unsqueeze(-1), problem).squeeze(-1)
    given = dout, dlse, *saved, problem.scores.attn_mask
    dq, dkv = (with_dependency(x, *given) for x in zero_gradients(saved.q, saved.k.shape))
    add_gradients(dout, dlse, saved, _calls(problem), problem, dq, dkv)
    parts = [problem.shards.shard(dq, rank, dim=-2) for rank in range(problem.world_size)]
    return scatter_sum(parts, problem), *dkv.unbind()
