"""Passes of decodes alone in CUDA graphs, one for each bucket of batch sizes.

A pass of n sequences runs in the graph of the smallest bucket that holds it, filled up with the padding row, which has
no pages: what it would store is dropped, and it sees no key. Token ids, page tables and slots are looked up inside the
graph, from `SequenceRows`; the host gives rows and positions alone. Sampling stays outside: what it does depends on what
the batch asks for.
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
    """`run(rows, positions) -> logits (B, vocab)`, captured for every bucket when this is made, the largest first: the
    others fit into its memory.

    Raises:
        RuntimeError: torch's, where a capture fails.
    """

    def __init__(
        self, run: Callable[[Tensor, Tensor], Tensor], rows: SequenceRows, largest: int, smallest: int
    ) -> None:  # fmt: skip
        device = rows.device
        self._buckets, self._padding_row = decode_buckets(largest, smallest), rows.padding_row
        self._rows = torch.full((largest,), rows.padding_row, dtype=torch.int64, device=device)
        self._positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self._graphs: dict[int, CapturedStep[Tensor]] = {}
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        for size in reversed(self._buckets):
            inputs = self._rows[:size], self._positions[:size]
            with torch.inference_mode():
                self._graphs[size] = CapturedStep(lambda x=inputs: run(*x), device, pool, stream)

    def __call__(self, row_ids: Tensor, positions: Tensor) -> Tensor:
        """Logits of these n rows and of the bucket's padding behind them; the next call overwrites them."""
        count = len(row_ids)
        size = self._buckets[bisect_left(self._buckets, count)]
        self._rows[:count].copy_(row_ids)
        self._rows[count:size].fill_(self._padding_row)
        self._positions[:count].copy_(positions)
        self._positions[count:size].zero_()
        return self._graphs[size]()
