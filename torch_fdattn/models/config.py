"""The shape of a dense Llama or Qwen3 model, read from a Hugging Face `config.json`.

Limits: dense full-attention `llama` and `qwen3`, SiLU, unquantised weights, rope over the whole head
with `default`, `linear` or `llama3` scaling, in the old form (`rope_theta`, `rope_scaling`) and in
transformers 5's `rope_parameters`. Anything else is a ModelError: a model that is read wrongly still
writes fluent text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torch_fdattn.models.errors import ModelError

ARCHITECTURES = ("llama", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base `theta` and what is done to its frequencies (see rope.py)."""

    theta: float = 10000.0
    kind: str = "default"  # one of ROPE_TYPES, or "divisors"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    divisors: tuple[float, ...] = ()  # one for each frequency: how GGUF files carry llama3 scaling


@dataclass(frozen=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: torch.dtype | None = None  # of the checkpoint, where it says so

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ModelError(
                f"architecture must be one of {', '.join(ARCHITECTURES)}, got {self.architecture!r}"
            )
        for name in _SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ModelError(f"{name} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and "
                f"{self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")

    @property
    def qk_norm(self) -> bool:
        """Whether every query and key head is RMS-normalised before the rotation."""
        return self.architecture == "qwen3"

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """From the contents of a `config.json`."""
        architecture = raw.get("model_type")
        _refuse_unsupported(raw, architecture)
        try:
            heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
            return cls(
                architecture=architecture,
                vocab_size=raw["vocab_size"],
                hidden_size=hidden,
                intermediate_size=raw["intermediate_size"],
                num_layers=raw["num_hidden_layers"],
                num_heads=heads,
                num_kv_heads=raw.get("num_key_value_heads") or heads,
                # What each architecture assumes when the file leaves the key out.
                head_dim=raw.get("head_dim") or {"qwen3": 128}.get(architecture, hidden // heads),
                max_positions=raw.get("max_position_embeddings", 2048),
                norm_eps=raw.get("rms_norm_eps", 1e-6),
                rope=_rope_from_hf(raw),
                tie_embeddings=raw.get("tie_word_embeddings", False),
                attention_bias=raw.get("attention_bias", False),
                mlp_bias=raw.get("mlp_bias", False),
                dtype=_dtype(raw.get("dtype") or raw.get("torch_dtype")),
            )
        except KeyError as error:
            raise ModelError(f"{error.args[0]} is missing") from None
        except (TypeError, AttributeError, ZeroDivisionError) as error:
            raise ModelError(f"a value of the wrong kind ({error})") from None

    @classmethod
    def from_file(cls, path: Path) -> ModelConfig:
        """From a `config.json`; errors name the file."""
        raw = read_json(path)
        try:
            return cls.from_hf(raw)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from None


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_positions",
)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; errors name the file."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: must hold a JSON object, got {type(raw).__name__}")
    return raw


def _refuse_unsupported(raw: Mapping[str, Any], architecture: str | None) -> None:
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"model_type must be one of {', '.join(ARCHITECTURES)}, got {architecture!r}"
        )
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"hidden_act must be 'silu', got {activation!r}")
    if raw.get("use_sliding_window"):
        raise ModelError("use_sliding_window must be false: sliding-window layers are unsupported")
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method", "unknown")
        raise ModelError(f"quantization_config must be absent, got quant_method {method!r}")


def _rope_from_hf(raw: Mapping[str, Any]) -> RopeConfig:
    # transformers 5 writes one dictionary; before it, theta stood beside an optional scaling.
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = scaling.get("rope_theta") or raw.get("rope_theta") or RopeConfig.theta
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ModelError(f"rope type must be one of {', '.join(ROPE_TYPES)}, got {kind!r}")
    partial = scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ModelError(f"partial_rotary_factor must be 1, got {partial}")
    if kind == "default":
        return RopeConfig(float(theta))
    if kind == "linear":
        return RopeConfig(float(theta), kind, float(scaling["factor"]))
    return RopeConfig(
        float(theta),
        kind,
        float(scaling["factor"]),
        float(scaling["low_freq_factor"]),
        float(scaling["high_freq_factor"]),
        int(scaling["original_max_position_embeddings"]),
    )


def _dtype(name: str | None) -> torch.dtype | None:
    dtype = getattr(torch, str(name), None)
    return dtype if isinstance(dtype, torch.dtype) else None
