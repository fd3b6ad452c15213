"""Shapes of published models by name, and models of these shapes with random weights, for benchmarks.

The table gives what their `config.json` says: vocabulary, hidden size, MLP, layers, query heads, key-value heads,
context; and the keys that are not the family's defaults (families.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torch_fdattn.models.config import ModelConfig
from torch_fdattn.models.errors import ModelError
from torch_fdattn.models.norms import OffsetRMSNorm
from torch_fdattn.models.transformer import Transformer


class _Shape(NamedTuple):
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int


_QWEN = {"rope_theta": 1e6}
_LLAMA3 = {"rope_theta": 5e5, "rms_norm_eps": 1e-5}
_LLAMA31 = {
    **_LLAMA3,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
_LLAMA32 = {**_LLAMA31, "rope_scaling": {**_LLAMA31["rope_scaling"], "factor": 32.0}}
_GEMMA3 = {"sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
_TIED = {"tie_word_embeddings": True}
_SHAPES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "Llama-2-7b": ("llama", (32000, 4096, 11008, 32, 32, 32, 4096), dict(rms_norm_eps=1e-5)),
    "Llama-3-8B": ("llama", (128256, 4096, 14336, 32, 32, 8, 8192), _LLAMA3),
    "Llama-3-70B": ("llama", (128256, 8192, 28672, 80, 64, 8, 8192), _LLAMA3),
    "Llama-3.1-8B": ("llama", (128256, 4096, 14336, 32, 32, 8, 131072), _LLAMA31),
    "Llama-3.1-70B": ("llama", (128256, 8192, 28672, 80, 64, 8, 131072), _LLAMA31),
    "Llama-3.2-1B": ("llama", (128256, 2048, 8192, 16, 32, 8, 131072), {**_LLAMA32, **_TIED}),
    "Llama-3.2-3B": ("llama", (128256, 3072, 8192, 28, 24, 8, 131072), {**_LLAMA32, **_TIED}),
    "Mistral-7B-v0.1": (
        "mistral", (32000, 4096, 14336, 32, 32, 8, 32768), dict(rms_norm_eps=1e-5, sliding_window=4096),
    ),
    "Mistral-7B-v0.3": (
        "mistral", (32768, 4096, 14336, 32, 32, 8, 32768),
        dict(rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=None),
    ),
    "Qwen2.5-0.5B": ("qwen2", (151936, 896, 4864, 24, 14, 2, 32768), {**_QWEN, **_TIED}),
    "Qwen2.5-7B": ("qwen2", (152064, 3584, 18944, 28, 28, 4, 131072), _QWEN),
    "Qwen3-0.6B": ("qwen3", (151936, 1024, 3072, 28, 16, 8, 40960), {**_QWEN, **_TIED}),
    "Qwen3-1.7B": ("qwen3", (151936, 2048, 6144, 28, 16, 8, 40960), {**_QWEN, **_TIED}),
    "Qwen3-4B": ("qwen3", (151936, 2560, 9728, 36, 32, 8, 40960), {**_QWEN, **_TIED}),
    "Qwen3-8B": ("qwen3", (151936, 4096, 12288, 36, 32, 8, 40960), _QWEN),
    "Qwen3-14B": ("qwen3", (151936, 5120, 17408, 40, 40, 8, 40960), _QWEN),
    "Qwen3-32B": ("qwen3", (151936, 5120, 25600, 64, 64, 8, 40960), _QWEN),
    "SmolLM2-135M": (
        "llama", (49152, 576, 1536, 30, 9, 3, 8192), dict(rope_theta=1e5, rms_norm_eps=1e-5, **_TIED),
    ),
    "SmolLM2-1.7B": (
        "llama", (49152, 2048, 8192, 24, 32, 32, 8192), dict(rope_theta=130000.0, rms_norm_eps=1e-5, **_TIED),
    ),
    "SmolLM3-3B": ("smollm3", (128256, 2048, 11008, 36, 16, 4, 65536), dict(rope_theta=5e6)),
    "gemma-2-2b": ("gemma2", (256000, 2304, 9216, 26, 8, 4, 8192), {}),
    "gemma-2-9b": ("gemma2", (256000, 3584, 14336, 42, 16, 8, 8192), {}),
    "gemma-2-27b": (
        "gemma2", (256000, 4608, 36864, 46, 32, 16, 8192), dict(head_dim=128, query_pre_attn_scalar=144),
    ),
    "gemma-3-270m": (
        "gemma3_text", (262144, 640, 2048, 18, 4, 1, 32768), dict(sliding_window=512),
    ),
    "gemma-3-1b": ("gemma3_text", (262144, 1152, 6912, 26, 4, 1, 32768), dict(sliding_window=512)),
    "gemma-3-4b": ("gemma3_text", (262208, 2560, 10240, 34, 8, 4, 131072), _GEMMA3),
    "gemma-3-12b": ("gemma3_text", (262208, 3840, 15360, 48, 16, 8, 131072), _GEMMA3),
    "gemma-3-27b": (
        "gemma3_text", (262208, 5376, 21504, 62, 32, 16, 131072),
        {**_GEMMA3, "head_dim": 128, "query_pre_attn_scalar": 168},
    ),
}  # fmt: skip
#: The names that `named_config` knows.
CONFIG_NAMES = tuple(_SHAPES)


def named_config(name: str) -> ModelConfig:
    """The configuration of a published model, one of `CONFIG_NAMES`.

    Raises:
        ModelError: another name.

    Examples:
        >>> config = torch_fdattn.models.named_config("Qwen3-8B")
        >>> config.num_layers, config.hidden_size, config.rope.theta
        (36, 4096, 1000000.0)
    """
    if name not in _SHAPES:
        raise ModelError(f"name must be one of {', '.join(CONFIG_NAMES)}, got {name!r}")
    kind, sizes, more = _SHAPES[name]
    return ModelConfig.from_hf({"model_type": kind, **_Shape(*sizes)._asdict(), **more})


def random_model(
    config: ModelConfig | str, *, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu",
    seed: int = 0,
) -> Transformer:  # fmt: skip
    """A model with random weights in evaluation mode, made on its device, its parameters not requiring gradients.

    Matrices are normal with a standard deviation of 0.02, norms multiply by 1 and biases are 0: its text means nothing,
    its time and memory are those of the published model.

    Args:
        config: a configuration, or a name for `named_config`.
        dtype, device: of the parameters.
        seed: of the generator on that device.

    Raises:
        ModelError: a name that is not in the table.

    Examples:
        >>> import dataclasses
        >>> config = dataclasses.replace(torch_fdattn.models.named_config("SmolLM2-135M"), num_layers=2)
        >>> model = torch_fdattn.models.random_model(config)
        >>> sum(parameter.numel() for parameter in model.parameters())
        35392320
    """
    config = named_config(config) if isinstance(config, str) else config
    device = torch.device(device)
    with torch.device("meta"):
        model = Transformer(config).to(dtype)
    model = model.to_empty(device=device).requires_grad_(False).eval()
    generator = torch.Generator(device).manual_seed(seed)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                ones = name == "weight" and not isinstance(module, OffsetRMSNorm)
                parameter.fill_(1.0 if ones else 0.0)
    return model
