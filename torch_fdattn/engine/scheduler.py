"""Which sequences compute how many tokens in the next step.

A sequence is tokens of which the first `num_computed` are in the cache. A step computes some of the others, at most
`max_batch_tokens` of all sequences together: one token of a sequence that decodes, a chunk of one that has more to
compute (its prompt, or everything after a preemption). A chunk that reaches the sequence's end draws its next token.

    running     in the order of their arrival; each takes what is left of the budget
    waiting     the same; the first one joins when there is budget, a row, and pages for all tokens that it has
    preemption  where a running sequence finds no page, the last of the running gives up all of its pages and waits
                at the front. It keeps its tokens and computes them anew later: nothing is lost but time.

The host runs ahead of the device: a sequence whose last token is drawn but not read back (`in_flight`) goes on, the
token's id being on the device; one that follows a grammar waits for it.

With speculation nothing is in flight, and what is left of the budget and the pages goes to proposals behind the last
tokens of sequences that decode. `Sequence.accept` takes back what was counted for those that are rejected.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from torch_fdattn.engine.ngram_speculation import NgramSpeculation
from torch_fdattn.engine.page_pool import ROOT, PagePool, page_hash
from torch_fdattn.engine.requests import Sequence


class Chunk(NamedTuple):
    """`count` tokens of a sequence from position `start` on, which a step computes; the last of them may be proposals."""

    sequence: Sequence
    row: int
    start: int
    count: int
    samples: bool  # whether it ends with the sequence, and draws the next token, and one behind each proposal
    proposals: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def draw_positions(self) -> range:
        """Of the tokens that it draws."""
        return range(self.end - len(self.proposals), self.end + 1) if self.samples else range(0)

    @property
    def asks_for_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are asked of it."""
        asks = self.sequence.index == 0 and self.sequence.params.prompt_logprobs is not None
        return asks and self.start < self.sequence.prompt_length - 1


class ScheduledStep(NamedTuple):
    """One step's work: every token is in one chunk."""

    decodes: list[Chunk]  # of one token, and proposals behind it
    prefills: list[Chunk]
    admitted: list[Sequence]  # those of its sequences that have new rows


def queries_of(decodes: list[Chunk]) -> int:
    """Tokens that each of a pass's decodes computes, padding included."""
    return max((chunk.count for chunk in decodes), default=1)


