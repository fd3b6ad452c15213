"""Tokens per second and time to first token of a real model, through torch_fdattn's own engine.

Greedy, one sequence, random prompt tokens (their values do not change the work). Under torchrun the
KV cache is sharded over the ranks and rank 0 records, as `fdattn/all_gather`. Each repeat starts
with an empty cache, after a first run that compiles and is not counted.
"""

from __future__ import annotations

import argparse

import torch

from .peers import OURS, Implementation
from .ranks import Ranks
from .results import Recorder
from .runner import DTYPES, Run, chosen_cases, generator
from .shapes import GenerateCase
from .timing import Sample

KV_BLOCK = 16  # positions that are dealt to ranks in turn


class Sharded(Implementation):
    """Ours with the cache sharded over ranks: the same calls, another name in the results."""

    name = "fdattn/all_gather"

    def available(self, device: torch.device) -> str | None:
        return OURS.available(device)


def run(options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> bool:
    if ranks.size > 1 and options.budget_s is not None:
        raise ValueError("--budget-s must not be given under torchrun: ranks' clocks differ")
    options.device = str(ranks.device)
    run = Run.of(options, ranks, recorder, (OURS if ranks.size == 1 else Sharded(),))

    def measured(case: GenerateCase, implementations: tuple[Implementation, ...]) -> None:
        for impl in implementations:
            with run.guard(case.name, impl.name, "generate"):
                for metric, sample in _generate(run, case, ranks).items():
                    recorder.add_sample(case.name, impl.name, metric, sample.median, sample.spread)

    run.cases(chosen_cases(options), measured)
    return True


def _generate(run: Run, case: GenerateCase, ranks: Ranks) -> dict[str, Sample]:
    """Tokens per second after the first, and milliseconds to the first."""
    from torch_fdattn.engine import Engine, Stats
    from torch_fdattn.models import load_model

    model = load_model(case.model, dtype=DTYPES[case.dtype], device=ranks.device)
    config = model.config
    shape = (config.num_heads, config.num_kv_heads, config.head_dim)
    if shape != (case.heads, case.kv_heads, case.head_dim):
        raise ValueError(f"case must have the model's heads and head_dim {shape}, got {case.name}")
    capacity, group = case.prompt_tokens + case.new_tokens, ranks.group_name
    engine = Engine(
        model, capacity=capacity, kv_group=group if ranks.size > 1 else None, kv_block=KV_BLOCK
    )
    made = generator(torch.device("cpu"), 0)
    prompt = torch.randint(config.vocab_size, (case.prompt_tokens,), generator=made).tolist()
    runs = []
    for _ in range(run.repeats + 1):
        engine.reset()
        stats = Stats()
        for _ in engine.stream(prompt, case.new_tokens, stats=stats):
            pass
        runs.append(stats)
    engine.close()
    return {
        "tokens_per_s": Sample(tuple(stats.tokens_per_s for stats in runs[1:])),
        "first_token_ms": Sample(tuple(1e3 * stats.first_token_s for stats in runs[1:])),
    }
