"""Strategy `one_sided`: copy engines bring K and V of all ranks into place, and each run of queries is one kernel call.

As `all_gather`, without its collective: through symmetric memory each rank writes its runs to where they belong in the
others' memory, in the order of positions, so that nothing is joined afterwards and no SM takes part. The gradients of other
ranks' keys go back the same way, and are summed in the order of ranks. No states between steps, hence no merges.

**Groups of heads.** Long sequences are attended a few KV heads at a time: the next group's keys come, and the last one's
gradients go, beside a group's attention, and memory is that of two groups.

A call waits only for the keys that it sees. Each rank's runs travel in two parts, the first half of them ahead: of zigzag
shards and a causal mask the first call of a rank, over an early run of queries, needs at most the others' first parts, and
the later runs of keys arrive beside it.

Memory: symmetric memory for K and V of the whole sequence, of two groups, and in the backward for the fp32 gradients of a
shard from each rank, of two groups, which stays (`dist/symm/channel.py`); in the backward also a group's fp32 gradients of
the keys that a rank's calls see, and those of all positions by owner. Ranks of one host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_fdattn.dist.consensus import leaving_by_exceptions
from torch_fdattn.dist.ring_attention.head_groups import AllHeads, HeadGroup, head_groups
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
    outs, lses = AllHeads(q.shape[1]), AllHeads(q.shape[1])
    groups = head_groups(q, k, problem, "forward")
    with (
        leaving_by_exceptions(
            problem.group_name, "ring_attention's forward (strategy 'one_sided')"
        ) as all_is_sent,
        _keys_of_groups(k, v, groups, problem, all_is_sent) as in_turn,
    ):
        for group, keys in in_turn:
            own = group.of_queries(q)
            out, lse = attend_unsharded(own, keys.k, keys.v, group.of(problem), keys.arriving)
            keys.finish([out, lse])
            outs.write(out, group.first_query, like=q)
            lses.write(lse, group.first_query)
    return outs.result, lses.result, Saved(q, k, v, outs.result, lses.result)


def backward(
    dout: Tensor, dlse: Tensor | None, saved: Saved, problem: Problem
) -> tuple[Tensor, Tensor, Tensor]:
    of_queries = AllHeads(saved.q.shape[1])
    groups = head_groups(saved.q, saved.k, problem, "backward")
    # The others wait for this rank's part of the sums, and had the same exception or time out.
    with leaving_by_exceptions(
        problem.group_name, "ring_attention's backward (strategy 'one_sided')"
    ) as all_is_sent:
        sums = _SumsOfShards(saved.k, groups, problem)
        with sums.finishing(), _keys_of_groups(saved.k, saved.v, groups, problem) as in_turn:
            for group, keys in in_turn:
                q, out, lse, of_out = map(group.of_queries, (saved.q, saved.out, saved.lse, dout))
                of_group = Saved(q, keys.k, keys.v, out, lse)
                of_lse = None if dlse is None else group.of_queries(dlse)
                dq, dkv = unsharded_gradients(
                    of_out, of_lse, of_group, group.of(problem), keys.arriving
                )
                parts = [dkv.of(runs) for runs in problem.shards.ranks]
                # Of the scores those of all heads, which is where a group's lie.
                of_scores = [x for x in problem.score_grads if isinstance(x, Tensor)]
                keys.finish([dq, *parts, *of_scores])
                of_queries.write(dq, group.first_query, like=saved.q)
                del dq, dkv  # before the next group's are made
                sums.send(parts, group.first)
            all_is_sent()
    return of_queries.result, *sums.of_keys.result.unbind()


@contextlib.contextmanager
def _keys_of_groups(
    k: Tensor, v: Tensor, groups: Sequence[HeadGroup], problem: Problem, all_is_sent: Callable[[], None] = lambda: None,
) -> Iterator[Iterator[tuple[HeadGroup, _Keys]]]:  # fmt: skip
    """Each group and its keys, in turn; the next one's are under way by then. An exception leaves nothing unfinished.

    all_is_sent: called once this rank's last keys are under way.
    """
    copies: list[Copies | None] = [None] * len(groups)
    if problem.world_size > 1:
        launches["ring_attention/one_sided_gather"] += 1
        # Before anything that may fail: all ranks make the memory together, without a time limit.
        copies = [_copies(group.of_keys(k), problem, i % 2) for i, group in enumerate(groups)]
    with contextlib.ExitStack() as unfinished:

        def begun(i: int, before: _Keys | None) -> _Keys:
            of_group = map(groups[i].of_keys, (k, v))
            return _Keys(*of_group, problem, copies[i], unfinished, before)

        def in_turn() -> Iterator[tuple[HeadGroup, _Keys]]:
            ahead: _Keys | None = None
            for i, group in enumerate(groups):
                keys = ahead or begun(i, None)
                ahead = begun(i + 1, keys) if i + 1 < len(groups) else None
                if i + 2 >= len(groups):
                    all_is_sent()
                yield group, keys

        yield in_turn()


class _Keys:
    """K and V of a group of heads on their way from all ranks.

    Attributes:
        k, v: (B, K, total, D), in the order of positions, until `finish`.
        arriving: of calls, each in turn, once its keys are there.
    """

    def __init__(
        self, k: Tensor, v: Tensor, problem: Problem, copies: Copies | None, unfinished: contextlib.ExitStack, before: _Keys | None
    ) -> None:  # fmt: skip
        """copies: None on one rank. before: whose copies are to be done before these begin."""
        self._copies = copies
        self.arriving: Arriving = iter
        if copies is None:
            self.k, self.v = (problem.shards.join([x], dim=2) for x in (k, v))
            return
        there = copies.data(copies.rank, k.dtype, *_shape(k, problem))
        self.k, self.v = (x.permute(1, 2, 0, 3) for x in there.unbind(1))
        self.arriving = _arriving(copies, problem.shards)
        own = problem.shards.ranks[copies.rank]
        half = _ahead(own)
        first = half or len(own)
        placed = _place(k, v, there, own[:first], 0)
        copies.begin()
        self._results: list[Tensor] = []
        self._until_finished = unfinished.enter_context(contextlib.ExitStack())
        self._until_finished.enter_context(copies.until_finished(self._results))
        if before is not None and before._copies is not None:
            copies.follow(before._copies.streams[0])
        _send(there, own[:first], copies, ahead=half > 0)
        if half:  # while the first ones are under way
            _place(k, v, there, own[half:], placed)
            copies.follow(None)
            _send(there, own[half:], copies, ahead=False)

    def finish(self, results: Sequence[Tensor]) -> None:
        """Everything was read; results become NaN where a rank's copies did not come, or were overwritten; on CPUs that raises."""
        if self._copies is None:
            return
        self._results += results
        self._until_finished.close()
        self._copies.raise_if_lost()


