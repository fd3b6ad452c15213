"""Continuous batching over a cache that gloo ranks share by position: all ranks have the tokens of one process."""

from __future__ import annotations

import functools
import json

import pytest

from tests.engine import sharded_worker as worker
from tests.engine.expected import TIE
from tests.engine.tiny import POSITION
from tests.forked import call_on_ranks


@functools.cache
def of_one_process(model: str, case: str) -> dict:
    llm = worker.engine(worker.MODELS[model](), 1, worker.CASES[case])
    return worker.write(llm)


def expect_equal_up_to_ties(found: list[dict], expected: list[dict]) -> None:
    """The same log-probabilities to TIE, and so the same tokens, up to the first place where a tie may decide."""
    for own, theirs in zip(found, expected, strict=True):
        assert len(own["tokens"]) == len(theirs["tokens"]) == worker.TOKENS
        for i, (row, other) in enumerate(zip(own["logprobs"], theirs["logprobs"], strict=True)):
            assert max(abs(a - b) for a, b in zip(row, other, strict=True)) < TIE
            if own["tokens"][i] != theirs["tokens"][i]:
                break


def expect_ranks(tmp_path, shape, models, cases) -> None:
    size = shape[0] * shape[1]
    call_on_ranks(worker.one_rank, (tmp_path, shape, models, cases), size)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    for model in models:
        for case in cases:
            name = f"{model}, {case}"
            own, expected = found[0][name], of_one_process(model, case)
            for answers in ("greedy", "drawn", "while others run"):
                expect_equal_up_to_ties(own[answers], expected[answers])
            assert (own["stats"]["preemptions"] > 0) == (case in ("few pages", "fp8_e4m3"))
            assert own["stats"]["pages_used"] == 0
            assert own["stats"]["prefix_hit_tokens"] > 0
            assert (own["stats"]["accepted_tokens"] > 0) == (case == "speculation")
            assert all(theirs[name]["stats"] == own["stats"] for theirs in found)
        llm = worker.engine(worker.MODELS[model](), 1, {"max_batch_tokens": 9})
        rows = zip(found[0][f"{model}, of prompts"], worker.prompt_logprobs(llm), strict=True)
        assert max(abs(a - b) for own, theirs in rows for a, b in zip(own, theirs, strict=True)) < TIE  # fmt: skip
        unseeded = found[0][f"{model}, unseeded"]
        assert all(theirs[f"{model}, unseeded"] == unseeded for theirs in found)
        assert unseeded[0] != unseeded[1]
        assert not any(theirs.get(f"{model}, changed bits") for theirs in found)


@pytest.mark.parametrize(
    ("shape", "models", "cases"),
    [
        ((1, 1), ["qwen3"], ["as it comes"]),
        (
            (2, 1),
            ["windowed"],
            ["chunks of 7", "few pages", "batch-invariant", "int8", "speculation"],
        ),
        ((2, 2), ["qwen3"], ["chunks of 7"]),
        ((4, 1), ["qwen3"], ["as it comes"]),
        *(
            pytest.param(shape, list(worker.MODELS), list(worker.CASES), marks=pytest.mark.slow)
            for shape in ((2, 1), (3, 1), (2, 2), (4, 1))
        ),
    ],
)
def test_ranks_write_what_one_process_writes(shape, models, cases, tmp_path):
    expect_ranks(tmp_path, shape, models, cases)


REFUSED = {
    "sizes": "ValueError: page_size must be the same on all ranks, got 4 on rank 0, 5 on rank 1",
    "another prompt": "ValueError: the hash of the prompt must be the same on all ranks, got ",
    "read at once": "ValueError: run_ahead must be the same on all ranks, got True on rank 0, False on rank 1",
    "a prefix cache": "ValueError: enable_prefix_caching must be the same on all ranks, got True on rank 0, False on rank 1",
    "hierarchical": "ValueError: hierarchy must be the names of an inner and an outer group with strategy='hierarchical', got None",
    "invariance of one": "ValueError: rank_invariant must be the same on all ranks, got True on rank 0, False on rank 1",
    "unknown": "ValueError: strategy must be one of ('auto', ",
    "one-sided": "NotImplementedError: strategy 'two_shot' needs ranks that share symmetric memory: rank 0: CPU tensors",
    "without a group": "ValueError: strategy must be 'auto' where kv_group is None, got 'ring'",
    "no mesh": "ValueError: kv_group and tp_group must be the two dimensions of a mesh of all ranks, got groups of 2 and 2 "
    "among 2 ranks",
    "no group": "ValueError: kv_group must name a process group of this process, got 'nowhere'",
}  # fmt: skip


def test_what_is_wrong_is_named_on_every_rank(tmp_path):
    call_on_ranks(worker.refusals, (tmp_path,), 2)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    # Of pages of 16 tokens, that the ranks have in turn.
    assert [theirs["bytes"] for theirs in found] == [
        [16 * POSITION, 24 * POSITION],
        [0, 16 * POSITION],
    ]
    for name, message in REFUSED.items():
        for theirs in found:
            assert theirs[name].startswith(message), (name, theirs[name])
    assert [theirs["the other's"] for theirs in found] == [
        "ValueError: llm must be one of several ranks, and not the first, got rank 0 of 2: make an AsyncLLM of it",
        "ValueError: llm must be that of rank 0, which alone takes requests, got that of rank 1 of 2: make a Follower of it",
    ]
    for name, message in {
        "one rank's format": "kv_dtype must be one of",
        "pages of one": "pages must be at least 1",
    }.items():
        own, other = found[0][name], found[1][name]
        assert own.startswith(f"ValueError: {message}")
        assert other == f"{own} (on rank 0)"
