"""Ring attention's forward with the same bits on any number of ranks.

Queries and keys are cut at the same positions on any number of ranks, each pair of blocks is one call of one shape, and the
states of a block of queries are merged in one tree over the positions of keys (`dist/state_tree.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fdattn.dist.ring_attention.local import Problem, State, call_mask, state_dtype
from torch_fdattn.dist.ring_attention.plan import BlockCall
from torch_fdattn.dist.state_tree import StateTree, expect_block, in_one_layout, with_sinks
from torch_fdattn.ops.attention.dropout import Dropout
from torch_fdattn.ops.scores import Scores


def check_block(problem: Problem, strategy: str) -> None:
    """That no block of positions is on two ranks."""
    block, shards = problem.invariant_block, problem.shards
    expect_block(block)
    if block is None:
        return
    if strategy == "star":
        raise NotImplementedError(
            "strategy must not be 'star' with invariant_block: its root merges by ranks"
        )
    for runs in shards.ranks:
        for run in runs:
            if run.start % block or (run.end % block and run.end != shards.total):
                raise ValueError(
                    f"shards must begin and end at multiples of invariant_block={block}, got positions {run.start} to "
                    f"{run.end}: take a smaller block, or other shards"
                )


def state_of(q: Tensor, problem: Problem) -> State | InvariantState:
    """Where a strategy collects the states of these queries."""
    return State(q, problem) if problem.invariant_block is None else InvariantState(q, problem)


class InvariantState:
    """As `local.State`, of one block of queries after the other; q (B, H, M, D)."""

    def __init__(self, q: Tensor, problem: Problem) -> None:
        self._q, self._problem, self._block = q, problem, problem.invariant_block
        #: Of each block of queries: its first row here, and its states.
        self._trees: dict[int, StateTree] = {}

    def add(self, k: Tensor, v: Tensor, calls: Sequence[BlockCall]) -> None:
        """All calls over the blocks that k and v have, whose queries and keys are cut at the blocks' ends."""
        pairs: dict[tuple[int, int], list[BlockCall]] = {}
        for call in calls:
            first_row = call.q_begin - call.q_start % self._block
            pairs.setdefault((first_row, call.kv_start // self._block), []).append(call)
        for (row, index), of_pair in pairs.items():
            state = self._state(k, v, row, of_pair)
            self._trees.setdefault(row, StateTree()).add((0, index), *state)

    def _rows(self, row: int) -> slice:
        """Of the block of queries that begins here: all but the sequence's last one are whole."""
        begin = 0
        for run in self._problem.shards.ranks[self._problem.rank]:
            if begin <= row < begin + run.length:
                return slice(row, min(row + self._block, begin + run.length))
            begin += run.length
        raise AssertionError(row)

    def _state(
        self, k: Tensor, v: Tensor, row: int, calls: list[BlockCall]
    ) -> tuple[Tensor, Tensor]:
        """Of a block of queries over a block of keys; several calls where documents begin inside of them."""
        rows = self._rows(row)
        if len(calls) == 1 and (calls[0].q_begin, calls[0].q_end) == (rows.start, rows.stop):
            return self._attend(k, v, calls[0])
        out, lse = self._empty(rows)
        for call in calls:
            own = slice(call.q_begin - row, call.q_end - row)
            out[:, :, own], lse[:, :, own] = self._attend(k, v, call)
        return out, lse

    def _attend(self, k: Tensor, v: Tensor, call: BlockCall) -> tuple[Tensor, Tensor]:
        problem, keys = self._problem, slice(call.kv_begin, call.kv_end)
        q = self._q[:, :, call.q_begin : call.q_end]
        scores = problem.scores_of(call)
        mask = call_mask(call, q, problem)
        tensors = q, k[:, :, keys], v[:, :, keys]
        parts = [(tensors, scores, problem.dropout)]
        if q.is_cpu:
            # There how products are computed may depend on how many heads share keys, which are fewer where ranks share heads.
            parts = [
                (map(in_one_layout, of_part), *own)
                for of_part, *own in _by_head(*tensors, scores, problem.dropout)
            ]
        states = [
            torch.ops.fdattn.attention_forward(
                *of_part, *mask, problem.scale, state_dtype(q), *own, *dropout
            )
            for of_part, own, dropout in parts
        ]  # fmt: skip
        return tuple(torch.cat(x, 1) for x in zip(*states, strict=True))

    def _empty(self, rows: slice) -> tuple[Tensor, Tensor]:
        shape = (*self._q.shape[:2], rows.stop - rows.start)
        out = self._q.new_zeros((*shape, self._q.shape[3]), dtype=state_dtype(self._q))
        return out, out.new_full(shape, float("-inf"))

    def finish(self) -> tuple[Tensor, Tensor]:
        """(out in q's dtype and memory layout, lse)."""
        q, sinks = self._q, self._problem.scores.sinks
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=state_dtype(q))
        row = 0
        while row < q.shape[2]:
            rows = self._rows(row)
            tree = self._trees.get(row, StateTree())
            state = with_sinks(*(tree.root() or self._empty(rows)), sinks)
            out[:, :, rows], lse[:, :, rows] = state
            row = rows.stop
        return out, lse


def _by_head(q: Tensor, k: Tensor, v: Tensor, scores: Scores, dropout: Dropout):
    """The tensors, scores and dropout of each query head."""
    group, mask = q.shape[1] // k.shape[1], scores.attn_mask
    for head in range(q.shape[1]):
        own, keys = slice(head, head + 1), slice(head // group, head // group + 1)
        slopes = scores.alibi_slopes
        yield (
            (q[:, own], k[:, keys], v[:, keys]),
            scores._replace(
                alibi_slopes=None if slopes is None else slopes[..., own],
                attn_mask=mask if mask is None or mask.shape[1] == 1 else mask[:, own],
            ),
            dropout.from_head(head),
        )
