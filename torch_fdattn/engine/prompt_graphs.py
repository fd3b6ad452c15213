"""Passes of prompts in CUDA graphs, one for each bucket of token counts: the host takes longer to launch a short one kernel by
kernel than a GPU to compute it. Decodes of the same step run in a graph of their own before it.

A pass of n tokens in up to `CHUNKS` chunks runs in the graph of the smallest bucket that holds n. What is left of the bucket
is a chunk of the padding row, which has no pages: its tokens are stored nowhere, and see no key. Token ids, page tables and
slots are looked up inside the graph, as those of decodes (`decode_graphs.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from torch_fdattn.engine.graphs import CapturedStep
from torch_fdattn.engine.sequence_rows import SequenceRows

#: Chunks of a captured pass; more of them are many tokens, as a rule, for which the host is not waited for.
CHUNKS = 8
_SMALLEST = 16


def prompt_buckets(largest: int) -> list[int]:
    """16, 24, 32, 48, 64, 96 …, and the largest, which is the last one: at most half as many tokens as a pass has are padding."""
    sizes, size = [], _SMALLEST
    while size < largest:
        sizes += [size, size * 3 // 2]
        size *= 2
    return [*(x for x in sizes if x < largest), largest]


class PromptGraphs:
    """`run(inputs, tokens) -> logits (CHUNKS, vocab)`, captured for every bucket when this is made, the largest first.

    inputs: int64 (3, CHUNKS + 1): rows, positions of their first tokens, and how many tokens they have, `tokens` in all; the
    last one is padding.

    Raises:
        RuntimeError: torch's, where a capture fails.
    """

    def __init__(
        self, run: Callable[[Tensor, int], Tensor], rows: SequenceRows, largest: int
    ) -> None:
        device = rows.device
        # Positions of the padding are looked up too.
        self._buckets = prompt_buckets(min(largest, rows.tokens.shape[1]))
        self._padding = torch.tensor([[rows.padding_row], [0], [0]], device=device)
        self._inputs = self._padding.repeat(1, CHUNKS + 1)
        self._graphs: dict[int, CapturedStep[Tensor]] = {}
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        for size in reversed(self._buckets):
            self._inputs[2, -1] = size
            with torch.inference_mode():
                graph = CapturedStep(lambda n=size: run(self._inputs, n), device, pool, stream)
            self._graphs[size] = graph

    def holds(self, chunks: int, tokens: int) -> bool:
        """Whether a pass of so many can be called."""
        return chunks <= CHUNKS and tokens <= self._buckets[-1]

    def __call__(self, inputs: Tensor, tokens: int) -> Tensor:
        """Logits (n, vocab) after the last tokens of n chunks (3, n), of so many tokens in all; the next call overwrites them."""
        count = inputs.shape[1]
        size = self._buckets[bisect_left(self._buckets, tokens)]
        self._inputs[:, :count] = inputs
        self._inputs[:, count:] = self._padding
        self._inputs[2, -1] = size - tokens
        return self._graphs[size]()[:count]
