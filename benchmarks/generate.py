"""Tokens per second and time to first token of a real model, through torch_fdattn's own engine.

Greedy, one sequence, random prompt tokens (their values do not change the work). Under torchrun the
KV cache is sharded over the ranks and rank 0 records, as `fdattn/all_gather`. No repeat finds a prefix in
the cache; a first run compiles and is not counted.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import torch

from .peers import OURS, Implementation
from .ranks import Ranks
from .results import Recorder
from .runner import DTYPES, Run, chosen_cases, generator
from .shapes import GenerateCase
from .timing import Sample

if TYPE_CHECKING:
    from torch_fdattn.engine import LLM

PAGE_SIZE = 16  # positions that are dealt to ranks in turn


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
    from torch_fdattn.engine import LLM
    from torch_fdattn.models import load_model

    model = load_model(case.model, dtype=DTYPES[case.dtype], device=ranks.device)
    config = model.config
    shape = (config.num_heads, config.num_kv_heads, config.head_dim)
    if shape != (case.heads, case.kv_heads, case.head_dim):
        raise ValueError(f"case must have the model's heads and head_dim {shape}, got {case.name}")
    group = ranks.group_name if ranks.size > 1 else None
    llm = LLM(
        model, max_num_seqs=1, max_model_len=case.prompt_tokens + case.new_tokens, page_size=PAGE_SIZE,
        kv_group=group, enable_prefix_caching=False, run_ahead=ranks.device.type == "cuda",
    )  # fmt: skip
    made = generator(torch.device("cpu"), 0)
    prompt = torch.randint(config.vocab_size, (case.prompt_tokens,), generator=made).tolist()
    runs = [_seconds(llm, prompt, case.new_tokens) for _ in range(run.repeats + 1)][1:]
    llm.close()
    steps = case.new_tokens - 1
    return {
        "tokens_per_s": Sample(tuple(steps / (times[-1] - times[0]) for times in runs)),
        "first_token_ms": Sample(tuple(1e3 * times[0] for times in runs)),
    }


def _seconds(llm: LLM, prompt: list[int], new_tokens: int) -> list[float]:
    """From the request on until each of its tokens is on the host."""
    from torch_fdattn.engine import SamplingParams

    times, began = [], time.perf_counter()
    llm.add_request("", prompt, SamplingParams(temperature=0, max_tokens=new_tokens))
    while llm.has_unfinished:
        if llm.step():
            times.append(time.perf_counter() - began)
    return times
