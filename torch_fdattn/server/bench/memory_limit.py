"""What the memory allows: the time in which a device can read what a workload must read.

    seconds = (steps · weight bytes + Σ cached tokens read · bytes per cached token) / bandwidth
              + prefill FLOPs / matmul rate

A step reads every weight once; drawing a token reads the K and V of all tokens before it. Steps: as many as
the longest answer has tokens, or as rows of `max_num_seqs` allow. The last term is what prompts take at the
rate of large products, without attention. Bandwidth and rate are measured, not a data sheet's. Where ranks share the
work these are the terms of each of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from torch_fdattn.models import ModelConfig
from torch_fdattn.server.bench.workload import Workload

_REPEATS = 5
_SCALE_BYTES = 4  # of a token's K or V in one head, where elements take a byte


@dataclass(frozen=True)
class Ceilings:
    """Of one device. bandwidth: bytes/s of a copy, read and written; matmul_rate: FLOP/s in a dtype."""

    bandwidth: float
    matmul_rate: float


@dataclass(frozen=True)
class MemoryLimit:
    """The formula's terms for a model and a workload."""

    steps: int
    weight_bytes: int
    cached_tokens_read: int
    cached_token_bytes: int
    prefill_flops: float
    ceilings: Ceilings

    @property
    def read_seconds(self) -> float:
        nbytes = self.steps * self.weight_bytes + self.cached_tokens_read * self.cached_token_bytes
        return nbytes / self.ceilings.bandwidth

    @property
    def prefill_seconds(self) -> float:
        return self.prefill_flops / self.ceilings.matmul_rate

    @property
    def seconds(self) -> float:
        return self.read_seconds + self.prefill_seconds

    def lines(self) -> list[str]:
        """The formula with its numbers."""
        return [
            "memory's limit: (steps · weight bytes + cached tokens read · bytes per cached token) / bandwidth + "
            "prefill FLOPs / matmul rate",
            f"  = ({self.steps:,} · {self.weight_bytes / 1e9:.3f} GB + {self.cached_tokens_read:,} · "
            f"{self.cached_token_bytes:,} B) / {self.ceilings.bandwidth / 1e9:,.1f} GB/s + "
            f"{self.prefill_flops / 1e12:.2f} TFLOP / {self.ceilings.matmul_rate / 1e12:,.2f} TFLOP/s",
            f"  = {self.read_seconds:.3f} s + {self.prefill_seconds:.3f} s = {self.seconds:.3f} s",
            f"  measured: a copy's bandwidth {self.ceilings.bandwidth / 1e9:,.1f} GB/s, a large product's rate "
            f"{self.ceilings.matmul_rate / 1e12:,.2f} TFLOP/s",
        ]

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds}


def memory_limit(
    config: ModelConfig, workload: Workload, *, dtype: torch.dtype, kv_dtype: str | None,
    max_num_seqs: int, ceilings: Ceilings, ranks: int = 1, tensor_parallel: int = 1,
) -> MemoryLimit:  # fmt: skip
    """The limit of a workload on a model of this shape.

    dtype: of the weights. kv_dtype: as `engine.LLM` has it. ranks: that share cache and prompts, each `tensor_parallel` of them
    the weights too, but for tied embeddings.
    """
    weights, embeddings = _num_weights(config)
    read = (weights - embeddings) // tensor_parallel
    # A step looks up rows of the embeddings; it reads all of them where they are the output matrix too.
    if config.tie_embeddings:
        read += embeddings
    lengths = [(len(p), n) for p, n in zip(workload.prompts, workload.new_tokens, strict=True)]
    head_bytes = config.head_dim * dtype.itemsize
    if kv_dtype is not None:
        head_bytes = config.head_dim + _SCALE_BYTES
    layer_token_bytes = 2 * config.num_kv_heads * head_bytes
    windows = [config.layer(index).window for index in range(config.num_layers)]
    # Reads of one layer's tokens, over all layers, in units of a token of all layers.
    read_tokens = {window: sum(_tokens_read(p, n, window) for p, n in lengths) for window in set(windows)}  # fmt: skip
    total = sum(read_tokens[window] for window in windows)
    return MemoryLimit(
        steps=max(max(workload.new_tokens), -(-workload.num_new_tokens // max_num_seqs)),
        weight_bytes=read * dtype.itemsize,
        cached_tokens_read=total // config.num_layers,
        cached_token_bytes=layer_token_bytes * config.num_layers // ranks,
        prefill_flops=2.0 * workload.num_prompt_tokens * (weights - embeddings) / ranks,
        ceilings=ceilings,
    )


def _num_weights(config: ModelConfig) -> tuple[int, int]:
    """Elements of all parameters, and of the embeddings."""
    from torch_fdattn.models import Transformer

    with torch.device("meta"):
        model = Transformer(config)
    return sum(x.numel() for x in model.parameters()), config.vocab_size * config.hidden_size


def _tokens_read(prompt: int, new: int, window: int | None) -> int:
    """K and V of one layer that drawing `new` tokens reads: at each step all stored tokens that are seen.

    The prompt's own pass gives the first token, so the steps read prompt + 1 … prompt + new - 1 tokens.
    """
    lengths = range(prompt + 1, prompt + new)
    if window is None:
        return sum(lengths)
    return sum(min(x, window) for x in lengths)


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """A copy's bandwidth and a large product's rate, each the best of some."""
    return Ceilings(_copy_bandwidth(device), _matmul_rate(device, dtype))


def _copy_bandwidth(device: torch.device) -> float:
    source = torch.ones(
        1 << (30 if device.type == "cuda" else 27), dtype=torch.uint8, device=device
    )
    target = torch.empty_like(source)
    return 2 * source.numel() / _best_seconds(lambda: target.copy_(source), device)


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _best_seconds(lambda: a @ b, device)


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    best = float("inf")
    for _ in range(_REPEATS + 1):  # the first one warms up
        wait()
        start = time.perf_counter()
        work()
        wait()
        best = min(best, time.perf_counter() - start)
    return best