def _shape(k: Tensor, problem: Problem) -> tuple[int, ...]:
    """A run's keys and values lie in one block: one copy."""
    batch, heads, _, dim = k.shape
    return problem.shards.total, 2, batch, heads, dim


def _copies(k: Tensor, problem: Problem, slot: int) -> Copies:
    """Of a group's keys and values; slot: which of two memories."""
    from torch_fdattn.dist.symm.copies import Copies

    nbytes = torch.Size(_shape(k, problem)).numel() * k.element_size()
    return Copies(problem.group_name, f"ring_attention/gather/{slot}", nbytes, k.device)


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
    """To all other ranks, from their place here to the same place there; there (total, 2, B, K, D)."""
    row = torch.Size(there.shape[1:]).numel()
    chunks = [(there[run.start : run.end], run.start * row) for run in runs]
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
    """Sums over all ranks, of which each gets those of its own shard: group by group, each made behind the next one's sending.

    Made before anything that may fail: all ranks make the memory together (`dist/symm/channel.py`), without a time limit.

    Attributes:
        of_keys: dK and dV (2, B, K, S_r, D) in the keys' dtype (in fp32 on one rank).
    """

    def __init__(self, k: Tensor, groups: Sequence[HeadGroup], problem: Problem) -> None:
        """k: this rank's keys, of which dK and dV are summed in fp32."""
        self._problem, self._dtype = problem, k.dtype
        self.of_keys = AllHeads(k.shape[1], dim=2)
        #: Of the last group: its copies, what they read, the sum and its first head, and what closes it.
        self._last: tuple[Copies, Sequence[Tensor], Tensor, int, contextlib.ExitStack] | None = None
        if problem.world_size == 1:
            return
        from torch_fdattn.dist.symm.copies import Copies

        batch, _, _, dim = k.shape
        longest = max(problem.shards.lengths)
        self._copies = iter(
            [
                Copies(
                    problem.group_name, f"ring_attention/sum/{i % 2}",
                    problem.world_size * 2 * batch * group.count * longest * dim * torch.float32.itemsize, k.device,
                )
                for i, group in enumerate(groups)
            ]
        )  # fmt: skip

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """Until the end of the block all is summed; an exception leaves nothing unfinished."""
        if self._problem.world_size > 1:
            launches["ring_attention/one_sided_sum"] += 1
        with contextlib.ExitStack() as self._unfinished:
            yield
            self._sum_last()

    def send(self, parts: Sequence[Tensor], first: int) -> None:
        """parts: the next group's (2, B, K, S_r, D) of each rank's shard, contiguous; first: of its KV heads."""
        if self._problem.world_size == 1:
            self.of_keys.write(parts[0], first)
            return
        copies = next(self._copies)
        out = torch.empty_like(parts[copies.rank], dtype=self._dtype)
        copies.begin()
        until_finished = self._unfinished.enter_context(contextlib.ExitStack())
        until_finished.enter_context(copies.until_finished([out]))
        for i in range(1, copies.world):
            owner = (copies.rank + i) % copies.world
            copies.send(parts[owner], owner, copies.rank * parts[owner].numel())
        self._sum_last()
        self._last = copies, parts, out, first, until_finished

    def _sum_last(self) -> None:
        if self._last is None:
            return
        from torch_fdattn.dist.symm.received_sums import sum_received

        copies, parts, out, first, until_finished = self._last
        self._last = None
        if out.numel():
            sum_received(copies, parts[copies.rank], out)
        until_finished.close()
        copies.raise_if_lost()
        self.of_keys.write(out, first)
