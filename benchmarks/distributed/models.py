"""Model shapes that need no download, and models with random weights, built straight into their shards."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import nn

from torch_fdattn.models import ModelConfig, Transformer, named_config
from torch_fdattn.models.config import RopeConfig
from torch_fdattn.models.parallelize import parallelize

#: Shapes of published models, by their names on the hub; `tiny-qwen3` is ours, `smollm2` has SmolLM2-135M's shape.
CONFIGS: dict[str, ModelConfig] = {
    **{
        f"Qwen/{name}": named_config(name)
        for name in ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B")
    },
    "meta-llama/Llama-2-7b-hf": named_config("Llama-2-7b"),
    "meta-llama/Meta-Llama-3-8B": named_config("Llama-3-8B"),
    "meta-llama/Meta-Llama-3-70B": named_config("Llama-3-70B"),
    "smollm2": named_config("SmolLM2-135M"),
    "tiny-qwen3": ModelConfig(
        "qwen3", 512, 96, 160, 2, 8, 2, 16, 40960, rope=RopeConfig(theta=1e6), tie_embeddings=True
    ),
}
CONFIGS = {name: replace(config, dtype=torch.bfloat16) for name, config in CONFIGS.items()}


def config_named(name: str, layers: int | None = None) -> ModelConfig:
    """The built-in shape, with fewer layers if asked for."""
    if name not in CONFIGS:
        raise ValueError(f"--model must be one of {', '.join(CONFIGS)}, got {name!r}")
    config = CONFIGS[name]
    if layers is None:
        return config
    if not 1 <= layers <= config.num_layers:
        raise ValueError(f"--layers must be from 1 to {config.num_layers}, got {layers}")
    return replace(config, num_layers=layers)


def attention_weights(config: ModelConfig) -> int:
    """How many weights one attention layer has."""
    return 2 * config.hidden_size * (config.num_heads + config.num_kv_heads) * config.head_dim


def mlp_weights(config: ModelConfig) -> int:
    """How many weights one MLP has."""
    return 3 * config.hidden_size * config.intermediate_size


def model_bytes(config: ModelConfig, dtype: torch.dtype, ranks: int) -> int:
    """Bytes of weights that one rank of `ranks` holds (embeddings are replicated, heads are split)."""
    embedding = config.vocab_size * config.hidden_size * dtype.itemsize
    head = 0 if config.tie_embeddings else embedding // ranks
    layer = (attention_weights(config) + mlp_weights(config)) * dtype.itemsize
    return config.num_layers * layer // ranks + embedding + head


def kv_bytes(config: ModelConfig, dtype: torch.dtype, ranks: int, batch: int, length: int) -> int:
    """Bytes of KV cache that one rank of a tensor-parallel group holds."""
    heads = max(1, -(-config.num_kv_heads // ranks))
    values = 2 * config.num_layers * batch * heads * length * config.head_dim
    return values * dtype.itemsize


def require_memory(what: str, needed: int, device: torch.device, ranks: int) -> None:
    """Refuses what does not fit into nine tenths of the free memory; CPU ranks share theirs.

    Raises:
        ValueError: naming the bytes needed and free.
    """
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks
    if needed > 0.9 * free:
        raise ValueError(
            f"{what} needs {needed:,} bytes on each rank, {free:,} are free on {device}"
        )


def random_weights(module: nn.Module, device: torch.device, dtype: torch.dtype, seed: int) -> None:
    """Materialises a meta module with the same random weights wherever the seed is the same."""
    module.to(dtype=dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(False)
        if name.endswith("norm.weight"):
            parameter.fill_(1)
        else:
            parameter.normal_(0, 0.02, generator=generator)


def unsharded_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Transformer:
    """The model on one process, with random weights that are the same on every rank."""
    with torch.device("meta"):
        model = Transformer(config)
    random_weights(model, device, dtype, seed=0)
    return model


def sharded_model(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, group_name: str, strategy: str,
    allreduce_method: str, linear_strategy: str, rank: int,
) -> Transformer:  # fmt: skip
    """This rank's part of a model too large to be built whole: random weights, each rank its own.

    What ranks hold in common (embedding, norms) is drawn alike.
    """
    with torch.device("meta"):
        model = Transformer(config)
    parallelize(model, group_name, strategy, allreduce_method, linear_strategy)
    random_weights(model, device, dtype, seed=1 + rank)
    generator = torch.Generator(device).manual_seed(0)
    model.embed_tokens.weight.data.normal_(0, 0.02, generator=generator)
    return model
