"""`LLM` on tensor-parallel ranks: decodes in CUDA graphs with communication in them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.engine.tiny import PROMPTS, greedy, random_model
from torch_fdattn.dist import matmul_all_reduce
from torch_fdattn.dist.collectives import split_evenly
from torch_fdattn.dist.tensor_parallel.auto import ALL_REDUCE, LAYER
from torch_fdattn.engine import LLM, SamplingParams
from torch_fdattn.models.parallelize import parallelize


def made(model, group) -> LLM:
    return LLM(
        model, tp_group=group, max_num_seqs=len(PROMPTS), max_model_len=48, pages=12, enable_prefix_caching=False
    )  # fmt: skip


def continued(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8))
    return [output.outputs[0].token_ids for output in outputs]


METHODS = ("nccl", "one_shot", "two_shot")
FORMS = [("ag_rs", "nccl"), *(("all_reduce", method) for method in METHODS)]


@pytest.mark.parametrize(("strategy", "method"), FORMS)
def test_captured_tokens_are_one_process_tokens(group, rank_device, strategy, method) -> None:
    """Also after something larger has outgrown the workspace that the graph holds."""
    if method != "nccl" and rank_device.type != "cuda":
        pytest.skip("needs a CUDA device")
    dense = random_model(rank_device, heads=8)
    expected = [greedy(dense, prompt, 8) for prompt in PROMPTS]
    model = parallelize(
        random_model(rank_device, heads=8), group, strategy, allreduce_method=method
    )
    llm = made(model, group)
    for width in (1, 2**14):
        assert continued(llm) == expected
        x, weight = (torch.ones(width, 16, device=rank_device) for _ in range(2))
        matmul_all_reduce(x[:256], weight, group, method=method)
    llm.close()


def test_captures_take_what_auto_chooses(group, rank_device, measured) -> None:
    """Warm-ups leave every kernel and memory of the choice ready: all-reduces with a norm behind them
    and the last block's without."""
    dense = random_model(rank_device, heads=8)
    expected = [greedy(dense, prompt, 8) for prompt in PROMPTS]
    rows, hidden = len(PROMPTS), dense.config.hidden_size
    inner = split_evenly(dense.config.intermediate_size, dist.get_world_size())[0]
    heads = split_evenly(dense.config.num_heads, dist.get_world_size())[0] * dense.config.head_dim
    choices = [[rows, "low_latency"], [rows * 64, "nccl"]]
    measured(*((ALL_REDUCE, hidden, features, choices) for features in (inner, heads)))
    model = parallelize(random_model(rank_device, heads=8), group, "all_reduce")
    llm = made(model, group)
    assert continued(llm) == expected
    llm.close()


def test_auto_shards_prompts_and_replicates_single_tokens(
    group, rank_device, measured, monkeypatch
) -> None:
    dense = random_model(rank_device, heads=8)
    expected = [greedy(dense, prompt, 8) for prompt in PROMPTS]
    mlp = dense.layers[0].mlp.gate_proj
    most = split_evenly(mlp.out_features, dist.get_world_size())[0]
    measured(
        (
            LAYER,
            mlp.in_features,
            most,
            [[len(PROMPTS), "all_reduce"], [sum(map(len, PROMPTS)), "ag_rs"]],
        )
    )
    model = parallelize(random_model(rank_device, heads=8), group)
    llm = made(model, group)
    forms, tokens = [], llm.model.sharded_tokens
    take_rows = tokens.take_rows

    def recorded(x: torch.Tensor) -> torch.Tensor:
        x = take_rows(x)
        forms.append(llm.model.layers[0].mlp.form)
        return x

    monkeypatch.setattr(tokens, "take_rows", recorded)
    assert continued(llm) == expected
    assert forms[0] == "ag_rs"
    assert set(forms[1:]) <= {"all_reduce"}
    assert rank_device.type == "cuda" or len(forms) == 8
    llm.close()
