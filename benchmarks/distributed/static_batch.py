"""One batch of prompts of one length through a model and its cache: the passes alone, on GPUs in CUDA graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn.dist import ShardedKVCache
from torch_fdattn.engine.graphs import CapturedStep
from torch_fdattn.models import InferenceTransformer, Transformer
from torch_fdattn.models.parallelize import local_kv_heads

#: Tokens of a pass up to which it is captured: beyond, the device is busier than the host.
CAPTURED_TOKENS = 16384


class StaticBatch:
    """`batch` sequences of up to `capacity` tokens in a contiguous cache, all of the same length.

    model: in its inference form, or a `Transformer`, of which this makes it.
    prefill_chunk: tokens of each prompt in a pass.
    kv_group: ranks that share the cache by position.
    """

    def __init__(
        self, model: Transformer | InferenceTransformer, batch: int, capacity: int, prefill_chunk: int,
        kv_group: str | None = None,
    ) -> None:  # fmt: skip
        self.model = model.for_inference() if type(model) is Transformer else model
        config, weight = model.config, model.norm.weight
        self.device, self.prefill_chunk = weight.device, prefill_chunk
        self.cache = ShardedKVCache(
            config.num_layers, batch, local_kv_heads(model), capacity, config.head_dim,
            dtype=weight.dtype, device=weight.device, group=kv_group,
        )  # fmt: skip
        self._counts = torch.zeros(batch, dtype=torch.int32, device=weight.device)
        self._captures = weight.is_cuda
        self._graphs: dict[int, tuple[Tensor, CapturedStep[Tensor]]] = {}

    @torch.inference_mode()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Stores tokens (B, T) behind what is held; logits (B, vocab) after them, which the next call may overwrite."""
        for chunk in tokens.to(self.device).split(self.prefill_chunk, dim=1):
            self.cache.reserve([chunk.shape[1]] * len(chunk))
            logits = self._pass(chunk)
        return logits

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens of every sequence."""
        self.cache.truncate(length)

    def close(self) -> None:
        """Lets go of the CUDA graphs, which must be gone before their process groups; all then runs eagerly."""
        self._captures = False
        self._graphs.clear()

    def _pass(self, tokens: Tensor) -> Tensor:
        width = tokens.shape[1]
        if not self._captures or tokens.numel() > CAPTURED_TOKENS:
            self._counts.fill_(width)
            return self._forward(tokens)
        if width not in self._graphs:
            self._counts.zero_()  # by which the runs before the capture leave no trace
            given = torch.zeros_like(tokens)
            run = CapturedStep(lambda: self._forward(given), self.device)
            self._graphs[width] = given, run
        given, run = self._graphs[width]
        self._counts.fill_(width)
        given.copy_(tokens)
        return run()

    def _forward(self, tokens: Tensor) -> Tensor:
        step = self.cache.ragged_step(self._counts, tokens.shape[1], full=True)
        return self.model(tokens, step, last_only=True)[:, -1]
