"""Tokens per second and time to first token of a real model, through torch_fdattn's own engine.

Greedy, one sequence, random prompt tokens (their values do not change the work). Under torchrun the
KV cache is sharded over the ranks and rank 0 records, as `fdattn/all_gather`. Each repeat starts
with an empty cache, after a first run that compiles and is not counted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from . import ranks as processes
from .peers import OURS, Implementation
from .runner import DTYPES, Run, generator
from .shapes import GenerateCase
from .timing import Sample

KV_BLOCK = 16  # as `fdattn generate` deals positions to ranks


class Sharded(Implementation):
    """Ours with the cache sharded over ranks: the same calls, another name in the results."""

    name = "fdattn/all_gather"

    def available(self, device: torch.device) -> str | None:
        return OURS.available(device)


def join(device: torch.device) -> tuple[torch.device, dist.ProcessGroup | None]:
    """This rank's device and group under torchrun; the given device and None without."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return device, None
    ranks = processes.join(device.type)
    return ranks.device, ranks.group


def measure(run: Run, cases: Sequence[GenerateCase], group: dist.ProcessGroup | None) -> None:
    """Measures `cases`; all ranks of `group` call it."""
    run.cases(cases, lambda case, impls: _measure_case(run, case, impls, group))


def _measure_case(
    run: Run,
    case: GenerateCase,
    implementations: Sequence[Implementation],
    group: dist.ProcessGroup | None,
) -> None:
    for impl in implementations:
        with run.recorder.guard(case.name, impl.name, "generate", run.timer.check_device):
            rates, first_tokens = _generate(run, case, group)
            for metric, sample in (("tokens_per_s", rates), ("first_token_ms", first_tokens)):
                run.recorder.add_sample(case.name, impl.name, metric, sample.median, sample.spread)


def _generate(
    run: Run, case: GenerateCase, group: dist.ProcessGroup | None
) -> tuple[Sample, Sample]:
    """(tokens per second after the first, milliseconds to the first)."""
    from torch_fdattn.engine import Engine, Stats
    from torch_fdattn.models import load_model

    device, dtype = run.timer.device, DTYPES[case.dtype]
    model = load_model(case.model, dtype=dtype, device=device)
    config = model.config
    shape = (config.num_heads, config.num_kv_heads, config.head_dim)
    if shape != (case.heads, case.kv_heads, case.head_dim):
        raise ValueError(f"case must have the model's heads and head_dim {shape}, got {case.name}")
    engine = Engine(
        model,
        capacity=case.prompt_tokens + case.new_tokens,
        kv_group=None if group is None else group.group_name,
        kv_block=KV_BLOCK,
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
    counted = runs[1:]
    return (
        Sample(tuple(stats.tokens_per_s for stats in counted)),
        Sample(tuple(1e3 * stats.first_token_s for stats in counted)),
    )