class Scheduler:
    """First come, first served, over the pages of a pool.

    Args:
        pool: of pages that hold `page_size` tokens each.
        max_num_seqs: sequences that run at the same time: rows.
        max_batch_tokens: tokens of a step.
        enable_prefix_caching: whether full pages are registered and looked for.
        chunk_size: None, or what every chunk of a prompt has but the last one of it, so that how a prompt is cut depends on
            nothing else (batch-invariant mode); tokens behind the prompt are then computed one by one, and pages are
            shared by whole chunks that end with a page.
        speculation: how many tokens are proposed; the host has then read all tokens before `schedule`.
    """

    def __init__(
        self, pool: PagePool, page_size: int, max_num_seqs: int, max_batch_tokens: int,
        enable_prefix_caching: bool, chunk_size: int | None = None,
        speculation: NgramSpeculation | None = None,
    ) -> None:  # fmt: skip
        self.pool, self.page_size, self.chunk_size = pool, page_size, chunk_size
        self.speculation = speculation
        self.max_batch_tokens, self.enable_prefix_caching = max_batch_tokens, enable_prefix_caching
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.prefix_hit_tokens = self.prefix_query_tokens = self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A sequence that has ended gives back what it has. Full pages stay known for their prefix."""
        if sequence.row is None:
            self.waiting.remove(sequence)
        else:
            self._register(sequence)
            self._give_back(sequence)
            self.running.remove(sequence)

    def schedule(self) -> ScheduledStep | None:
        """The next step, None where there is nothing to compute now. What it computes counts as computed from here on."""
        step, budget = ScheduledStep([], [], []), self.max_batch_tokens
        preemptions, position = self.preemptions, 0
        while position < len(self.running):
            sequence = self.running[position]
            count = self._next_count(sequence, budget)
            if count and not self._make_space(sequence, count):
                break  # it was the last one, and waits now
            if count:
                self._compute(step, sequence, count)
                budget -= count
            position += 1
        if preemptions == self.preemptions:
            budget = self._admit(step, budget)
        if self.speculation is not None and len(step.decodes) <= self.speculation.max_sequences:
            self._propose(step, budget)
        return step if step.decodes or step.prefills else None

    def _admit(self, step: ScheduledStep, budget: int) -> int:
        """What it leaves of the budget."""
        while self.waiting and self._free_rows and budget:
            sequence = self.waiting[0]
            pages = self._take_prefix(sequence)
            sequence.num_computed = len(pages) * self.page_size
            count = self._next_count(sequence, budget)
            missing = -(-sequence.length // self.page_size) - len(pages)
            if not count or missing > self.pool.num_free:
                self.pool.release(pages)
                sequence.num_computed = 0
                break
            self.waiting.popleft()
            sequence.pages, sequence.num_registered = pages, len(pages)
            sequence.row = self._free_rows.pop()
            self.running.append(sequence)
            step.admitted.append(sequence)
            self._count_hits(sequence)
            self._make_space(sequence, count)  # there is: it was counted
            self._compute(step, sequence, count)
            budget -= count
        return budget

    def _propose(self, step: ScheduledStep, budget: int) -> None:
        """Puts proposals behind the tokens of its decodes. They take no page from others, and are registered nowhere."""
        for i, chunk in enumerate(step.decodes):
            sequence = chunk.sequence
            if not chunk.samples or sequence.proposer is None:
                continue
            capacity = (len(sequence.pages) + self.pool.num_free) * self.page_size
            # Its length counts the token to be drawn behind the chunk already.
            limit = min(budget, sequence.max_length - sequence.length, capacity - chunk.end)
            proposals = sequence.proposer.propose(sequence.tokens, limit)
            count = chunk.count + len(proposals)
            missing = -(-(chunk.start + count) // self.page_size) - len(sequence.pages)
            sequence.pages += self.pool.allocate(max(missing, 0))
            step.decodes[i] = chunk._replace(count=count, proposals=proposals)
            sequence.num_computed += len(proposals)
            budget -= len(proposals)

    def _next_count(self, sequence: Sequence, budget: int) -> int:
        """How many tokens it computes in a step that has `budget` left; 0: none now."""
        if sequence.length >= sequence.max_length:
            return 0  # its last token is in flight
        if sequence.in_flight and sequence.matcher is not None:
            return 0
        count = sequence.length - sequence.num_computed
        if self.chunk_size is None:
            return min(count, budget)
        if sequence.num_computed >= sequence.prompt_length:
            return min(1, budget)
        count = min(self.chunk_size, sequence.prompt_length - sequence.num_computed)
        return count if count <= budget else 0

    def _make_space(self, sequence: Sequence, count: int) -> bool:
        """Pages for its next `count` tokens, if need be from the last of the running; False: it was that itself."""
        missing = -(-(sequence.num_computed + count) // self.page_size) - len(sequence.pages)
        while (pages := self.pool.allocate(max(missing, 0))) is None:
            last = self.running.pop()
            self._preempt(last)
            if last is sequence:
                return False
        sequence.pages += pages
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._register(sequence)
        self._give_back(sequence)
        self.waiting.appendleft(sequence)
        sequence.preemptions += 1
        self.preemptions += 1

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        self._free_rows.append(sequence.row)
        sequence.pages, sequence.row = [], None
        sequence.num_computed = sequence.num_registered = 0

    def _compute(self, step: ScheduledStep, sequence: Sequence, count: int) -> None:
        start = sequence.num_computed
        sequence.num_computed += count
        # Others of this step may read its pages: in a layer all of a pass's tokens are stored before any attends, and where a
        # step has several passes `ModelRunner._forward` puts them in the order in which they may read each other's.
        self._register(sequence)
        samples = sequence.num_computed == sequence.length
        sequence.in_flight += samples
        chunk = Chunk(sequence, sequence.row, start, count, samples)
        # In batch-invariant mode passes run one after the other: chunks of prompts in the order of this list.
        decodes = count == 1 and (self.chunk_size is None or start >= sequence.prompt_length)
        (step.decodes if decodes else step.prefills).append(chunk)

    # The prefix cache.

    def _register(self, sequence: Sequence) -> None:
        if not self.enable_prefix_caching:
            return
        tokens = min(sequence.num_computed, len(sequence.tokens))
        if self.chunk_size is not None:  # whole chunks of the prompt alone
            tokens = min(tokens, sequence.prompt_length // self.chunk_size * self.chunk_size)
        for i in range(sequence.num_registered, tokens // self.page_size):
            self.pool.register(sequence.pages[i], self._hash(sequence, i))
        sequence.num_registered = max(sequence.num_registered, tokens // self.page_size)

    def _take_prefix(self, sequence: Sequence) -> list[int]:
        """Pages of the cache that hold its first tokens: not its last token, whose logits must be computed."""
        asks_for_prompt = sequence.index == 0 and sequence.params.prompt_logprobs is not None
        if not self.enable_prefix_caching or asks_for_prompt:
            return []
        unit = math.lcm(self.page_size, self.chunk_size or 1)
        tokens = (len(sequence.tokens) - 1) // unit * unit
        hashes = (self._hash(sequence, i) for i in range(tokens // self.page_size))
        pages = self.pool.take_prefix(hashes)
        shared = len(pages) * self.page_size // unit * unit // self.page_size
        self.pool.release(pages[shared:])
        return pages[:shared]

    def _hash(self, sequence: Sequence, page: int) -> bytes:
        hashes, size = sequence.hashes, self.page_size
        for i in range(len(hashes), page + 1):
            parent = hashes[-1] if hashes else ROOT
            hashes.append(page_hash(parent, sequence.tokens[i * size : (i + 1) * size]))
        return hashes[page]

    def _count_hits(self, sequence: Sequence) -> None:
        if sequence.preemptions:
            return
        self.prefix_hit_tokens += sequence.num_computed
        self.prefix_query_tokens += sequence.prompt_length
        if sequence.index == 0:
            sequence.request.num_cached = sequence.num_computed
