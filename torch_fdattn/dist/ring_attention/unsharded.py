"""Attention of this rank's queries over K and V of the whole sequence, in the order of positions.

What the strategies share that bring all keys to the queries (`all_gather`, `one_sided`, `ulysses`, `query_split`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from torch_fdattn.dist.ring_attention.local import (
    Problem,
    Saved,
    call_gradients,
    call_mask,
    state_dtype,
)
from torch_fdattn.dist.ring_attention.plan import BlockCall
from torch_fdattn.dist.ring_attention.rank_invariant import state_of
from torch_fdattn.dist.ring_attention.sequence_shards import Run
from torch_fdattn.ops.attention.op import raw_forward


def unsharded_calls(problem: Problem) -> Sequence[BlockCall]:
    """Of this rank's queries over all keys."""
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
    calls = unsharded_calls(problem)
    if problem.invariant_block is not None or not _apart(calls):
        state = state_of(q, problem)
        state.add(k, v, list(arriving(calls)))
        return state.finish()
    # Nothing to merge: no fp32 state.
    states = [_attend(q, k, v, call, problem) for call in arriving(calls)]
    if not states:
        return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=state_dtype(q))
    if len(states) == 1:
        return states[0]
    # A query sees its own key whatever the mask, so there is no row without a call.
    outs, lses = zip(*states, strict=True)
    return torch.cat(outs, 2, out=torch.empty_like(q)), torch.cat(lses, 2)


def _apart(calls: Sequence[BlockCall]) -> bool:
    """Whether each row is of one call at most, in the order of rows."""
    return all(a.q_end <= b.q_begin for a, b in itertools.pairwise(calls))


def _attend(q, k, v, call: BlockCall, problem: Problem) -> tuple[Tensor, Tensor]:
    """Of a call that sees all that its rows see: with the sinks."""
    rows, keys = slice(call.q_begin, call.q_end), slice(call.kv_begin, call.kv_end)
    q = q[:, :, rows]
    return raw_forward(
        q, k[:, :, keys], v[:, :, keys], *call_mask(call, q, problem), problem.scale, None,
        *problem.scores_of(call, problem.scores.sinks), *problem.dropout,
    )  # fmt: skip


def unsharded_gradients(
    dout: Tensor, dlse: Tensor | None, saved: Saved, problem: Problem, arriving: Arriving = iter
) -> tuple[Tensor, GradientParts]:
    """dq, and this rank's part of dK and dV of all positions, both fp32."""
    dq, dkv = GradientParts(1, saved.q), GradientParts(2, saved.k)
    calls = arriving(unsharded_calls(problem))
    for call, of_q, *of_kv in call_gradients(dout, dlse, saved, calls, problem):
        dq.add(call.q_begin, call.q_end, of_q)
        dkv.add(call.kv_begin, call.kv_end, *of_kv)
    lengths = [run.length for run in problem.shards.ranks[problem.rank]]
    rows = [Run(*run) for run in zip(itertools.accumulate([0, *lengths]), lengths, strict=False)]
    return dq.of(rows)[0], dkv


class GradientParts:
    """Gradients of tensors like x (B, H, N, D) as calls made them, each of those of N that it saw: nothing is added, or filled
    with zeros, before it is known whose it is, unless what they hold is more than twice N.
    """

    def __init__(self, count: int, x: Tensor) -> None:
        """count: how many tensors each call has a gradient of."""
        self._count, self._x = count, x
        self._parts: list[tuple[int, int, tuple[Tensor, ...]]] = []

    def add(self, begin: int, end: int, *gradients: Tensor) -> None:
        self._parts.append((begin, end, gradients))
        length = self._x.shape[2]
        if len(self._parts) > 1 and sum(end - begin for begin, end, _ in self._parts) > 2 * length:
            self._parts = [(0, length, tuple(self.of([Run(0, length)])))]

    def of(self, runs: Sequence[Run]) -> Tensor:
        """(count, B, H, tokens of the runs, D), fp32: summed in the order of the calls."""
        if self._count == len(runs) == len(self._parts) == 1:
            begin, end, (gradient,) = self._parts[0]
            if (begin, end) == (runs[0].start, runs[0].end):
                return gradient[None]
        batch, heads, _, dim = self._x.shape
        shape = self._count, batch, heads, sum(run.length for run in runs), dim
        out, begin = self._x.new_empty(shape, dtype=state_dtype(self._x)), 0
        for run in runs:
            self._sum(run, out[:, :, :, begin : begin + run.length])
            begin += run.length
        return out

    def _sum(self, run: Run, out: Tensor) -> None:
        is_written = False
        for begin, end, gradients in self._parts:
            first, last = max(begin, run.start), min(end, run.end)
            if first >= last:
                continue
            if not is_written and last - first < run.length:
                out.zero_()
                is_written = True
            for there, gradient in zip(out, gradients, strict=True):
                there = there[:, :, first - run.start : last - run.start]
                part = gradient[:, :, first - begin : last - begin]
                there.add_(part) if is_written else there.copy_(part)
            is_written = True
        if not is_written:
            out.zero_()
