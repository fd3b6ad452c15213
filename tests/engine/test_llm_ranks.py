"""Continuous batching of a model that gloo ranks share by heads: all ranks have the same tokens, those of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.engine.tiny import PROMPTS, greedy, random_model
from tests.forked import call_on_ranks
from torch_fdattn.engine import LLM, NgramSpeculation, SamplingParams
from torch_fdattn.models.parallelize import parallelize

TOKENS = 16


def one_rank(rank: int, folder: Path, size: int, strategy: str) -> None:
    """Tokens of this rank: greedy, then drawn without a seed, which every rank chooses for itself; then with speculation."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    model = parallelize(random_model("cpu"), mesh["tp"], strategy=strategy)
    llm = LLM(
        model, max_model_len=40, page_size=4, pages=13, max_batch_tokens=7, tp_group=mesh["tp"].get_group()
    )  # fmt: skip
    found = []
    for temperature in (0.0, 1.5):
        params = SamplingParams(temperature=temperature, max_tokens=TOKENS, logprobs=1)
        found.append([x.outputs[0].token_ids for x in llm.generate(PROMPTS, params)])
    sized = LLM(
        model, max_model_len=40, tp_group=mesh["tp"].get_group(), speculation=NgramSpeculation(shortest=1)
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    found.append([x.outputs[0].token_ids for x in sized.generate(PROMPTS, params)])
    result = {
        "tokens": found, "preemptions": llm.stats().preemptions, "pages": sized.stats().pages_total,
        "accepted": sized.stats().accepted_tokens,
    }  # fmt: skip
    (folder / f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


@pytest.mark.parametrize("strategy", ["all_reduce", pytest.param("ag_rs", marks=pytest.mark.slow)])
def test_ranks_have_the_tokens_of_one_process(strategy, tmp_path):
    call_on_ranks(one_rank, (tmp_path, 2, strategy), 2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    model = random_model("cpu")
    assert first["tokens"][0] == [greedy(model, prompt, TOKENS) for prompt in PROMPTS]
    assert first["tokens"][1] != first["tokens"][0]
    assert first["tokens"][2] == first["tokens"][0]
    assert first["accepted"] > 0
    assert first["preemptions"] > 0
    assert first["pages"] == 256 * 3
