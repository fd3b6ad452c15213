"""Ragged prompts and steps through a model and a cache by `ragged_step`, padded on the left: what caches promise, without an engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fdattn.dist import ShardedKVCache
from torch_fdattn.engine import PagedKVCache
from torch_fdattn.models import Transformer

KINDS = {"contiguous": ShardedKVCache, "paged": PagedKVCache}


def make_cache(model: Transformer, kind: str, batch: int, capacity: int, **options):
    """The cache of a kind for a model that is not split."""
    config, weight = model.config, model.norm.weight
    return KINDS[kind](
        config.num_layers, batch, config.num_kv_heads, capacity, config.head_dim,
        dtype=weight.dtype, device=weight.device, **options,
    )  # fmt: skip


class CachedBatch:
    """A model in its inference form over one of the caches.

    chunk: columns of prompts in a pass.
    """

    def __init__(
        self, model: Transformer, kind: str = "contiguous", *, batch: int = 1, capacity: int = 48, chunk: int = 512,
        **options,
    ) -> None:  # fmt: skip
        self.model, self.chunk = model.for_inference(), chunk
        self.cache = make_cache(model, kind, batch, capacity, **options)
        self.device = model.norm.weight.device

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Logits (B, vocab) of the last tokens."""
        width = max(map(len, prompts))
        rows = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        tokens, start = torch.tensor(rows, device=self.device), 0
        for part in tokens.split(self.chunk, 1):
            start += part.shape[1]
            counts = [min(max(start - width + len(x), 0), part.shape[1]) for x in prompts]
            logits = self._pass(part, counts)
        return logits

    @torch.inference_mode()
    def step(self, tokens: Tensor, active: Sequence[bool] | None = None) -> Tensor:
        """Logits (B, vocab) after tokens (B, 1) of the sequences that are active."""
        return self._pass(tokens, [1] * len(tokens) if active is None else list(map(int, active)))

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """The greedy tokens of each sequence; the last ones are not stored."""
        found = [self.prefill(prompts).argmax(-1, keepdim=True)]
        for _ in range(count - 1):
            found.append(self.step(found[-1]).argmax(-1, keepdim=True))
        return torch.cat(found, 1).tolist()

    def _pass(self, tokens: Tensor, counts: list[int]) -> Tensor:
        self.cache.reserve(counts)
        given = torch.tensor(counts, dtype=torch.int32, device=self.device)
        return self.model(tokens, self.cache.ragged_step(given, tokens.shape[1]), last_only=True)[
            :, -1
        ]
