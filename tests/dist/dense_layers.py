"""The dense layers that tensor-parallel ones replace, ours and transformers', with random parameters."""

from __future__ import annotations

import os

import pytest
from torch import nn

from tests.dist.parts import randomise
from torch_fdattn.models import ModelConfig
from torch_fdattn.models.transformer import MLP, Attention

HIDDEN, DIM = 72, 16


def for_ranks(heads: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those (query heads, KV heads) that have a query head for each of torchrun's ranks."""
    return [pair for pair in heads if pair[0] >= int(os.environ.get("WORLD_SIZE", "1"))]


def config(heads: int = 8, kv_heads: int = 2, inner: int = 29, **options) -> ModelConfig:
    sizes = dict(vocab_size=11, hidden_size=HIDDEN, intermediate_size=inner, num_layers=1)
    heads = dict(num_heads=heads, num_kv_heads=kv_heads, head_dim=DIM, max_positions=64)
    return ModelConfig(**{"architecture": "qwen3", **sizes, **heads, **options})


def transformers_config(ours: ModelConfig):
    transformers = pytest.importorskip("transformers")
    kind = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
    theirs = kind[ours.architecture](
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_kv_heads,
        head_dim=ours.head_dim,
        attention_bias=ours.attention_bias,
        **(dict(mlp_bias=ours.mlp_bias) if ours.architecture == "llama" else {}),
    )
    theirs._attn_implementation = "eager"
    return theirs


def dense_mlp(ours: ModelConfig, library: str) -> nn.Module:
    if library == "ours":
        return randomise(MLP(ours))
    theirs = transformers_config(ours)
    from transformers.models.llama.modeling_llama import LlamaMLP
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    return randomise((LlamaMLP if ours.architecture == "llama" else Qwen3MLP)(theirs))


def dense_attention(ours: ModelConfig, library: str) -> nn.Module:
    if library == "ours":
        return randomise(Attention(ours, 0))
    theirs = transformers_config(ours)
    from transformers.models.llama.modeling_llama import LlamaAttention
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    kind = LlamaAttention if ours.architecture == "llama" else Qwen3Attention
    return randomise(kind(theirs, layer_idx=0))
