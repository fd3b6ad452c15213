"""From the contents of a Hugging Face `config.json` to a `ModelConfig`.

Rope is read in the old form (`rope_theta`, `rope_scaling`, Gemma 3's `rope_local_base_freq`) and in transformers 5's
`rope_parameters`. What is not read is a ModelError: a model that is read wrongly still writes fluent text
(config_keys.py judges every key). A key that a file leaves out stands for what transformers takes for it
(families.py).
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import torch

from torch_fdattn.models.config import (
    LayerConfig,
    ModelConfig,
    RopeConfig,
    expect_architecture,
    expect_layer_count,
)
from torch_fdattn.models.config_keys import check_hf_keys, check_rope_keys
from torch_fdattn.models.errors import MALFORMED, ModelError
from torch_fdattn.models.families import FAMILIES, LLAMA_DEFAULTS

ROPE_TYPES = ("default", "linear", "llama3")
DTYPES = ("bfloat16", "float16", "float32", "float64")
_FULL, _SLIDING = "full_attention", "sliding_attention"
_NOPE = RopeConfig(kind="none")


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """`ModelConfig.from_hf`."""
    try:
        return _Reader(_text_of_gemma3(raw) if raw.get("model_type") == "gemma3" else raw).config()
    except ModelError:
        raise
    except KeyError as error:
        raise ModelError(f"{error.args[0]} is missing") from None
    except MALFORMED as error:
        raise ModelError(f"a value of the wrong kind ({error})") from None


class _Reader:
    def __init__(self, raw: Mapping[str, Any]) -> None:
        expect_architecture("model_type", raw.get("model_type"))
        self.raw, self.kind = raw, raw["model_type"]
        self.defaults = {**LLAMA_DEFAULTS, **FAMILIES[self.kind].defaults}
        _expect_layer_types(raw, self.kind)
        check_hf_keys(raw)

    def get(self, key: str) -> Any:
        """The file's value, which may be null, or what the family takes where the key is left out."""
        return self.raw.get(key, self.defaults.get(key))

    def config(self) -> ModelConfig:
        raw = self.raw
        heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
        rope, local_rope = self.ropes()
        return ModelConfig(
            architecture=self.kind,
            vocab_size=raw["vocab_size"],
            hidden_size=hidden,
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=_first(self.get("num_key_value_heads"), heads),
            head_dim=_first(raw.get("head_dim"), self.defaults.get("head_dim"), hidden // heads),
            max_positions=self.get("max_position_embeddings"),
            norm_eps=self.get("rms_norm_eps"),
            rope=rope,
            tie_embeddings=self.get("tie_word_embeddings") or False,
            attention_bias=raw.get("attention_bias") or False,
            mlp_bias=raw.get("mlp_bias") or False,
            dtype=_dtype(_first(raw.get("dtype"), raw.get("torch_dtype"))),
            layers=self.layers(rope, local_rope),
            softcap=self.get("attn_logit_softcapping") or 0.0,
            logit_softcap=self.get("final_logit_softcapping") or 0.0,
            attention_scale=self.attention_scale(),
        )

    def attention_scale(self) -> float | None:
        scalar = self.get("query_pre_attn_scalar")
        if scalar is None and "query_pre_attn_scalar" not in self.defaults:
            return None
        if type(scalar) not in (int, float) or not 0 < scalar < 2**31:
            raise ModelError(
                f"query_pre_attn_scalar must be a positive number, got {reprlib.repr(scalar)}"
            )
        return scalar**-0.5

    def ropes(self) -> tuple[RopeConfig, RopeConfig]:
        """Of the layers that see everything, and of those with a window."""
        new, old = self.raw.get("rope_parameters") or {}, self.raw.get("rope_scaling") or {}
        if self.kind == "gemma3_text":
            return self.ropes_by_layer_type(new, old)
        # transformers 5 writes one dictionary; before it, theta and an optional scaling were keys of their own.
        if new and old and new != {**old, "rope_theta": new.get("rope_theta")}:
            raise _two_ropes(new, old)
        scaling = new or old
        if by_layer := [key for key, value in scaling.items() if isinstance(value, Mapping)]:
            raise ModelError(
                f"rope parameters must be the same for all layers, got some for {', '.join(by_layer)}"
            )
        rope = self.rope(scaling, "rope_theta")
        return rope, rope

    def ropes_by_layer_type(self, new: Mapping, old: Mapping) -> tuple[RopeConfig, RopeConfig]:
        if new and old:
            raise _two_ropes(new, old)
        if others := set(new) - {_FULL, _SLIDING}:
            raise ModelError(
                f"rope_parameters must have {_FULL} and {_SLIDING} alone, got {reprlib.repr(sorted(others))}"
            )
        full = old or new.get(_FULL) or {}
        return self.rope(full, "rope_theta"), self.rope(
            new.get(_SLIDING) or {}, "rope_local_base_freq"
        )

    def rope(self, scaling: Mapping[str, Any], theta_key: str) -> RopeConfig:
        theta = _first(
            scaling.get("rope_theta"), self.raw.get(theta_key), self.defaults[theta_key]
        )  # fmt: skip
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind not in ROPE_TYPES:
            raise ModelError(f"rope type must be one of {', '.join(ROPE_TYPES)}, got {kind!r}")
        partial = _first(
            scaling.get("partial_rotary_factor"), self.raw.get("partial_rotary_factor"), 1.0
        )
        if partial != 1.0:
            raise ModelError(f"partial_rotary_factor must be 1, got {reprlib.repr(partial)}")
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

    def layers(self, rope: RopeConfig, local_rope: RopeConfig) -> tuple[LayerConfig, ...]:
        """`ModelConfig.layers`: empty where all layers see everything, by one rope."""
        expect_layer_count(count := self.raw["num_hidden_layers"])
        rotated = self.rotated_layers(count)
        types = self.layer_types(count, rotated)
        window = self.window()
        if window is None and _SLIDING in types:
            raise ModelError(
                f"sliding_window must be a positive integer where layer_types has {_SLIDING}, got "
                f"{reprlib.repr(self.get('sliding_window'))}"
            )
        full, sliding = LayerConfig(None, rope), LayerConfig(window, local_rope)
        made = tuple(
            layer if turns else LayerConfig(layer.window, _NOPE)
            for layer, turns in zip(
                (sliding if kind == _SLIDING else full for kind in types), rotated, strict=True
            )
        )
        return () if set(made) == {full} else made

    def window(self) -> int | None:
        """How many tokens the layers with a window see; None: there is none."""
        if self.kind == "llama":
            return None
        switch = self.kind in ("qwen2", "qwen3", "smollm3")
        if switch and not self.raw.get("use_sliding_window"):
            return None
        return self.get("sliding_window")

    def layer_types(self, count: int, rotated: tuple[bool, ...]) -> tuple[str, ...]:
        """Of each layer whether it sees everything or a window."""
        if self.kind in ("llama", "mistral"):
            return (_FULL if self.window() is None else _SLIDING,) * count
        given = self.raw.get("layer_types")
        if given is not None:
            if len(given) != count:
                raise ModelError(
                    f"layer_types must have {count} entries like num_hidden_layers, got {len(given)}"
                )
            return tuple(given)
        if self.kind.startswith("gemma"):
            period = self.get("sliding_window_pattern")
            if type(period) is not int or period < 1:
                raise ModelError(
                    f"sliding_window_pattern must be a positive integer, got {reprlib.repr(period)}"
                )
            return tuple(_SLIDING if (i + 1) % period else _FULL for i in range(count))
        if self.window() is None:
            return (_FULL,) * count
        if self.kind == "smollm3":
            return tuple(_FULL if turns else _SLIDING for turns in rotated)
        first = self.get("max_window_layers")
        return tuple(_SLIDING if i >= first else _FULL for i in range(count))

    def rotated_layers(self, count: int) -> tuple[bool, ...]:
        """Which layers rotate q and k by their positions: SmolLM3 leaves some without."""
        if self.kind != "smollm3":
            return (True,) * count
        given = self.raw.get("no_rope_layers")  # 1: it rotates, whatever the key is called
        if given is None:
            period = self.get("no_rope_layer_interval")
            return tuple((i + 1) % period != 0 for i in range(count))
        if len(given) < count or any(x not in (0, 1) for x in given):
            raise ModelError(
                f"no_rope_layers must have a 0 or 1 for each of {count} layers, got {reprlib.repr(given)}"
            )
        return tuple(bool(x) for x in given[:count])


#: Of a Gemma 3 that takes images: what is not of its text model, and what its text model's file may leave out.
_OF_IMAGES = frozenset((
    "text_config", "vision_config", "boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image",
    "boi_token_id", "eoi_token_id", "image_token_id",
))  # fmt: skip
_GEMMA3_SIZES = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8,
}  # fmt: skip


