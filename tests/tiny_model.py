"""A random model of 64 tokens in a folder, for the tests of the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from torch_fdattn.models import ModelConfig, Transformer

POSITION = 2 * 2 * 2 * 16 * 4  # bytes of a cache position: K and V, layers, heads, head_dim, fp32


def save_tiny_model(folder: Path, chat_template: str | None = None) -> Path:
    """Most of its tokens are written outside ASCII; what is in none of them is a "?"."""
    safetensors_torch = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    raw = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(raw))
    torch.manual_seed(0)
    weights = Transformer(ModelConfig.from_hf(raw)).state_dict()
    safetensors_torch.save_file(weights, folder / "model.safetensors")
    letters = {text: i for i, text in enumerate(["a", "?", *map(chr, range(0x100, 0x13E))])}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[], unk_token="?")).save(
        str(folder / "tokenizer.json")
    )
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder
