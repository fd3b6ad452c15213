"""The requests: prompts and answers of uniformly drawn lengths, of drawn token ids."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

#: Prompts are drawn from the first ids: large vocabularies have them, and they are no special tokens of a chat.
_LAST_ID = 10_000


@dataclass(frozen=True)
class Workload:
    """Requests that are all answered to their full length.

    Attributes:
        prompts: token ids.
        new_tokens: of each answer.
        num_ids: ids of prompts are below.
    """

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: tuple[int, ...]
    num_ids: int

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_new_tokens(self) -> int:
        return sum(self.new_tokens)

    @property
    def max_length(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(len(p) + n for p, n in zip(self.prompts, self.new_tokens, strict=True))


def make_workload(
    num_requests: int, lengths: tuple[int, int], vocab_size: int, seed: int = 0
) -> Workload:
    """Prompts and answers of `lengths` (first, last), drawn uniformly; the seed decides all of it.

    Examples:
        >>> from torch_fdattn.server.bench.workload import make_workload
        >>> workload = make_workload(256, (100, 1024), vocab_size=151936)
        >>> len(workload.prompts), workload.num_new_tokens
        (256, 133966)
    """
    if num_requests < 1:
        raise ValueError(f"num_requests must be at least 1, got {num_requests}")
    if not 1 <= lengths[0] <= lengths[1]:
        raise ValueError(f"lengths must be (first, last) with 1 <= first <= last, got {lengths}")
    generator = random.Random(seed)
    last_id = min(vocab_size - 1, _LAST_ID)
    prompts = tuple(
        tuple(generator.randint(0, last_id) for _ in range(generator.randint(*lengths)))
        for _ in range(num_requests)
    )
    new_tokens = tuple(generator.randint(*lengths) for _ in range(num_requests))
    return Workload(prompts, new_tokens, last_id + 1)


def reordered(workload: Workload, run: int) -> Workload:
    """The same lengths with other first tokens, so that a run has no prefix hits from the one before."""
    prompts = tuple(((p[0] + run) % workload.num_ids, *p[1:]) for p in workload.prompts)
    return replace(workload, prompts=prompts)
