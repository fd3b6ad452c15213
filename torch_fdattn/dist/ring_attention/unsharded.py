"""Attention of this rank's queries over K and V of the whole sequence, in the order of positions.

What the strategies share that bring all keys to the queries (`all_gather`, `one_sided`, `ulysses`, `query_split`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from torch_fdattn.dist.ring_attention.local import (
    Problem,
    Saved,
    add_gradients,
    call_mask,
    state_dtype,
    zero_gradients,
)
from torch_fdattn.dist.ring_attention.plan import BlockCall
from torch_fdattn.dist.ring_attention.rank_invariant import state_of
from torch_fdattn.dist.ring_attention.sequence_shards import Run


def _calls(problem: Problem) -> list[BlockCall]:
    everything = [Run(0, problem.shards.total)]
    calls = problem.calls(problem.shards.ranks[problem.rank], everything)
    if problem.invariant_block is not None:  # the same shapes on any number of ranks
        return calls
    # So that gradients of keys are no longer than what has any.
    return [call.over_seen_keys() for call in calls]


#: Of a rank's calls: each in turn, once its keys are there.
Arriving = Callable[[Iterable[BlockCall]], Iterable[BlockCall]]


def attend_unsharded(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, arriving: Arriving = iter
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank's queries."""
    calls = _calls(problem)
    if problem.invariant_block is not None or not _apart(calls):
        state = state_of(q, problem)
        state.add(k, v, list(arriving(calls)))
        return state.finish()
    # Nothing to merge: no fp32 state.
    states = [_attend(q, k, v, call, problem) for call in arriving(calls)]
    if len(calls) == 1 and calls[0][:2] == (0, q.shape[2]):
        return states[0]
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=state_dtype(q))
    row = 0
    for call, state in zip(calls, states, strict=True):
        for x, part, nothing in ((out, state[0], 0.0), (lse, state[1], float("-inf"))):
            x[:, :, row : call.q_begin] = nothing  # rows that see no key
            x[:, :, call.q_begin : call.q_end] = part
        row = call.q_end
    out[:, :, row:], lse[:, :, row:] = 0.0, float("-inf")
    return out, lse


def _apart(calls: list[BlockCall]) -> bool:
    """Whether each row is of one call at most, in the order of rows."""
    return all(a.q_end <= b.q_begin for a, b in itertools.pairwise(calls))


def _attend(q, k, v, call: BlockCall, problem: Problem) -> tuple[Tensor, Tensor]:
    """Of a call that sees all that its rows see: with the sinks."""
    rows, keys = slice(call.q_begin, call.q_end), slice(call.kv_begin, call.kv_end)
    q = q[:, :, rows]
    return torch.ops.fdattn.attention_forward(
        q, k[:, :, keys], v[:, :, keys], *call_mask(call, q, problem), problem.scale, None,
        *problem.scores_of(call)._replace(sinks=problem.scores.sinks), *problem.dropout,
    )  # fmt: skip


def unsharded_gradients(
    dout: Tensor, dlse: Tensor | None, saved: Saved, problem: Problem, arriving: Arriving = iter
) -> tuple[Tensor, Tensor]:
    """dq, and this rank's part of dkv (2, B, K, total, D), both fp32."""
    dq, dkv = zero_gradients(saved.q, saved.k.shape)
    add_gradients(dout, dlse, saved, arriving(_calls(problem)), problem, dq, dkv)
    return dq, dkv
