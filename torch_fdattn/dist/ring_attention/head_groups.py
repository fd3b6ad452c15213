"""Groups of heads, which `one_sided` attends one after another: less memory, and transport beside attention."""

from __future__ import annotations

import itertools
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torch_fdattn.dist.collectives import split_evenly
from torch_fdattn.dist.ring_attention.heads import of_heads
from torch_fdattn.dist.ring_attention.local import Problem
from torch_fdattn.dist.ring_attention.unsharded import unsharded_calls


class Limits(NamedTuple):
    """Bytes of K and V of a group of heads, unless one head has more."""

    forward: int  # of the whole sequence
    #: of a rank's shard of the mean length: each has fp32 gradients beside it, here and in symmetric memory
    backward: int
    undivided: int  # of all heads of a whole sequence: the host takes longer to launch one more group than memory is worth


_LIMITS = Limits(forward=256 * 2**20, backward=32 * 2**20, undivided=128 * 2**20)
#: Calls of attention of a rank, of packed documents say, beyond which all heads are one group: the host would take longer to
#: launch them once more for each group than the device takes to run them.
_MAX_CALLS = 4


class HeadGroup(NamedTuple):
    """Some KV heads, from the first one on, and the query heads that share them."""

    first: int
    count: int
    share: int  # query heads of a KV head
    is_all: bool  # there are no other heads

    @property
    def first_query(self) -> int:
        return self.first * self.share

    def of_queries(self, x: Tensor) -> Tensor:
        return x.narrow(1, self.first_query, self.count * self.share)

    def of_keys(self, x: Tensor) -> Tensor:
        return x.narrow(1, self.first, self.count)

    def of(self, problem: Problem) -> Problem:
        if self.is_all:
            return problem
        first, count = self.first_query, self.count * self.share
        return problem._replace(**of_heads(problem, first, count, problem.scores.attn_mask))


def head_groups(
    q: Tensor, k: Tensor, problem: Problem, of: Literal["forward", "backward"]
) -> list[HeadGroup]:
    """The same on all ranks; the largest one first, whose memory the others then use."""
    batch, heads, _, dim = k.shape
    of_head = 2 * batch * problem.shards.total * dim * k.element_size()
    at_most = _LIMITS.forward if of == "forward" else _LIMITS.backward * problem.world_size
    count = -(-heads // max(1, at_most // max(1, of_head)))
    if heads * of_head <= _LIMITS.undivided:
        count = 1
    elif count > 1:
        ranks = (problem._replace(rank=rank) for rank in range(problem.world_size))
        if any(len(unsharded_calls(of_rank)) > _MAX_CALLS for of_rank in ranks):
            count = 1
    sizes = split_evenly(heads, count)
    firsts = itertools.accumulate([0, *sizes])
    share = q.shape[1] // heads
    return [
        HeadGroup(first, size, share, count == 1)
        for first, size in zip(firsts, sizes, strict=False)
    ]


class AllHeads:
    """A result of all heads, to which each group's is written: joined in the end, it would be in memory twice.

    Attributes:
        result: behind the last group's.
    """

    result: Tensor

    def __init__(self, heads: int, dim: int = 1) -> None:
        self._heads, self._dim, self._is_made = heads, dim, False

    def write(self, part: Tensor, first: int, like: Tensor | None = None) -> None:
        """part: of heads from `first` on; like: in whose dtype and layout all are, unless one group has them all."""
        count = part.shape[self._dim]
        if count == self._heads:
            self.result = part
            return
        if not self._is_made:
            shape = *part.shape[: self._dim], self._heads, *part.shape[self._dim + 1 :]
            self.result = part.new_empty(shape) if like is None else torch.empty_like(like)
            self._is_made = True
        self.result.narrow(self._dim, first, count).copy_(part)
