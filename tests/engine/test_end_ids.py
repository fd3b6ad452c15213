"""A tokenizer's end tokens are of the model's vocabulary; with those that are, no request ends the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.tiny import PROMPT, random_model
from tests.server.tiny_engine import byte_tokenizer
from torch_fdattn.engine import LLM, SamplingParams
from torch_fdattn.models import ModelError

VOCAB = 64  # of the model


@pytest.fixture(scope="module")
def model():
    return random_model("cpu")


@pytest.mark.parametrize("wrong", [-1, -300, VOCAB, 10**6, 10**30])
def test_end_tokens_of_another_model_are_refused(wrong, model, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    tokenizer.eos_ids = frozenset({3, wrong})
    expected = rf"tokenizer\.eos_ids must be from 0 to 63, the model's vocab_size being 64, got \[{wrong}\]: "
    with pytest.raises(ModelError, match=expected):
        LLM(model, tokenizer, pages=8)


def test_min_tokens_bans_the_last_token_of_the_vocabulary_and_no_other(
    model, tmp_path: Path
) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    tokenizer.eos_ids = frozenset({0, VOCAB - 1})
    llm = LLM(model, tokenizer, pages=64)
    drawn = set()
    for seed in range(4):
        params = SamplingParams(max_tokens=100, min_tokens=100, temperature=50.0, seed=seed)
        drawn.update(llm.generate([PROMPT], params)[0].outputs[0].token_ids)
    assert drawn <= set(range(1, VOCAB - 1))
    assert VOCAB - 2 in drawn
