"""One sequence of tokens from a model and a cache: chunked prefill, then a token at a time.

Every rank of a process group runs the same loop over its own shard of the cache; rank 0 draws each
token and broadcasts it, so that ranks whose arithmetic differs in a last bit cannot drift apart.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from torch_fdattn.dist import ShardedKVCache
from torch_fdattn.models import Transformer


class PromptError(ValueError):
    """A prompt that cannot be generated from: empty, too long for the cache, unknown tokens."""


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn: greedily at temperature 0, else from the top_p nucleus."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None  # None: another one each time

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be at least 0 and finite, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must be from -2**63 to 2**64 - 1, got {self.seed}")

    def generator(self, device: torch.device) -> torch.Generator:
        generator = torch.Generator(device)
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed)
        return generator

    def draw(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """logits (B, vocab) -> token ids (B, 1)."""
        if self.temperature == 0:
            return logits.argmax(-1, keepdim=True)
        logits = logits.float()
        # Relative to the largest, and never divided by what fp32 takes for 0: no inf - inf, no 0 / 0.
        logits = (logits - logits.amax(-1, keepdim=True)) / max(self.temperature, 1e-30)
        weights = torch.softmax(logits, dim=-1)
        if self.top_p < 1:
            ordered, order = weights.sort(dim=-1, descending=True)
            # A token stays while those before it hold less than top_p: the first always does, even
            # where fp32 takes top_p for 0.
            outside = ordered.cumsum(-1) - ordered >= self.top_p
            outside[..., 0] = False
            weights = weights.scatter(-1, order, ordered.masked_fill(outside, 0))
        return torch.multinomial(weights, 1, generator=generator)


@dataclass
class Stats:
    """What a run of `generate` took, on this rank; filled in as it goes."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    first_token_s: float = 0.0
    decode_s: float = 0.0  # all tokens after the first
    decode_bytes: int = 0  # weights and cache read for them

    @property
    def tokens_per_s(self) -> float:
        """Decode rate: the first token belongs to the prefill."""
        return (self.new_tokens - 1) / self.decode_s if self.decode_s else 0.0

    @property
    def gb_per_s(self) -> float:
        return self.decode_bytes / self.decode_s / 1e9 if self.decode_s else 0.0


def generate(
    model: Transformer,
    cache: ShardedKVCache,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    sampling: Sampling = Sampling(),
    eos_ids: Collection[int] = (),
    prefill_chunk: int = 512,
    group: dist.ProcessGroup | None = None,
    stats: Stats | None = None,
) -> Iterator[int]:
    """Token ids that continue `prompt`, after whatever the cache (batch 1) already holds.

    Ends after max_new_tokens, or with the first of eos_ids, which is yielded too. The last token
    yielded is not stored in the cache. `group`: the ranks that the cache is sharded over; all of
    them must iterate. Arguments are checked here, before the first token is asked for.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if prefill_chunk < 1:
        raise ValueError(f"prefill_chunk must be at least 1, got {prefill_chunk}")
    if not prompt:
        raise PromptError("prompt must have at least one token, got none")
    if not 0 <= min(prompt) <= max(prompt) < model.config.vocab_size:
        raise PromptError(
            f"prompt must hold token ids from 0 to {model.config.vocab_size - 1}, got "
            f"{min(prompt)} to {max(prompt)}"
        )
    if cache.lengths.numel() != 1:
        raise ValueError(f"cache must have batch 1, got {cache.lengths.numel()}")
    held = int(cache.lengths)
    if (needed := held + len(prompt) + max_new_tokens - 1) > cache.capacity:
        raise PromptError(
            f"prompt of {len(prompt)} tokens and {max_new_tokens} new ones, after {held} held, need "
            f"{needed} places, the cache has {cache.capacity}"
        )
    stats = Stats() if stats is None else stats
    steps = _steps(model, cache, prompt, sampling, prefill_chunk, group, stats)
    return _until_end(steps, max_new_tokens, frozenset(eos_ids))


def _until_end(steps: Iterator[int], limit: int, eos_ids: frozenset[int]) -> Iterator[int]:
    for count, token in enumerate(steps, 1):
        yield token
        if count == limit or token in eos_ids:
            return


def _steps(
    model: Transformer,
    cache: ShardedKVCache,
    prompt: Sequence[int],
    sampling: Sampling,
    prefill_chunk: int,
    group: dist.ProcessGroup | None,
    stats: Stats,
) -> Iterator[int]:
    device = cache.lengths.device
    generator = sampling.generator(device)
    weight_bytes = _bytes_read_per_step(model)
    stats.prompt_tokens, began = len(prompt), time.perf_counter()
    chunks = torch.tensor([prompt], device=device).split(min(prefill_chunk, len(prompt)), dim=1)
    for chunk in chunks:
        logits = _forward(model, chunk, cache)
    while True:
        token = sampling.draw(logits[:, -1], generator)
        if group is not None:
            dist.broadcast(token, group=group, group_src=0)
        value = int(token)  # the host waits for the device here, so the clock below is right
        stats.new_tokens += 1
        if stats.new_tokens == 1:
            stats.first_token_s = time.perf_counter() - began
        else:
            stats.decode_s += time.perf_counter() - began
            stats.decode_bytes += weight_bytes + cache.bytes_used()
        yield value
        began = time.perf_counter()  # what the caller does with a token is not our time
        logits = _forward(model, token, cache)


@torch.inference_mode()
def _forward(model: Transformer, tokens: Tensor, cache: ShardedKVCache) -> Tensor:
    return model(tokens, cache, last_only=True)


def _bytes_read_per_step(model: Transformer) -> int:
    """A step reads every weight once; of an input embedding of its own, only a row."""
    read = sum(parameter.nbytes for parameter in model.parameters())
    return read if model.config.tie_embeddings else read - model.embed_tokens.weight.nbytes
