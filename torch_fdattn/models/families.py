"""What each family of models computes otherwise than Llama, and what its `config.json` may leave out.

A family is named as `model_type` in Hugging Face's config.json; Llama 2 and 3, SmolLM2, Yi and others are `llama`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """How a family differs from Llama.

    Args:
        qk_norm: every head of q and k is RMS-normalised before its rotation.
        qkv_bias: q, k and v have biases, and the output projection has none.
        activation: of the MLP's gate, one of `torch_fdattn.ops.glu.ACTIVATIONS`.
        norm_offset: norms multiply by 1 + weight, in fp32.
        post_norms: attention and MLP are normalised before they are added, too.
        scaled_embeddings: embeddings are multiplied by the square root of the hidden size.
        gguf: its name in GGUF files; None: it is not written under a name of its own.
        gguf_interleaved: llama.cpp's converter interleaves the two halves of each head's rows of q and k.
        defaults: what a key of config.json stands for where it is left out; Llama's are those of `LLAMA_DEFAULTS`.

    Examples:
        >>> from torch_fdattn.models.families import FAMILIES
        >>> FAMILIES["gemma2"].activation
        'gelu_tanh'
    """

    qk_norm: bool = False
    qkv_bias: bool = False
    activation: str = "silu"
    norm_offset: bool = False
    post_norms: bool = False
    scaled_embeddings: bool = False
    gguf: str | None = None
    gguf_interleaved: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


LLAMA_DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_QWEN = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA = {
    "activation": "gelu_tanh", "norm_offset": True, "post_norms": True, "scaled_embeddings": True,
}  # fmt: skip
_GEMMA_DEFAULTS = {
    "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}  # fmt: skip
FAMILIES: dict[str, Family] = {
    "llama": Family(gguf="llama", gguf_interleaved=True),
    "mistral": Family(
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
    ),
    "qwen2": Family(qkv_bias=True, gguf="qwen2", defaults=_QWEN),
    "qwen3": Family(qk_norm=True, gguf="qwen3", defaults={**_QWEN, "head_dim": 128}),
    "smollm3": Family(
        gguf="smollm3",
        gguf_interleaved=True,
        defaults={
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2000000.0,
            "tie_word_embeddings": True, "no_rope_layer_interval": 4,
        },
    ),
    "gemma2": Family(
        **_GEMMA,
        gguf="gemma2",
        defaults={
            **_GEMMA_DEFAULTS, "max_position_embeddings": 8192, "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": Family(
        **_GEMMA,
        qk_norm=True,
        gguf="gemma3",
        defaults={
            **_GEMMA_DEFAULTS, "max_position_embeddings": 131072, "sliding_window_pattern": 6,
            "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
        },
    ),
}  # fmt: skip
ARCHITECTURES = tuple(FAMILIES)
#: By the name in GGUF files.
GGUF_FAMILIES = {family.gguf: name for name, family in FAMILIES.items() if family.gguf}
