"""Passes of decodes alone in CUDA graphs, one for each bucket of batch sizes.

A pass of n sequences runs in the graph of the smallest bucket that holds it, filled up with the padding row, which has
no pages: what it would store is dropped, and it sees no key. Token ids, page tables and slots are looked up inside the
graph, from `SequenceRows`; the host gives rows, positions and counts alone. Draws that need nothing but a temperature
are a second graph; others are made outside, since what they do depends on what the batch asks for. With speculation there
are two of these: of one token a sequence, and of as many as it takes for all proposals that a sequence can have.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from torch_fdattn.engine.graphs import CapturedStep
from torch_fdattn.engine.sequence_rows import SequenceRows

_STEP = 16


def decode_buckets(largest: int, smallest: int = 1) -> list[int]:
    """Powers of two up to 16, and multiples of 16 up to the largest, which is the last one; none below the smallest."""
    sizes = [1, 2, 4, 8, *range(_STEP, largest, _STEP)]
    return [*(x for x in sizes if smallest <= x < largest), largest]


class DecodeGraphs:
    """`run(inputs) -> logits (B * tokens of a sequence, vocab)`, captured for every bucket when this is made, the largest
    first: the others fit into its memory.

    inputs: int64 (3, B): rows, positions of their first tokens, and how many tokens they have.
    draw: None, or `draw(inputs, logits) -> tokens (B,)`, captured too.

    Raises:
        RuntimeError: torch's, where a capture fails.
    """

    def __init__(
        self, run: Callable[[Tensor], Tensor], rows: SequenceRows, largest: int, smallest: int,
        draw: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
        device = rows.device
        self._buckets = decode_buckets(largest, smallest)
        self._padding = torch.tensor([[rows.padding_row], [0], [1]], device=device)
        self._inputs = self._padding.repeat(1, largest)
        self._graphs: dict[int, CapturedStep[Tensor]] = {}
        self._draws: dict[int, CapturedStep[Tensor]] = {}
        self._count = self._size = 0  # of the last call
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        for size in reversed(self._buckets):
            inputs = self._inputs[:, :size]
            with torch.inference_mode():
                graph = CapturedStep(lambda x=inputs: run(x), device, pool, stream)
                self._graphs[size] = graph
                if draw is not None:
                    drawing = lambda x=inputs, logits=graph.result: draw(x, logits)  # noqa: E731
                    self._draws[size] = CapturedStep(drawing, device, pool, stream)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Logits of these (3, n) and of the bucket's padding behind them; the next call overwrites them."""
        self._count = count = inputs.shape[1]
        self._size = size = self._buckets[bisect_left(self._buckets, count)]
        self._inputs[:, :count] = inputs
        self._inputs[:, count:size] = self._padding
        return self._graphs[size]()

    def draw(self) -> Tensor:
        """Tokens (n,) from the logits of the last call; the next one overwrites them."""
        return self._draws[self._size]()[: self._count]
