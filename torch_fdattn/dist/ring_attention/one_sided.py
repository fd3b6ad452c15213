"""Strategy `one_sided`: copy engines bring K and V of all ranks into place, and each run of queries is one kernel call.

As `all_gather`, without its collective: through symmetric memory each rank writes its runs to where they belong in the
others' memory, in the order of positions, so that nothing is joined afterwards and no SM takes part. The gradients of other
ranks' keys go back the same way, and are summed in the order of ranks. No states between steps, hence no merges.

A call waits only for the keys that it sees. Each rank's runs travel in two parts, the first half of them ahead: of zigzag
shards and a causal mask the first call of a rank, over an early run of queries, needs at most the others' first parts, and
the later runs of keys arrive beside it.

Memory: symmetric memory for K and V of the whole sequence, and in the backward for the fp32 gradients of a shard from each
rank, which stays (`dist/symm/channel.py`); in the backward also the fp32 gradients of the keys that a rank's calls see, and
those of all positions by owner. Ranks of one host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_fdattn.dist.consensus import leaving_by_exceptions
from torch_fdattn.dist.ring_attention.local import Problem, Saved
from torch_fdattn.dist.ring_attention.plan import BlockCall
from torch_fdattn.dist.ring_attention.sequence_shards import Run, SequenceShards
from torch_fdattn.dist.ring_attention.unsharded import (
    Arriving,
    attend_unsharded,
    unsharded_gradients,
)
from torch_fdattn.ops.library import launches

if TYPE_CHECKING:  # symmetric memory is imported where ranks are
    from torch_fdattn.dist.symm.copies import Copies


def forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor, Saved]:
    results: list[Tensor] = []
    with (
        leaving_by_exceptions(
            problem.group_name, "ring_attention's forward (strategy 'one_sided')"
        ) as all_is_sent,
        _all_keys(k, v, problem, results) as (keys, values, arriving),
    ):
        all_is_sent()
        results += attend_unsharded(q, keys, values, problem, arriving)
    out, lse = results
    return out, lse, Saved(q, k, v, out, lse)


def backward(
    dout: Tensor, dlse: Tensor | None, saved: Saved, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    results: list[Tensor] = []
    # The others wait for this rank's part of the sums, and had the same exception or time out.
    with leaving_by_exceptions(
        problem.group_name, "ring_attention's backward (strategy 'one_sided')"
    ) as all_is_sent:
        sums = _SumsOfShards(saved.k, problem)
        with _all_keys(saved.k, saved.v, problem, results) as (k, v, arriving):
            everything = saved._replace(k=k, v=v)
            dq, dkv = unsharded_gradients(dout, dlse, everything, problem, arriving)
            parts = [dkv.of(runs) for runs in problem.shards.ranks]
            of_scores = [x for x in problem.score_grads if isinstance(x, Tensor)]
            results += [dq, *parts, *of_scores]
        dk, dv = sums.own(parts, all_is_sent).unbind()
    return dq, dk, dv


@contextlib.contextmanager
def _all_keys(
    k: Tensor, v: Tensor, problem: Problem, results: list[Tensor]
) -> Iterator[tuple[Tensor, Tensor, Arriving]]:
    """K and V (B, K, total, D) in the order of positions, until the end of the block, and what waits for a call's keys.

    What is in `results` by then becomes NaN where a rank's copies did not come, or were overwritten; on CPUs that raises.
    """
    if problem.world_size == 1:
        yield problem.shards.join([k], dim=2), problem.shards.join([v], dim=2), iter
        return
    from torch_fdattn.dist.symm.copies import Copies

    launches["ring_attention/one_sided_gather"] += 1
    batch, heads, _, dim = k.shape
    shape = (2, problem.shards.total, batch, heads, dim)  # a run of positions lies in one block
    nbytes = torch.Size(shape).numel() * k.element_size()
    copies = Copies(problem.group_name, "ring_attention/gather", nbytes, k.device)
    there = copies.data(copies.rank, k.dtype, *shape)
    own = problem.shards.ranks[copies.rank]
    half = _ahead(own)
    first = half or len(own)
    placed = _place(k, v, there, own[:first], 0)
    copies.begin()
    with copies.until_finished(results):
        _send(there, own[:first], copies, ahead=half > 0)
        if half:  # while the first ones are under way
            _place(k, v, there, own[half:], placed)
            copies.follow(None)
            _send(there, own[half:], copies, ahead=False)
        yield *(x.permute(1, 2, 0, 3) for x in there), _arriving(copies, problem.shards)
    copies.raise_if_lost()


def _ahead(runs: Sequence[Run]) -> int:
    """How many of a rank's runs travel ahead of the others."""
    return len(runs) // 2


