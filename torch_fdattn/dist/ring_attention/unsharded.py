"""Attention of this rank's queries over K and V of the whole sequence, in the order of positions.

What the strategies share that bring all keys to the queries (`all_gather`, `ulysses`, `query_split`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.dist.ring_attention.local import (
    Problem,
    Saved,
    add_gradients,
    call_mask,
    zero_gradients,
)
from torch_fdattn.dist.ring_attention.plan import BlockCall
from torch_fdattn.dist.ring_attention.rank_invariant import state_of
from torch_fdattn.dist.ring_attention.sequence_shards import Run


def _calls(problem: Problem) -> list[BlockCall]:
    everything = [Run(0, problem.shards.total)]
    return problem.calls(problem.shards.ranks[problem.rank], everything)


def attend_unsharded(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries."""
    calls = _calls(problem)
    alone = len(calls) == 1 and calls[0][:2] == (0, q.shape[2])
    if alone and problem.invariant_block is None:  # nothing to merge: no fp32 state
        call = calls[0]
        keys = slice(call.kv_begin, call.kv_end)
        return torch.ops.fdattn.attention_forward(
            q, k[:, :, keys], v[:, :, keys], *call_mask(call, q, problem), problem.scale, None,
            *problem.scores_of(call)._replace(sinks=problem.scores.sinks), *problem.dropout,
        )  # fmt: skip
    state = state_of(q, problem)
    state.add(k, v, calls)
    return state.finish()


def unsharded_gradients(
    dout: Tensor, dlse: Tensor | None, saved: Saved, problem: Problem
) -> tuple[Tensor, Tensor]:
    """dq, and this rank's part of dkv (2, B, K, total, D), both fp32."""
    dq, dkv = zero_gradients(saved.q, saved.k.shape)
    add_gradients(dout, dlse, saved, _calls(problem), problem, dq, dkv)
    return dq, dkv
