"""Strategy `star`: every rank attends all queries over its own keys, a root merges and broadcasts.

The queries of all ranks are gathered; each rank's partial result is its numerator, denominator and
maximum, in the form (out, lse): out = numerator / denominator, lse = maximum + log denominator. Rank 0 merges them
by log-sum-exp, in rank order, and broadcasts. K and V never move: right where keys outweigh queries by
far (a long context, few queries). Memory: queries and results of the whole sequence on every rank,
and those of all ranks on the root.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.dist.ring_attention.layout import all_to_all, gather, scatter_sum
from torch_fdattn.dist.ring_attention.local import (
    Problem,
    Saved,
    State,
    add_gradients,
    zero_gradients,
)
from torch_fdattn.dist.ring_attention.plan import BlockCall, block_calls
from torch_fdattn.dist.ring_attention.sequence_shards import Run

ROOT = 0


def _calls(problem: Problem) -> list[BlockCall]:
    everything = [Run(0, problem.shards.total)]
    return block_calls(everything, problem.shards.ranks[problem.rank], problem.left, problem.right)


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor, Saved]:
    all_queries = gather(q, problem)
    state = State(all_queries, problem)
    state.add(k, v, _calls(problem))
    out, lse = _merged_by_root(*state.parts(), problem)
    saved = Saved(all_queries, k, v, out.to(q.dtype), lse)
    own_out, own_lse = (problem.shards.shard(x, problem.rank, dim=2) for x in (saved.out, lse))
    return torch.empty_like(q).copy_(own_out), own_lse.clone(), saved


def _merged_by_root(out: Tensor, lse: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    packed = torch.cat([out, lse.unsqueeze(-1)], -1)
    nothing = packed[:, :, :0]
    is_root = problem.rank == ROOT
    received = all_to_all(
        [packed if r == ROOT else nothing for r in range(problem.world_size)],
        [packed.shape if is_root else nothing.shape] * problem.world_size,
        problem.group_name,
    )
    if is_root:
        parts = torch.stack(received)
        out, lse = torch.ops.fdattn.merge_states_forward(parts[..., :-1], parts[..., -1], out.dtype)
        packed = torch.cat([out, lse.unsqueeze(-1)], -1)
    packed = torch.ops._c10d_functional.broadcast(packed, ROOT, problem.group_name)
    packed = torch.ops._c10d_functional.wait_tensor(packed)
    return packed[..., :-1], packed[..., -1].contiguous()


def backward(
    dout: Tensor, dlse: Tensor | None, saved: Saved, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    dout = gather(dout, problem)
    if dlse is not None:
        dlse = gather(dlse.unsqueeze(-1), problem).squeeze(-1)
    dq, dkv = zero_gradients(saved.q, saved.k.shape)
    add_gradients(dout, dlse, saved, _calls(problem), problem, dq, dkv)
    return scatter_sum(dq, problem), *dkv.unbind()
