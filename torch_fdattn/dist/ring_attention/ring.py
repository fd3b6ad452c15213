"""Strategy `ring`: K and V go round the ranks while each computes (Liu et al., arXiv:2310.01889).

At step i rank r holds the keys of rank r - i. The next block is on its way while the kernels run on the
present one, so a rank holds its own shard and at most two blocks more. In the backward the blocks go
round again, followed by the fp32 sums of their gradients, which are one step behind: a block's sum is
added to by ranks s, s + 1, … in this order, and ends with a last hop at its owner s.

Wins where a step's kernels take longer than sending a block (long shards), and where K and V of the whole
sequence do not fit. Traced by torch.compile it sends by functional all-to-alls, in order, not overlapped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from torch_fdattn.dist.groups import is_traced
from torch_fdattn.dist.point_to_point import send_to_next, with_dependency
from torch_fdattn.dist.ring_attention.local import (
    Problem,
    Saved,
    add_gradients,
    zero_gradients,
)
from torch_fdattn.dist.ring_attention.rank_invariant import state_of


class _Hop:
    """Tensors on their way to the next rank, and those coming from the previous one."""

    def __init__(self, tensors: Sequence[Tensor], shape: Sequence[int], problem: Problem) -> None:
        """`shape` is that of each tensor that comes in; dtype and number are those of `tensors`."""
        self._sent = [x.contiguous() for x in tensors]
        self._traced = is_traced(tensors[0])
        self._works: list[dist.Work] = []
        if problem.world_size == 1:
            self._received = self._sent
            return
        if self._traced:
            ring = problem.rank, problem.world_size, problem.group_name
            stacked = torch.stack(self._sent)
            self._received = list(send_to_next(stacked, [len(stacked), *shape], *ring).unbind())
            return
        self._received = [x.new_empty(shape) for x in tensors]
        group = _resolve_process_group(problem.group_name)
        to, source = (
            (problem.rank + 1) % problem.world_size,
            (problem.rank - 1) % problem.world_size,
        )
        operations = [
            dist.P2POp(operation, x, group=group, group_peer=peer)
            for operation, side, peer in (
                (dist.isend, self._sent, to), (dist.irecv, self._received, source),
            )
            for x in side
            if x.numel()
        ]  # fmt: skip
        if operations:
            self._works = dist.batch_isend_irecv(operations)

    def wait(self) -> list[Tensor]:
        """The tensors of the previous rank."""
        for work in self._works:
            work.wait()
        self._works, self._sent = [], []
        return self._received


def _block_shape(k: Tensor, problem: Problem, source: int) -> list[int]:
    return [*k.shape[:2], problem.shards.lengths[source], k.shape[3]]


def _source(problem: Problem, step: int) -> int:
    return (problem.rank - step) % problem.world_size


def _calls(problem: Problem, step: int):
    ranks = problem.shards.ranks
    return problem.calls(ranks[problem.rank], ranks[_source(problem, step)])


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor, Saved]:
    own = k, v
    state = state_of(q, problem)
    for step in range(problem.world_size):
        hop = _next_block(k, v, problem, step)
        state.add(k, v, _calls(problem, step))
        if hop is not None:
            k, v = hop.wait()
    out, lse = state.finish()
    # The last block has come through all of the hops.
    out = with_dependency(out, q, k, v, problem.scores.attn_mask)
    return out, lse, Saved(q, *own, out, lse)


def backward(
    dout: Tensor, dlse: Tensor | None, saved: Saved, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    given = dout, dlse, *saved, problem.scores.attn_mask
    dq, dkv = (with_dependency(x, *given) for x in zero_gradients(saved.q, saved.k.shape))
    sums: _Hop | None = None
    for step in range(problem.world_size):
        hop = _next_block(saved.k, saved.v, problem, step)
        if step:
            dkv = dkv.new_zeros((2, *saved.k.shape))
        add_gradients(dout, dlse, saved, _calls(problem, step), problem, dq, dkv)
        if sums is not None:
            dkv += sums.wait()[0]
        # It follows its block: to the rank that works on it next, at the end to its owner.
        source = _source(problem, step + 1)
        sums = _Hop([dkv], [2, *_block_shape(saved.k, problem, source)], problem)
        if hop is not None:
            k, v = hop.wait()
            saved = saved._replace(k=k, v=v)
    dq, dkv = (with_dependency(x, saved.k, saved.v) for x in (dq, sums.wait()[0]))
    return dq, *dkv.unbind()


def _next_block(k: Tensor, v: Tensor, problem: Problem, step: int) -> _Hop | None:
    """Sends the present block on and starts to receive the one of the step after `step`."""
    if step + 1 == problem.world_size:
        return None
    return _Hop([k, v], _block_shape(k, problem, _source(problem, step + 1)), problem)
