"""Continuous batching over a cache that the ranks share by position, on their devices, by each strategy of decode."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.engine.expected import expect_greedy
from tests.engine.tiny import PROMPTS, random_model
from torch_fdattn.dist.decode.op import COLLECTIVES_ALONE, ONE_SIDED
from torch_fdattn.engine import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=2)


@pytest.mark.parametrize("strategy", ["auto", *COLLECTIVES_ALONE, *ONE_SIDED])
def test_greedy_tokens_are_the_models(group: str, rank_device, strategy: str) -> None:
    """On GPUs decodes alone run in CUDA graphs, exchange included."""
    if strategy in ONE_SIDED and rank_device.type != "cuda":
        pytest.skip("needs a CUDA device")
    model = random_model(rank_device)
    tokens = max(1, 8 // dist.get_world_size())  # of a page on each rank: prompts are of 20 at most
    llm = LLM(
        model, kv_group=group, strategy=strategy, max_model_len=48, page_size=tokens, pages=96 // tokens,
        max_num_seqs=5, max_batch_tokens=11,
    )  # fmt: skip
    for _ in range(2):  # with prefix hits the second time
        for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY), strict=True):
            expect_greedy(model, prompt, output.outputs[0])
    assert llm.stats().prefix_hit_tokens > 0


def test_cuda_graphs_change_no_token(group: str, rank_device) -> None:
    if rank_device.type != "cuda":
        pytest.skip("needs a CUDA device")
    model = random_model(rank_device).to(torch.bfloat16)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=24)
    options = dict(kv_group=group, max_model_len=64, pages=16, kv_dtype="fp8_e4m3")
    captured, eager = (
        LLM(model, cuda_graph=graph, batch_invariant=True, max_num_seqs=8, **options) for graph in (True, False)
    )  # fmt: skip
    found = [x.outputs[0].token_ids for x in captured.generate(PROMPTS, params)]
    assert found == [x.outputs[0].token_ids for x in eager.generate(PROMPTS, params)]
