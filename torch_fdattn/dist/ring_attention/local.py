"""Runs a plan's calls on this rank: states merged in fp32, gradients summed in fp32.

B batch, H query heads, K KV heads, M queries, N keys, D head dim. States and gradients are fp32 (fp64 for
fp64 inputs) until the last step, whatever the inputs' dtype: between steps nothing is rounded.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from torch_fdattn.dist.ring_attention.plan import BlockCall, block_calls, cut
from torch_fdattn.dist.ring_attention.sequence_shards import Run, SequenceShards
from torch_fdattn.ops.attention.derivative_op import raw_backward
from torch_fdattn.ops.attention.dropout import NO_DROPOUT, Dropout
from torch_fdattn.ops.attention.op import raw_forward
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import NO_SCORES, Scores, add_sinks


class Problem(NamedTuple):
    """What a strategy knows besides the tensors; equal on all ranks but for `rank`."""

    group_name: str
    rank: int
    shards: SequenceShards
    left: int
    right: int
    scale: float
    scores: Scores = NO_SCORES
    documents: tuple[int, ...] = ()  # where each begins, and where the last one ends
    prefix_lens: tuple[
        int, ...
    ] = ()  # of each document, or one of all: positions that see each other
    kv_lens: Tensor | None = None  # (B,): positions from there on are no keys
    dropout: Dropout = NO_DROPOUT
    score_grads: Scores = NO_SCORES  # sums to add to, of slopes and mask; None: nobody asks
    invariant_block: int | None = None  # `rank_invariant.py`
    kv_heads: int = 0
    hierarchy: tuple[str, str] | None = None  # the groups (inner, outer) of `ulysses_ring`

    @property
    def world_size(self) -> int:
        return self.shards.world_size

    @property
    def group(self) -> dist.ProcessGroup:
        """The group itself, for collectives of torch.distributed; code that is traced takes the name."""
        return distributed_c10d._resolve_process_group(self.group_name)

    def scores_of(self, call: BlockCall, sinks: Tensor | None = None) -> Scores:
        """Of a call: without the sinks, which join once all keys are seen; unless it sees all of them, and gets them."""
        softcap, slopes, _, mask = self.scores
        return Scores(softcap, slopes, sinks, None if mask is None else _part_of(mask, call))

    def calls(self, q_runs: Sequence[Run], kv_runs: Sequence[Run]) -> tuple[BlockCall, ...]:
        """Of queries and keys that lie in these runs."""
        scores = self.scores
        if self.invariant_block is not None:
            q_runs, kv_runs = (cut(runs, self.invariant_block) for runs in (q_runs, kv_runs))
        by_position = (
            self.dropout.p > 0
            or self.invariant_block is not None
            or any(x is not None for x in (scores.alibi_slopes, scores.attn_mask, self.kv_lens))
        )
        given = tuple(q_runs), tuple(kv_runs), self.left, self.right, by_position
        return _planned(*given, self.documents, self.prefix_lens)


@functools.lru_cache(maxsize=1024)
def _planned(*given) -> tuple[BlockCall, ...]:
    """`block_calls`, which all layers of a model ask for alike; of many documents it takes as long as their launches."""
    return tuple(block_calls(*given))


def _part_of(mask: Tensor, call: BlockCall) -> Tensor:
    """The call's rows and columns, of a mask (or its gradient) of this rank's rows and all positions."""
    rows, keys = slice(call.q_begin, call.q_end), slice(None)
    if mask.shape[3] > 1:
        keys = slice(call.kv_start, call.kv_start + call.kv_end - call.kv_begin)
    return mask[:, :, rows if mask.shape[2] > 1 else slice(None), keys]


def state_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class State:
    """The running (out, lse) of this rank's queries, (B, H, M, D) and (B, H, M)."""

    def __init__(self, q: Tensor, problem: Problem) -> None:
        self._q, self._problem = q, problem
        self._out = self._lse = None
        self._rows: set[tuple[int, int]] = set()  # row ranges that already hold a state

    def add(self, k: Tensor, v: Tensor, calls: Sequence[BlockCall]) -> None:
        """Attends to one block of keys, k and v (B, K, N, D)."""
        for call in calls:
            q = self._q[:, :, call.q_begin : call.q_end]
            keys = slice(call.kv_begin, call.kv_end)
            out, lse = raw_forward(
                q, k[:, :, keys], v[:, :, keys], *call_mask(call, q, self._problem),
                self._problem.scale, state_dtype(q), *self._problem.scores_of(call), *self._problem.dropout,
            )  # fmt: skip
            self._merge(call, out, lse)

    def _merge(self, call: BlockCall, out: Tensor, lse: Tensor) -> None:
        rows = slice(call.q_begin, call.q_end)
        if self._out is None:
            if rows == slice(0, self._q.shape[2]):
                self._out, self._lse = out, lse
                self._rows.add((call.q_begin, call.q_end))
                return
            self._start_empty()
        # Rows that no call has touched yet are written, the others merged.
        if any(begin < call.q_end and call.q_begin < end for begin, end in self._rows):
            outs = torch.stack([self._out[:, :, rows], out])
            lses = torch.stack([self._lse[:, :, rows], lse])
            out, lse = torch.ops.fdattn.merge_states_forward(outs, lses, out.dtype)
        self._out[:, :, rows] = out
        self._lse[:, :, rows] = lse
        self._rows.add((call.q_begin, call.q_end))

    def parts(self) -> tuple[Tensor, Tensor]:
        """The fp32 (out, lse) so far, without sinks; rows without keys 0 and -inf."""
        if self._out is None:
            self._start_empty()
        return self._out, self._lse

    def finish(self) -> tuple[Tensor, Tensor]:
        """(out in q's dtype and memory layout, lse)."""
        out, lse = add_sinks(*self.parts(), self._problem.scores.sinks)
        return torch.empty_like(self._q).copy_(out), lse

    def _start_empty(self) -> None:
        self._out = torch.zeros_like(self._q, dtype=state_dtype(self._q))
        self._lse = self._out.new_full(self._q.shape[:-1], float("-inf"))


