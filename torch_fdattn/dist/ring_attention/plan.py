"""Which kernel calls a block of queries makes over a block of keys, from their runs of positions.

Pure host arithmetic, the same on every rank. Tiles that a mask hides are skipped inside the kernels; here
whole calls are saved: runs that see nothing of each other make none, and neighbouring runs that see all
of each other share one.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from torch_fdattn.dist.ring_attention.sequence_shards import Run


class BlockCall(NamedTuple):
    """Attention of rows q_begin:q_end over keys kv_begin:kv_end, both local indices.

    q_start and kv_start are the positions of its first query and key, between which the window (left, right) holds;
    None: every pair is visible.
    """

    q_begin: int
    q_end: int
    kv_begin: int
    kv_end: int
    q_start: int | None = None
    kv_start: int | None = None
    window: tuple[int, int] = (-1, -1)

    @property
    def ends_together(self) -> bool:
        """Whether its last query has the position of its last key, as attention has it where no positions are given."""
        if self.q_start is None or self.kv_start is None:
            return False
        rows, keys = self.q_end - self.q_begin, self.kv_end - self.kv_begin
        return self.q_start + rows == self.kv_start + keys

    def over_seen_keys(self) -> BlockCall:
        """Without the keys at either end that none of its rows sees."""
        if self.q_start is None or self.kv_start is None:
            return self
        left, right = self.window
        first, last = self.q_start, self.q_start + self.q_end - self.q_begin - 1
        begin = max(first - left - self.kv_start, 0) if left >= 0 else 0
        end = self.kv_end if right < 0 else self.kv_begin + last + right + 1 - self.kv_start
        return self._replace(
            kv_begin=self.kv_begin + begin, kv_end=min(self.kv_end, end),
            kv_start=self.kv_start + begin,
        )  # fmt: skip


class _Segment(NamedTuple):
    """Positions next to each other, of one document, and where they begin in the tensors."""

    begin: int
    run: Run
    document: int

    def until(self, end: int) -> _Segment:
        """Its positions before `end`."""
        return self._replace(run=Run(self.run.start, min(self.run.end, end) - self.run.start))


def block_calls(
    q_runs: Sequence[Run], kv_runs: Sequence[Run], left: int, right: int, by_position: bool = False,
    documents: Sequence[int] = (), prefix_lens: Sequence[int] = (),
) -> list[BlockCall]:  # fmt: skip
    """The calls for which some pair is visible under the window (left, right; -1 = unbounded).

    by_position: what a call computes depends on positions (ALiBi, lengths), so each pair of runs has one of its own.
    documents: where each begins, and where the last one ends; positions of different ones do not see each other.
    prefix_lens: of each document, or one of all: so many of its first positions see each other whatever the window, of which
    then there is nothing but that right is 0.
    """
    calls: list[BlockCall] = []
    ends = _ends_of_prefixes(documents, prefix_lens)
    keys: dict[int, list[_Segment]] = {}
    for segment in _segments(kv_runs, documents):
        keys.setdefault(segment.document, []).append(segment)
    for segment in _segments(q_runs, documents, ends):
        of_document, window = keys.get(segment.document, []), (left, right)
        end = ends.get(segment.document, 0)
        if segment.run.start < end:
            of_document, window = [x.until(end) for x in of_document if x.run.start < end], (-1, -1)
        found = _calls_of_run(segment.begin, segment.run, of_document, window, by_position)
        if len(found) == 1 and calls and _share_keys(calls[-1], found[0]):
            calls[-1] = calls[-1]._replace(q_end=found[0].q_end)
        else:
            calls += found
    return calls


def _ends_of_prefixes(documents: Sequence[int], prefix_lens: Sequence[int]) -> dict[int, int]:
    """Of each document, by its number in `_segments`, the position behind its prefix."""
    if not prefix_lens:
        return {}
    begins = documents[:-1] or [0]
    numbers = range(1, len(begins) + 1) if documents else [0]
    return {
        number: begin + prefix_lens[i % len(prefix_lens)]
        for i, (number, begin) in enumerate(zip(numbers, begins, strict=True))
    }


def _segments(
    runs: Sequence[Run], documents: Sequence[int], cuts: dict[int, int] | None = None
) -> list[_Segment]:
    """Runs, cut where documents begin, and at the position that `cuts` has for a document."""
    begin, found = 0, []
    for run in runs:
        start = run.start
        while start < run.end:
            document = bisect.bisect_right(documents, start)
            end = min(run.end, documents[document]) if document < len(documents) else run.end
            if cuts and start < cuts[document] < end:
                end = cuts[document]
            found.append(_Segment(begin + start - run.start, Run(start, end - start), document))
            start = end
        begin += run.length
    return found


def cut(runs: Sequence[Run], block: int) -> list[Run]:
    """Runs, cut at the multiples of block."""
    found = []
    for run in runs:
        for start in range(run.start - run.start % block, run.end, block):
            begin, end = max(start, run.start), min(start + block, run.end)
            found.append(Run(begin, end - begin))
    return found


def _calls_of_run(
    q_begin: int, q: Run, keys: Sequence[_Segment], window: tuple[int, int], by_position: bool
) -> list[BlockCall]:
    calls: list[BlockCall] = []
    left, right = window
    for kv_begin, kv, _ in keys:
        last_query, last_key = q.end - 1, kv.end - 1
        if (right >= 0 and kv.start > last_query + right) or (
            left >= 0 and last_key < q.start - left
        ):
            continue
        above = right < 0 or last_key <= q.start + right
        below = left < 0 or kv.start >= last_query - left
        call = BlockCall(q_begin, q_begin + q.length, kv_begin, kv_begin + kv.length)
        previous = calls[-1] if calls and calls[-1].kv_end == kv_begin else None
        full = previous is not None and previous.q_start is None
        if by_position:
            calls.append(call._replace(q_start=q.start, kv_start=kv.start, window=window))
        elif above and below:
            if full:
                calls[-1] = previous._replace(kv_end=call.kv_end)
            else:
                calls.append(call)
        elif full and left < 0 and kv.start <= q.start + right + 1:
            # Keys that all queries see may stand anywhere before this run: directly before it.
            before = previous.kv_end - previous.kv_begin
            calls[-1] = previous._replace(
                kv_end=call.kv_end, q_start=q.start, kv_start=kv.start - before, window=window
            )
        else:
            calls.append(call._replace(q_start=q.start, kv_start=kv.start, window=window))
    return calls


def _share_keys(first: BlockCall, second: BlockCall) -> bool:
    """Whether two unmasked calls over the same keys have neighbouring rows."""
    unmasked = first.q_start is None and second.q_start is None
    return unmasked and first.q_end == second.q_begin and first[2:4] == second[2:4]
