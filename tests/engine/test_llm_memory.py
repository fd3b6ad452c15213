"""What an engine allocates follows from what can run, not from what a model's files say."""

from __future__ import annotations

import dataclasses

import pytest

from tests.engine.tiny import PROMPTS, greedy, random_model
from torch_fdattn.engine import LLM, SamplingParams


def test_rows_are_no_longer_than_the_pages(device):
    """A configuration of any number of positions allocates what the pages can hold, and no more than its budget."""
    model = random_model(device)
    model.config = dataclasses.replace(model.config, max_positions=2**31 - 1)
    llm = LLM(model, pages=4, page_size=4, cuda_graph=False)
    assert llm._runner.rows.tokens.shape == (257, 17)
    params = SamplingParams(temperature=0, max_tokens=10)  # 17 tokens, of which 16 are stored
    (output,) = llm.generate([PROMPTS[0]], params)
    assert output.outputs[0].token_ids == greedy(model, PROMPTS[0], 10)
    if device == "cpu":
        llm = LLM(model, max_num_seqs=4)
        assert llm._runner.rows.tokens.nbytes + llm.stats().kv_bytes <= 2**30
        assert llm.stats().pages_total > 1000
    message = r"max_num_seqs rows of 2147483647 tokens must fit into .* needs 4\d+.\d GiB: give fewer, a smaller max_model_len"  # fmt: skip
    with pytest.raises(ValueError, match=message):
        LLM(model, pages=2**30)