def _text_of_gemma3(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the text model within one that takes images: text alone gives the same there."""
    text = raw["text_config"]
    if text.get("model_type") != "gemma3_text":
        raise ModelError(
            f"text_config must have model_type gemma3_text, got {reprlib.repr(text.get('model_type'))}"
        )
    if raw.get("architectures") not in (None, ["Gemma3ForConditionalGeneration"]):
        raise ModelError(
            "architectures must be ['Gemma3ForConditionalGeneration'] or absent, got "
            f"{reprlib.repr(raw['architectures'])}"
        )
    around = {key: value for key, value in raw.items() if key not in _OF_IMAGES}
    tied = "tie_word_embeddings"
    if tied in around and text.get(tied, around[tied]) != around[tied]:
        raise ModelError(f"{tied} must be the same in text_config, got {reprlib.repr(text[tied])}")
    return {**_GEMMA3_SIZES, **around, **text, "architectures": ["Gemma3ForCausalLM"]}


def _expect_layer_types(raw: Mapping[str, Any], kind: str) -> None:
    """Kinds that there are, and for families without a kind by layer the one that they have."""
    allowed = (_FULL, _SLIDING)
    if kind == "llama":
        allowed = (_FULL,)
    if kind == "mistral":
        window = raw.get("sliding_window", FAMILIES[kind].defaults["sliding_window"])
        allowed = (_FULL,) if window is None else (_SLIDING,)
    if others := set(raw.get("layer_types") or ()) - set(allowed):
        told = f"all be {allowed[0]!r}" if len(allowed) == 1 else f"be {' or '.join(allowed)}"
        raise ModelError(f"layer_types must {told}, got {reprlib.repr(sorted(others, key=str))}")


def _two_ropes(new: object, old: object) -> ModelError:
    return ModelError(
        f"rope_parameters and rope_scaling must say the same, got {reprlib.repr(new)} and {reprlib.repr(old)}: "
        "take one out of config.json"
    )


def _first(*values: Any) -> Any:
    """The first that a file gives: 0 counts, null does not."""
    return next((value for value in values if value is not None), None)


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    if name not in DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(DTYPES)}, got {reprlib.repr(name)}")
    return getattr(torch, name)
