"""The shape of a dense Llama or Qwen3 model, read from a Hugging Face `config.json`.

Limits: dense full-attention `llama` and `qwen3`, SiLU, unquantised weights, rope over the whole head
with `default`, `linear` or `llama3` scaling, in the old form (`rope_theta`, `rope_scaling`) and in
transformers 5's `rope_parameters`. Anything else is a ModelError: a model that is read wrongly still
writes fluent text (config_keys.py judges every key).
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torch_fdattn.checks import HEAD_DIMS
from torch_fdattn.models.config_keys import check_hf_keys, check_rope_keys
from torch_fdattn.models.errors import MALFORMED, ModelError, reading

ARCHITECTURES = ("llama", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3")
DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base `theta` and what is done to its frequencies (see rope.py).

    Examples:
        >>> torch_fdattn.models.RopeConfig(theta=500000.0, kind="linear", factor=4.0).factor
        4.0
    """

    theta: float = 10000.0
    kind: str = "default"  # one of ROPE_TYPES, or "divisors"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    divisors: tuple[float, ...] = ()  # one for each frequency: how GGUF files carry llama3 scaling

    def __post_init__(self) -> None:
        _expect_sizes(self, "original_max_positions")
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor"):
            _expect_positive(f"rope {name}", getattr(self, name))
        for divisor in self.divisors:
            _expect_positive("rope divisors", divisor)
        if not self.low_freq_factor < self.high_freq_factor:
            raise ModelError(
                "rope low_freq_factor must be below high_freq_factor, got "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model; sizes that cannot be are a `ModelError`.

    Examples:
        >>> config = torch_fdattn.models.ModelConfig(
        ...     architecture="llama", vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2,
        ...     num_heads=4, num_kv_heads=2, head_dim=16, max_positions=128,
        ... )
        >>> config.qk_norm, config.rope.theta
        (False, 10000.0)
    """

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
        expect_architecture("architecture", self.architecture)
        _expect_sizes(self, *_SIZES)
        if not (_is_number(self.norm_eps) and 0 <= self.norm_eps < _HUGE):
            raise ModelError(f"norm_eps must be finite and at least 0, got {_show(self.norm_eps)}")
        for name in ("tie_embeddings", "attention_bias", "mlp_bias"):
            if not isinstance(value := getattr(self, name), bool):
                raise ModelError(f"{name} must be true or false, got {_show(value)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and "
                f"{self.num_kv_heads}"
            )
        if self.head_dim % 8 or not 16 <= self.head_dim <= 256:
            raise ModelError(f"head_dim must be {HEAD_DIMS}, got {self.head_dim}")

    @property
    def qk_norm(self) -> bool:
        """Whether every query and key head is RMS-normalised before the rotation."""
        return self.architecture == "qwen3"

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """From the contents of a `config.json`."""
        try:
            architecture = raw.get("model_type")
            _refuse_unsupported(raw)
            heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
            return cls(
                architecture=architecture,
                vocab_size=raw["vocab_size"],
                hidden_size=hidden,
                intermediate_size=raw["intermediate_size"],
                num_layers=raw["num_hidden_layers"],
                num_heads=heads,
                # What each architecture assumes when the file leaves a key out.
                num_kv_heads=_first(
                    raw.get("num_key_value_heads", 32 if architecture == "qwen3" else None), heads
                ),
                head_dim=_first(
                    raw.get("head_dim"), 128 if architecture == "qwen3" else hidden // heads
                ),
                max_positions=raw.get(
                    "max_position_embeddings", 32768 if architecture == "qwen3" else 2048
                ),
                norm_eps=raw.get("rms_norm_eps", 1e-6),
                rope=_rope_from_hf(raw),
                tie_embeddings=raw.get("tie_word_embeddings") or False,
                attention_bias=raw.get("attention_bias") or False,
                mlp_bias=raw.get("mlp_bias") or False,
                dtype=_dtype(_first(raw.get("dtype"), raw.get("torch_dtype"))),
            )
        except ModelError:
            raise
        except KeyError as error:
            raise ModelError(f"{error.args[0]} is missing") from None
        except MALFORMED as error:
            raise ModelError(f"a value of the wrong kind ({error})") from None

    @classmethod
    def from_file(cls, path: Path) -> ModelConfig:
        """From a `config.json`; errors name the file."""
        with reading(path):
            return cls.from_hf(read_json(path))


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
_HUGE = 1e30  # beyond it, and below its inverse, the fp32 arithmetic of rope and norms breaks down


def _expect_sizes(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if type(value) is not int or not 1 <= value < 2**31:  # True is an int too
            raise ModelError(f"{name} must be a positive integer below 2**31, got {_show(value)}")


def _expect_positive(name: str, value: object) -> None:
    if not (_is_number(value) and 1 / _HUGE < value < _HUGE):
        raise ModelError(f"{name} must be a positive finite number, got {_show(value)}")


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _show(value: object) -> str:
    """Shortened: a file may hold anything."""
    return reprlib.repr(value)


def _first(*values: Any) -> Any:
    """The first that a file gives: 0 counts, null does not."""
    return next((value for value in values if value is not None), None)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; errors name the file."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: must hold a JSON object, got {type(raw).__name__}")
    return raw


def expect_architecture(name: str, value: object) -> None:
    if value not in ARCHITECTURES:
        raise ModelError(f"{name} must be one of {', '.join(ARCHITECTURES)}, got {value!r}")


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    expect_architecture("model_type", raw.get("model_type"))
    if others := set(raw.get("layer_types") or ()) - {"full_attention"}:
        raise ModelError(f"layer_types must all be 'full_attention', got {_show(sorted(others))}")
    check_hf_keys(raw)


def _rope_from_hf(raw: Mapping[str, Any]) -> RopeConfig:
    # transformers 5 writes one dictionary; before it, theta and an optional scaling were keys of their own.
    new, old = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    if new and old and new != {**old, "rope_theta": new.get("rope_theta")}:
        raise ModelError(
            f"rope_parameters and rope_scaling must say the same, got {_show(new)} and {_show(old)}: "
            "take one out of config.json"
        )
    scaling = new or old
    if by_layer := [key for key, value in scaling.items() if isinstance(value, Mapping)]:
        raise ModelError(
            f"rope parameters must be the same for all layers, got some for {', '.join(by_layer)}"
        )
    theta = _first(scaling.get("rope_theta"), raw.get("rope_theta"), RopeConfig.theta)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ModelError(f"rope type must be one of {', '.join(ROPE_TYPES)}, got {kind!r}")
    partial = _first(scaling.get("partial_rotary_factor"), raw.get("partial_rotary_factor"), 1.0)
    if partial != 1.0:
        raise ModelError(f"partial_rotary_factor must be 1, got {_show(partial)}")
    check_rope_keys(scaling)
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, scaling["factor"])
    return RopeConfig(
        theta,
        kind,
        scaling["factor"],
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
        scaling["original_max_position_embeddings"],
    )


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    if name not in DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(DTYPES)}, got {_show(name)}")
    return getattr(torch, name)