class Saved(NamedTuple):
    """What a strategy's forward keeps for its backward: queries with their results, and keys."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


def add_gradients(
    dout: Tensor, dlse: Tensor | None, saved: Saved, calls: Iterable[BlockCall], problem: Problem,
    dq: Tensor, dkv: Tensor,
) -> None:  # fmt: skip
    """Adds the calls' gradients to dq (B, H, M, D) and dkv (2, B, K, N, D), both fp32, and to the problem's score_grads."""
    for call, *found in call_gradients(dout, dlse, saved, calls, problem):
        rows, keys = slice(call.q_begin, call.q_end), slice(call.kv_begin, call.kv_end)
        dq[:, :, rows] += found[0]
        dkv[0][:, :, keys] += found[1]
        dkv[1][:, :, keys] += found[2]
        del found  # or the next call's would be allocated while they are kept


def call_gradients(
    dout: Tensor, dlse: Tensor | None, saved: Saved, calls: Iterable[BlockCall], problem: Problem
) -> Iterator[tuple[BlockCall, Tensor, Tensor, Tensor]]:
    """Of each call, in turn, itself and fp32 dq, dk, dv of its rows and keys; those of scores go to the problem's score_grads."""
    _, slopes, _, mask = problem.score_grads
    backward, flags = raw_backward, ()
    if slopes is not None or mask is not None:
        backward = torch.ops.fdattn.attention_backward_all
        flags = slopes is not None, False, mask is not None
    for call in calls:
        rows, keys = slice(call.q_begin, call.q_end), slice(call.kv_begin, call.kv_end)
        q, out, lse = (x[:, :, rows] for x in (saved.q, saved.out, saved.lse))
        found = backward(
            dout[:, :, rows], None if dlse is None else dlse[:, :, rows],
            q, saved.k[:, :, keys], saved.v[:, :, keys], out, lse, *flags,
            *call_mask(call, q, problem), problem.scale, state_dtype(q), *problem.scores_of(call), *problem.dropout,
        )  # fmt: skip
        if slopes is not None:
            slopes += found[3]
        if mask is not None:
            _part_of(mask, call).add_(found[5])
        of_tensors = found[:3]
        del found
        yield call, *of_tensors
        del of_tensors


def zero_gradients(q: Tensor, kv_shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """fp32 zeros dq like q and dkv (2, *kv_shape)."""
    dtype = state_dtype(q)
    return q.new_zeros(q.shape, dtype=dtype), q.new_zeros((2, *kv_shape), dtype=dtype)


def call_mask(call: BlockCall, q: Tensor, problem: Problem) -> Mask:
    """The mask of a call's queries q."""
    if call.q_start is None or call.kv_start is None:
        return Mask()
    if call.ends_together and problem.kv_lens is None and problem.dropout.p == 0:
        # Kernels know more of a mask without positions; a tensor of these is a launch of its own.
        return Mask(None, None, None, *call.window)
    starts = (
        q.new_full((q.shape[0],), x, dtype=torch.int32) for x in (call.q_start, call.kv_start)
    )
    lens = problem.kv_lens
    if lens is not None:
        lens = (lens.clamp(min=0) - call.kv_start).clamp(0, call.kv_end - call.kv_begin)
    return Mask(lens, *starts, *call.window)
