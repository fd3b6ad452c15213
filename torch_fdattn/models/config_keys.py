"""Every key of a model's configuration: used, harmless, or refused where its value would change the result.

A key that is passed over in silence gives fluent and wrong text. So each known key stands in one table
here, and those that nobody knows are judged by `_means_computation`: everybody writes into config.json, and
transformers passes over what its class does not name. gguf_keys.py has those of GGUF files.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from torch_fdattn.models.errors import ModelError

Values = tuple[Any, ...]
UNSET: Values = (None, False)
EMPTY: Values = (None, False, 0, "", [], {}, ())

# --- config.json

HF_USED = frozenset((
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
    "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor",
    "tie_word_embeddings", "attention_bias", "mlp_bias", "dtype",
    "torch_dtype", "eos_token_id", "layer_types", "architectures", "sliding_window",
))  # fmt: skip
HF_HARMLESS = frozenset((
    # whose it is, and who saved it
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "tokenizer_class", "auto_map",
    "unsloth_fixed", "unsloth_version", "is_llama_config", "transformers.js_config", "finetuning_task",
    "task_specific_params", "custom_pipelines", "model_name",
    # which code computes the same
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
    "attn_implementation", "_experts_implementation", "_experts_implementation_internal",
    "experts_implementation", "use_cache", "pretraining_tp", "chunk_size_feed_forward", "torchscript",
    "use_bfloat16", "tf_legacy_loss", "gradient_checkpointing",
    # training, and the form of what is returned
    "initializer_range", "attention_dropout", "hidden_dropout", "output_attentions",
    "output_hidden_states", "return_dict", "use_return_dict", "problem_type", "id2label", "label2id",
    "num_labels", "tie_last_hidden_states",
    # ids and lengths that the tokenizer's files say, and settings of drawing, which are the caller's
    "bos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id", "prefix",
    "max_sequence_length", "model_max_length", "max_length", "min_length", "do_sample", "early_stopping",
    "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p",
    "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "num_return_sequences", "output_scores", "return_dict_in_generate", "remove_invalid_values",
    "exponential_decay_length_penalty",
    "max_window_layers",  # which layers a window would be of, where a family has one
))  # fmt: skip
HF_ONLY: dict[str, tuple[Values, str]] = {  # by key: the values that are read, and how to say them
    "hidden_act": (("silu",), "'silu'"),
    "activation": (("silu", "swiglu", None), "'silu' or 'swiglu'"),
    "use_sliding_window": (UNSET, "false: this family has no sliding windows"),
    "attention_chunk_size": (UNSET, "absent: attention in chunks is unsupported"),
    "is_causal": ((True, None), "true"),
    "quantization_config": (EMPTY, "absent"),
    "quantization": (EMPTY, "absent"),
    "compression_config": (EMPTY, "absent"),
    "dim_model_base": (EMPTY, "absent: logits are not scaled"),
    "per_layer_config": (EMPTY, "absent: layers must be alike"),
    "pruned_heads": (EMPTY, "empty"),
    "is_encoder_decoder": (UNSET, "false"),
    "add_cross_attention": (UNSET, "false"),
    "cross_attention_hidden_size": (UNSET, "absent"),
    "tie_encoder_decoder": (UNSET, "false"),
    "rope_interleaved": (UNSET, "false"),
    "rope_traditional": (UNSET, "false"),
    "bad_words_ids": (EMPTY, "absent"),
    "suppress_tokens": (EMPTY, "absent"),
    "begin_suppress_tokens": (EMPTY, "absent"),
    "forced_bos_token_id": ((None,), "absent"),
    "forced_eos_token_id": ((None,), "absent"),
}
_GEMMA_USED = frozenset(
    ("query_pre_attn_scalar", "final_logit_softcapping", "sliding_window_pattern")
)
#: Keys that a family's files have besides: used there, judged by their names elsewhere.
HF_FAMILY_USED: dict[str, frozenset[str]] = {
    "qwen2": frozenset(("use_sliding_window", "max_window_layers")),
    "qwen3": frozenset(("use_sliding_window", "max_window_layers")),
    "smollm3": frozenset(("use_sliding_window", "no_rope_layers", "no_rope_layer_interval")),
    "gemma2": _GEMMA_USED | {"attn_logit_softcapping"},
    "gemma3_text": _GEMMA_USED | {"rope_local_base_freq"},
}
HF_FAMILY_HARMLESS: dict[str, frozenset[str]] = {
    "gemma2": frozenset(("cache_implementation",)),
    "gemma3_text": frozenset(
        ("cache_implementation", "_sliding_window_pattern")
    ),  # layer_types has it
}
_GELU_TANH: tuple[Values, str] = (("gelu_pytorch_tanh",), "'gelu_pytorch_tanh'")
_GEMMA_ONLY: dict[str, tuple[Values, str]] = {
    "hidden_activation": _GELU_TANH,
    "hidden_act": _GELU_TANH,  # nobody reads it there, and files that have it say the same
    "use_bidirectional_attention": (UNSET, "false"),
}
HF_FAMILY_ONLY: dict[str, dict[str, tuple[Values, str]]] = {
    "gemma2": _GEMMA_ONLY,
    "gemma3_text": {
        **_GEMMA_ONLY,
        "attn_logit_softcapping": ((None,), "absent: transformers reads it and does not apply it"),
    },
}
#: Of a base model, whose files are saved without its head.
_BASE_MODELS = (
    "LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "SmolLM3Model", "Gemma2Model", "Gemma3TextModel",
)  # fmt: skip
ROPE_USED = frozenset((
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor",
    "high_freq_factor", "original_max_position_embeddings",
))  # fmt: skip
ROPE_HARMLESS = frozenset(("finetuned",))
ROPE_ONLY: dict[str, tuple[Values, str]] = {
    "attention_factor": ((1, None), "1: logits are not scaled"),
    "mscale": ((None,), "absent"),
}
# Words of a key that say that it changes the computation, unlike dropout or the choice of a kernel.
_COMPUTATION = frozenset((
    "rope", "rotary", "attn", "attention", "norm", "layernorm", "rmsnorm", "ln", "qk", "qkv", "window", "sliding",
    "mask", "causal", "bidirectional", "bias", "expert", "experts", "moe", "router", "act", "activation", "scale",
    "scaling", "multiplier", "logit", "logits", "softcap", "softcapping", "cap", "clip", "clamp", "limit", "alibi",
    "position", "positions", "positional", "residual", "mlp", "ffn", "head", "heads", "layer", "layers", "mup",
    "lora", "adapter", "adapters", "quant", "quantization", "bits", "conv", "gate", "gated", "sink", "sinks",
    "sparse", "sparsity", "parallel", "normalize", "normalise", "normalized", "normalization", "softmax",
    "temperature", "ntk", "offset", "prefix", "swiglu", "kv",
))  # fmt: skip
#: Of a key whose value 1 changes nothing.
_FACTORS = frozenset(("scaling", "scale", "multiplier", "factor", "penalty"))
#: Words of a key that is of training alone; and of one that chooses a kernel, which says no more than that there is
#: attention.
_OF_TRAINING = frozenset(("dropout", "pdrop", "loss", "init", "initializer", "initialization"))
_OF_A_KERNEL = frozenset(("flash", "sdpa", "kernel", "impl", "implementation", "backend"))
_ATTENTION = frozenset(("attn", "attention"))

# --- generation_config.json: of it only the end tokens are read; how to draw is the caller's to say.

GENERATION_USED = frozenset(("eos_token_id",))
#: How to draw, where a call says nothing: the caller's to say.
GENERATION_HARMLESS = frozenset((
    "repetition_penalty", "encoder_repetition_penalty", "diversity_penalty", "length_penalty",
    "exponential_decay_length_penalty",
))  # fmt: skip
#: Words of a key that changes which tokens may be drawn.
_OF_DRAWING = frozenset((
    "suppress", "bad", "force", "forced", "bias", "mask", "constraint", "constraints", "healing", "watermark",
    "watermarking", "penalty", "banned", "allowed",
))  # fmt: skip
GENERATION_ONLY: dict[str, tuple[Values, str]] = {
    **{
        key: (EMPTY, "absent: it changes which tokens may be drawn, and is not applied")
        for key in (
            "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids", "constraints",
            "sequence_bias", "stop_strings", "watermarking_config", "dola_layers",
        )
    },
    "forced_bos_token_id": ((None,), "absent"),
    "forced_eos_token_id": ((None,), "absent"),
    "forced_decoder_ids": (EMPTY, "absent"),
    "token_healing": (UNSET, "false"),
    "guidance_scale": ((None, 1), "1 or absent"),
}  # fmt: skip

# --- tokenizer_config.json: tokenizer.json and tokenizer.model say what a tokenizer does, this file seldom.

SETTINGS_USED = frozenset((
    "add_bos_token", "add_eos_token", "added_tokens_decoder", "additional_special_tokens", "chat_template",
    "extra_special_tokens", "model_specific_special_tokens", "tokenizer_class",
))  # fmt: skip
SETTINGS_HARMLESS = frozenset((
    "add_prefix_space", "clean_up_tokenization_spaces", "do_lower_case", "fix_mistral_regex", "from_slow", "is_fast",
    "legacy", "normalization", "pad_to_multiple_of", "special_tokens_map_file", "spaces_between_special_tokens",
    "split_by_whitespace", "truncation", "truncation_side", "use_default_system_prompt",
))  # fmt: skip
SETTINGS_ONLY: dict[str, tuple[Values, str]] = {
    "split_special_tokens": (UNSET, "false: special tokens in a text are those tokens"),
}
#: Words of a key that changes how text is cut.
_OF_CUTTING = frozenset(("split", "lowercase", "normalize", "normalizer", "regex", "strip", "pre"))


def check_hf_keys(raw: Mapping[str, Any]) -> None:
    """Refuses a config.json by the first key whose value would change the result."""
    kind = raw.get("model_type")
    used = HF_USED | HF_FAMILY_USED.get(kind, frozenset())
    harmless = HF_HARMLESS | HF_FAMILY_HARMLESS.get(kind, frozenset())
    only = {**HF_ONLY, **HF_FAMILY_ONLY.get(kind, {})}
    check_values(raw, {key: value for key, value in only.items() if key not in used})
    if kind == "llama" and raw.get("use_sliding_window") is None:
        check_values(raw, {"sliding_window": (EMPTY, "absent: this family has no sliding windows")})
    names = raw.get("architectures") or ()
    if names and not any(
        str(name).endswith("ForCausalLM") or name in _BASE_MODELS for name in names
    ):
        raise ModelError(
            f"architectures must name a …ForCausalLM, got {reprlib.repr(names)}: another head or mask "
            "than a language model's"
        )
    for key in unknown_keys(raw, used, harmless, only):
        # Not to be causal is no default.
        defaults = (None,) if "causal" in _parts(key) else EMPTY
        if _parts(key) & _FACTORS and _is_factor_of_one(raw[key]):
            continue
        if key == "original_max_position_embeddings" and not _has_rope_scaling(raw):
            continue  # says how scaled positions were trained
        if _means_computation(key) and not is_one_of(raw[key], defaults):
            raise ModelError(
                f"{key} must be absent, since no {kind} model has it and its name says that it changes "
                f"what is computed, got {reprlib.repr(raw[key])}: take it out of config.json if it does not"
            )


def _has_rope_scaling(raw: Mapping[str, Any]) -> bool:
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return (
        isinstance(given, Mapping)
        and given.get("rope_type", given.get("type", "default")) != "default"
    )


def check_rope_keys(scaling: Mapping[str, Any]) -> None:
    check_values(scaling, ROPE_ONLY, "rope ")
    for key in unknown_keys(scaling, ROPE_USED, ROPE_HARMLESS, ROPE_ONLY):
        if not is_one_of(scaling[key], EMPTY):
            raise ModelError(
                f"rope {key} must be absent, since no rope that is read here has it, got "
                f"{reprlib.repr(scaling[key])}"
            )


def check_generation_keys(raw: Mapping[str, Any]) -> None:
    check_values(raw, GENERATION_ONLY)
    unknown = unknown_keys(raw, GENERATION_USED, GENERATION_HARMLESS, GENERATION_ONLY)
    _refuse_by_name(
        raw, unknown, _OF_DRAWING, "generation_config.json", "which tokens may be drawn"
    )


def check_tokenizer_settings(raw: Mapping[str, Any]) -> None:
    """Refuses a tokenizer_config.json by the first key whose value would change ids."""
    check_values(raw, SETTINGS_ONLY)
    unknown = unknown_keys(raw, SETTINGS_USED, SETTINGS_HARMLESS, SETTINGS_ONLY)
    _refuse_by_name(raw, unknown, _OF_CUTTING, "tokenizer_config.json", "how text is cut")


def _refuse_by_name(
    raw: Mapping[str, Any], keys: Iterable[str], told_by: frozenset[str], file: str, what: str
) -> None:
    for key in keys:
        neutral = is_one_of(raw[key], EMPTY) or (
            _parts(key) & _FACTORS and _is_factor_of_one(raw[key])
        )
        if _parts(key) & told_by and not neutral:
            raise ModelError(
                f"{key} must be absent from {file}, since its name says that it changes {what}, which is not applied, "
                f"got {reprlib.repr(raw[key])}: take it out if it does not"
            )


def _is_factor_of_one(value: Any) -> bool:
    """A switch that is on is none."""
    return value == 1 and not isinstance(value, bool | str)


def check_values(
    raw: Mapping[str, Any], table: Mapping[str, tuple[Values, str]], prefix: str = ""
) -> None:
    for key, (values, expected) in table.items():
        if key in raw and not is_one_of(raw[key], values):
            raise ModelError(f"{prefix}{key} must be {expected}, got {reprlib.repr(raw[key])}")


def is_one_of(value: Any, values: Values) -> bool:
    return any(value == one and isinstance(value, str) == isinstance(one, str) for one in values)


def unknown_keys(raw: Iterable[str], *tables: Iterable[str]) -> list[str]:
    known = {key for table in tables for key in table}
    return [key for key in raw if key not in known]


def _parts(key: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", key.lower()))


def _means_computation(key: str) -> bool:
    parts = _parts(key)
    found = parts & _COMPUTATION - (_ATTENTION if parts & _OF_A_KERNEL else frozenset())
    return bool(found) and not parts & _OF_TRAINING
