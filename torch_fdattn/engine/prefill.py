"""Prefill passes captured in CUDA graphs, by width: the host launches a pass whole, not kernel by kernel.

A pass of T columns of prompt runs in the graph of the smallest width that holds it. The columns that this adds stand on
the left, where padding of shorter prompts stands anyway: they are neither stored in the cache nor seen by the result.
Passes of more than `MAX_TOKENS` tokens, in which the device is busier than the host, run eagerly.

**Memory.** All graphs share one pool, and one pair of buffers for their results: together they hold the activations of
the largest pass captured. At most `MAX_GRAPHS` are kept, the last used ones: a capture costs three passes or so, and
prompts of 1 to 2048 tokens in chunks of 512 come in about 75 kinds with a paged cache. `PrefillGraphs.nbytes` says what
the pool holds; the driver's own record of a graph comes to that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn.engine.graphs import CapturedStep

#: Tokens of a pass, padding included, up to which it is captured.
MAX_TOKENS = 16384
MAX_GRAPHS = 64
_SMALLEST_WIDTH = 16
_WIDTHS_PER_OCTAVE = 4


class Pass(NamedTuple):
    """What one pass over prompts is called with."""

    tokens: Tensor  # (B, T) on the device
    counts: Tensor  # int32 (B,): how many of the last columns are no padding
    longest: int | None  # tokens of the longest sequence behind it; None: the cache's capacity
    full: bool  # no column is padding


def default_widths(batch: int, largest: int) -> list[int]:
    """Widths up to `largest` columns and MAX_TOKENS tokens, four an octave: a pass has at most a fifth of padding,
    beyond the smallest width."""
    largest = min(largest, MAX_TOKENS // batch)
    widths, octave = [], _SMALLEST_WIDTH
    while octave < largest:
        step = octave // _WIDTHS_PER_OCTAVE
        widths += range(octave, min(2 * octave, largest), step)
        octave *= 2
    return [*widths, largest] if largest > 0 else []


class PrefillGraphs:
    """`run`, which makes a pass, captured once for each kind of pass that comes.

    run: writes logits and greedy tokens, which this copies into buffers of its own. With counts of 0 it must leave no
    trace in what the cache counts as stored; that is how it is warmed up before a capture.
    bounded: whether the shapes in a pass follow from `Pass.longest`, which then is rounded up to a power of two and is
    part of the kind.
    """

    def __init__(
        self, run: Callable[[Pass], tuple[Tensor, Tensor]], widths: Sequence[int], batch: int, capacity: int,
        device: torch.device, bounded: bool,
    ) -> None:  # fmt: skip
        self._run, self._widths, self._batch = run, sorted(widths), batch
        self._capacity, self._device, self._bounded = capacity, device, bounded
        self._graphs: OrderedDict[tuple, tuple[Pass, CapturedStep]] = OrderedDict()
        self._results: tuple[Tensor, Tensor] | None = None
        self._pool: tuple[int, int] | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the device's allocator holds for the pool of all graphs. It walks the allocator's segments."""
        if self._pool is None:
            return 0
        segments = torch.cuda.memory_snapshot()
        return sum(x["total_size"] for x in segments if tuple(x["segment_pool_id"]) == self._pool)

    def takes(self, given: Pass) -> bool:
        """Whether a width holds the pass."""
        return bool(self._widths) and given.tokens.shape[1] <= self._widths[-1]

    def __call__(self, given: Pass) -> tuple[Tensor, Tensor]:
        """(logits (B, vocab), greedy (B, 1)) of a pass that this `takes`; the next pass overwrites them."""
        columns = given.tokens.shape[1]
        width = self._widths[bisect_left(self._widths, columns)]
        full = given.full and columns == width
        longest = self._longest(given.longest)
        kind = width, full, longest
        if kind not in self._graphs:
            self._capture(kind)
        self._graphs.move_to_end(kind)
        buffers, graph = self._graphs[kind]
        buffers.tokens[:, width - columns :].copy_(given.tokens)
        buffers.counts.copy_(given.counts)
        return graph()

    def _longest(self, longest: int | None) -> int | None:
        if not self._bounded or longest is None:
            return None
        return min(1 << (longest - 1).bit_length(), self._capacity)

    def _capture(self, kind: tuple) -> None:
        width, full, longest = kind
        while len(self._graphs) >= MAX_GRAPHS:
            self._graphs.popitem(last=False)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            # One for all captures: BLAS keeps a workspace for each stream that it has seen.
            self._stream = torch.cuda.Stream(self._device)
        buffers = Pass(
            torch.zeros(self._batch, width, dtype=torch.int64, device=self._device),
            torch.zeros(self._batch, dtype=torch.int32, device=self._device),
            longest, full,
        )  # fmt: skip
        graph = CapturedStep(lambda: self._pass(buffers), self._device, self._pool, self._stream)
        self._graphs[kind] = buffers, graph

    def _pass(self, buffers: Pass) -> tuple[Tensor, Tensor]:
        found = self._run(buffers)
        if self._results is None:  # in a warm-up, outside of the pool
            self._results = tuple(torch.empty_like(x) for x in found)
        for result, x in zip(self._results, found, strict=True):
            result.copy_(x)
        return self._results
