"""Strategy `ulysses`: all-to-alls turn sequence shards into head shards and back (arXiv:2309.14509).

Between them every rank attends over the whole sequence for H / W query heads and K / W KV heads: no merge,
balanced under any mask, two all-to-alls of the activations each way. The number of ranks must divide
both head counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.dist.point_to_point import all_to_all
from torch_fdattn.dist.ring_attention.layout import gather_mask, in_order_of, with_length
from torch_fdattn.dist.ring_attention.local import Problem, Saved
from torch_fdattn.dist.ring_attention.sequence_shards import SequenceShards
from torch_fdattn.dist.ring_attention.unsharded import attend_unsharded, unsharded_gradients
from torch_fdattn.ops.scores import Scores


def check_heads(q_heads: int, kv_heads: int, world_size: int) -> None:
    for name, heads in (("q", q_heads), ("k", kv_heads)):
        if heads % world_size:
            raise ValueError(
                f"{name}'s head count must be divisible by the {world_size} ranks with "
                f"strategy='ulysses', got {heads} heads"
            )


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor, Saved]:
    own_q = q
    q, k, v = (_to_heads(x, problem) for x in (q, k, v))
    out, lse = attend_unsharded(q, k, v, _one_rank(problem, own_q.shape[2]))
    own_out = in_order_of(own_q, _to_tokens(out, problem))
    own_lse = _to_tokens(lse.unsqueeze(-1), problem).squeeze(-1)
    return own_out, own_lse, Saved(q, k, v, out, lse)


def backward(
    dout: Tensor, dlse: Tensor | None, saved: Saved, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    alone = _one_rank(problem, dout.shape[2])
    dout = _to_heads(dout, problem)
    if dlse is not None:
        dlse = _to_heads(dlse.unsqueeze(-1), problem).squeeze(-1)
    dq, dkv = unsharded_gradients(dout, dlse, saved, alone)
    return tuple(_to_tokens(x.to(saved.q.dtype), problem) for x in (dq, *dkv.unbind()))


def _to_heads(x: Tensor, problem: Problem) -> Tensor:
    """(B, H, S_r, D) of this rank's tokens to (B, H / W, S, D) of its heads, in order of positions."""
    parts = x.chunk(problem.world_size, dim=1)
    shapes = [with_length(parts[0].shape, length) for length in problem.shards.lengths]
    return problem.shards.join(all_to_all(parts, shapes, problem.group_name), dim=2)


def _to_tokens(x: Tensor, problem: Problem) -> Tensor:
    """The inverse of `_to_heads`."""
    parts = [problem.shards.shard(x, r, dim=2) for r in range(problem.world_size)]
    own = with_length(x.shape, problem.shards.lengths[problem.rank])
    return torch.cat(all_to_all(parts, [own] * problem.world_size, problem.group_name), dim=1)


def _one_rank(problem: Problem, rows: int) -> Problem:
    """The same problem for ranks that hold the whole sequence, of some heads; rows: queries that this rank has."""

    def own(x: Tensor | None, dim: int) -> Tensor | None:
        """What has an entry for each head: those of this rank's heads."""
        if x is None or x.shape[dim] == 1:
            return x
        return x.chunk(problem.world_size, dim)[problem.rank]

    softcap, slopes, sinks, _ = problem.scores
    scores = Scores(softcap, own(slopes, -1), own(sinks, -1), own(gather_mask(problem, rows), 1))
    grads = Scores(alibi_slopes=own(problem.score_grads.alibi_slopes, -1))
    shards = SequenceShards.contiguous(problem.shards.total, 1)
    return problem._replace(rank=0, shards=shards, scores=scores, score_grads=grads)
