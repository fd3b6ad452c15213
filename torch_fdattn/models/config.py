"""The shape of a dense decoder of one of the families in families.py.

Limits: rope over the whole head with `default`, `linear` or `llama3` scaling. Sizes that cannot be are a
ModelError. hf_config.py reads a `config.json`, gguf.py a GGUF file's metadata, named_configs.py has shapes by
name.
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
from torch_fdattn.dist.kv_cache.mask_options import MaskOptions
from torch_fdattn.models.errors import ModelError, reading
from torch_fdattn.models.families import ARCHITECTURES, FAMILIES, Family
from torch_fdattn.models.files import read_file


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base `theta` and what is done to its frequencies (see rope.py).

    Examples:
        >>> torch_fdattn.models.RopeConfig(theta=500000.0, kind="linear", factor=4.0).factor
        4.0
    """

    theta: float = 10000.0
    kind: str = "default"  # "linear", "llama3", "divisors"; "none": the layer has no positions
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
class LayerConfig:
    """What one layer has of its own.

    Args:
        window: how many tokens a query sees, itself included; None: all before it.
        rope: its rotary embedding; of kind "none" for a layer without positions.

    Examples:
        >>> from torch_fdattn.models.config import LayerConfig
        >>> LayerConfig(4096, torch_fdattn.models.RopeConfig(kind="none")).window
        4096
    """

    window: int | None
    rope: RopeConfig

    def __post_init__(self) -> None:
        if self.window is not None:
            _expect_sizes(self, "window")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model; sizes that cannot be are a `ModelError`.

    Args:
        architecture: one of `torch_fdattn.models.families.FAMILIES`, named as Hugging Face's `model_type`.
        rope: of all layers, where `layers` is empty.
        attention_bias: of q, k, v and the output; a family whose q, k and v alone have biases has them without it.
        layers: for each layer its window and its rotary embedding; empty: all are alike, without a window.
        softcap: of attention's scores, as `torch_fdattn.attention`; 0: none.
        logit_softcap: of the logits: ``cap · tanh(logits / cap)``; 0: none.
        attention_scale: of attention's scores; None: head_dim ** -0.5.
        dtype: of the checkpoint, where it says so.

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
    dtype: torch.dtype | None = None
    layers: tuple[LayerConfig, ...] = ()
    softcap: float = 0.0
    logit_softcap: float = 0.0
    attention_scale: float | None = None

    def __post_init__(self) -> None:
        expect_architecture("architecture", self.architecture)
        _expect_sizes(self, *_SIZES)
        expect_layer_count(self.num_layers)
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
        if self.layers and len(self.layers) != self.num_layers:
            raise ModelError(
                f"layers must have an entry for each of the {self.num_layers} layers, got {len(self.layers)}"
            )
        for name in ("softcap", "logit_softcap"):
            if not (_is_number(value := getattr(self, name)) and 0 <= value < _HUGE):
                raise ModelError(f"{name} must be finite and at least 0, got {_show(value)}")
        if self.attention_scale is not None:
            _expect_positive("attention_scale", self.attention_scale)

    @property
    def family(self) -> Family:
        """What its architecture computes otherwise than Llama."""
        return FAMILIES[self.architecture]

    @property
    def qk_norm(self) -> bool:
        """Whether every query and key head is RMS-normalised before the rotation."""
        return self.family.qk_norm

    def layer(self, index: int) -> LayerConfig:
        """What layer `index`, from 0, has of its own."""
        return self.layers[index] if self.layers else LayerConfig(None, self.rope)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The different rotary embeddings of its layers."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers)) or (self.rope,)

    @property
    def rope_indices(self) -> tuple[int, ...]:
        """Of each layer, which of `ropes` it has."""
        place = {rope: i for i, rope in enumerate(self.ropes)}
        return tuple(place[self.layer(i).rope] for i in range(self.num_layers))

    def mask_options(self, index: int) -> MaskOptions:
        """How layer `index` attends.

        Examples:
            >>> config = torch_fdattn.models.named_config("gemma-2-9b")
            >>> config.mask_options(0)
            MaskOptions(window_left=4095, softcap=50.0, scale=0.0625)
            >>> config.mask_options(1).window_left
            -1
        """
        window = self.layer(index).window
        return MaskOptions(
            -1 if window is None else window - 1, self.softcap, self.attention_scale
        )  # fmt: skip

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """From the contents of a `config.json`."""
        from torch_fdattn.models.hf_config import config_from_hf

        return config_from_hf(raw)

    @classmethod
    def from_file(cls, path: Path) -> ModelConfig:
        """From a `config.json`; errors name the file."""
        with reading(path):
            return cls.from_hf(read_json(path))


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_positions",
)
_HUGE = 1e30  # beyond it, and below its inverse, the fp32 arithmetic of rope and norms breaks down


#: A file may say any number: lists of layers are made of it.
_MAX_LAYERS = 2**16


def expect_layer_count(value: object) -> None:
    if type(value) is not int or not 1 <= value < _MAX_LAYERS:
        raise ModelError(
            f"num_layers must be a positive integer below {_MAX_LAYERS}, got {_show(value)}"
        )


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


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; errors name the file."""
    try:
        raw = json.loads(read_file(path).decode("utf-8"))
    except ModelError:  # a ValueError too
        raise
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: must hold a JSON object, got {type(raw).__name__}")
    return raw


def expect_architecture(name: str, value: object) -> None:
    if value not in ARCHITECTURES:
        raise ModelError(f"{name} must be one of {', '.join(ARCHITECTURES)}, got {value!r}")