def _place(k: Tensor, v: Tensor, there: Tensor, runs: Sequence[Run], begin: int) -> int:
    """Writes runs, which begin at this token of k and v, to their positions; where the next ones begin."""
    from torch_fdattn.dist.ring_attention.placing import place

    for run in runs:
        place(k, v, there, begin, run)
        begin += run.length
    return begin


def _send(there: Tensor, runs: Sequence[Run], copies: Copies, ahead: bool) -> None:
    """To all other ranks, from their place here to the same place there; there (2, total, B, K, D)."""
    row = torch.Size(there.shape[2:]).numel()
    chunks = [
        (x[run.start : run.end], (first + run.start) * row)
        for x, first in zip(there, (0, there.shape[1]), strict=True)
        for run in runs
    ]
    for i in range(1, copies.world):
        copies.send_all(chunks, (copies.rank - i) % copies.world, ahead)


def _arriving(copies: Copies, shards: SequenceShards) -> Arriving:
    """Waits, on the device, for the parts of all ranks that have keys of the call; `finish` waits for all others."""

    def in_turn(calls: Iterable[BlockCall]) -> Iterator[BlockCall]:
        awaited: set[tuple[int, bool]] = set()
        for call in calls:
            for i in range(1, copies.world):
                peer = (copies.rank + i) % copies.world
                runs = shards.ranks[peer]
                seen = [
                    n
                    for n, run in enumerate(runs)
                    if run.start < call.kv_end and run.end > call.kv_begin
                ]
                part = peer, bool(seen) and seen[-1] < _ahead(runs)
                if seen and not {part, (peer, False)} & awaited:
                    copies.await_(*part)
                    awaited.add(part)
            yield call

    return in_turn


class _SumsOfShards:
    """Sums over all ranks, of which each gets those of its own shard.

    Made before anything that may fail: all ranks make the memory together (`dist/symm/channel.py`), without a time limit.
    """

    def __init__(self, k: Tensor, problem: Problem) -> None:
        """k: this rank's keys, of which dK and dV are summed in fp32."""
        self._problem = problem
        if problem.world_size == 1:
            return
        from torch_fdattn.dist.symm.copies import Copies

        batch, heads, _, dim = k.shape
        largest = 2 * batch * heads * max(problem.shards.lengths) * dim
        nbytes = problem.world_size * largest * torch.float32.itemsize
        self._copies = Copies(problem.group_name, "ring_attention/sum", nbytes, k.device)

    def own(self, parts: Sequence[Tensor], all_is_sent: Callable[[], None]) -> Tensor:
        """The sum of what all ranks have of this rank's shard, fp32; parts: (2, B, K, S_r, D) of each rank's, contiguous."""
        world = self._problem.world_size
        if world == 1:
            return parts[0]
        from torch_fdattn.dist.symm.received_sums import sum_received

        launches["ring_attention/one_sided_sum"] += 1
        copies = self._copies
        own = parts[copies.rank]
        out = torch.empty_like(own)
        copies.begin()
        with copies.until_finished([out]):
            for i in range(1, world):
                owner = (copies.rank + i) % world
                copies.send(parts[owner], owner, copies.rank * parts[owner].numel())
            all_is_sent()
            if out.numel():
                sum_received(copies, own, out)
        copies.raise_if_lost()
        return out
