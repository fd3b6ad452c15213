"""Strategy `ulysses`: all-to-alls turn sequence shards into head shards and back (arXiv:2309.14509).

Between them every rank attends over the whole sequence for H / W query heads and K / W KV heads (or a copy of one): no
merge, balanced under any mask, two all-to-alls of the activations each way. The number of ranks must divide the query heads,
and divide the KV heads or be a multiple of them.
"""

from __future__ import annotations

from torch import Tensor

from torch_fdattn.dist.ring_attention.heads import (
    keys_to_heads,
    keys_to_tokens,
    of_own_heads,
    to_heads,
    to_tokens,
)
from torch_fdattn.dist.ring_attention.layout import in_order_of
from torch_fdattn.dist.ring_attention.local import Problem, Saved
from torch_fdattn.dist.ring_attention.sequence_shards import Run, SequenceShards
from torch_fdattn.dist.ring_attention.unsharded import attend_unsharded, unsharded_gradients


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor, Saved]:
    own_q = q
    q, k, v = to_heads(q, problem), *(keys_to_heads(x, problem) for x in (k, v))
    out, lse = attend_unsharded(q, k, v, _one_rank(problem, own_q))
    own_out = in_order_of(own_q, to_tokens(out, problem))
    own_lse = to_tokens(lse.unsqueeze(-1), problem).squeeze(-1)
    return own_out, own_lse, Saved(q, k, v, out, lse)


def backward(
    dout: Tensor, dlse: Tensor | None, saved: Saved, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    alone = _one_rank(problem, dout)
    dout = to_heads(dout, problem)
    if dlse is not None:
        dlse = to_heads(dlse.unsqueeze(-1), problem).squeeze(-1)
    dq, dkv = unsharded_gradients(dout, dlse, saved, alone)
    dtype = saved.q.dtype
    everything = dkv.of([Run(0, problem.shards.total)])
    of_keys = (keys_to_tokens(x, problem, dtype) for x in everything.unbind())
    return to_tokens(dq.to(dtype), problem), *of_keys


def _one_rank(problem: Problem, q: Tensor) -> Problem:
    """The same problem for ranks that hold the whole sequence, of some heads; q: like this rank's queries."""
    shards = SequenceShards.contiguous(problem.shards.total, 1)
    return problem._replace(rank=0, shards=shards, **of_own_heads(problem, q))
