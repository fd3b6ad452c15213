"""Every key of a model's configuration: used, harmless, or refused where its value would change the result.

A key that is passed over in silence gives fluent and wrong text. So each known key stands in one table
here, and those that nobody knows are judged by `_means_computation` (config.json, which everybody writes
into: transformers passes over what its class does not name) or refused (GGUF, whose keys are llama.cpp's).
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from torch_fdattn.models.errors import ModelError

Values = tuple[Any, ...]
_UNSET: Values = (None, False)
_EMPTY: Values = (None, False, 0, "", [], {}, ())

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
    "max_window_layers",  # which layers a window would be of: there is none
))  # fmt: skip
HF_ONLY: dict[str, tuple[Values, str]] = {  # by key: the values that are read, and how to say them
    "hidden_act": (("silu",), "'silu'"),
    "activation": (("silu", "swiglu", None), "'silu' or 'swiglu'"),
    "use_sliding_window": (_UNSET, "false: sliding-window layers are unsupported"),
    "attention_chunk_size": (_UNSET, "absent: attention in chunks is unsupported"),
    "is_causal": ((True, None), "true"),
    "quantization_config": (_EMPTY, "absent"),
    "quantization": (_EMPTY, "absent"),
    "compression_config": (_EMPTY, "absent"),
    "dim_model_base": (_EMPTY, "absent: logits are not scaled"),
    "per_layer_config": (_EMPTY, "absent: layers must be alike"),
    "pruned_heads": (_EMPTY, "empty"),
    "is_encoder_decoder": (_UNSET, "false"),
    "add_cross_attention": (_UNSET, "false"),
    "cross_attention_hidden_size": (_UNSET, "absent"),
    "tie_encoder_decoder": (_UNSET, "false"),
    "rope_interleaved": (_UNSET, "false"),
    "rope_traditional": (_UNSET, "false"),
    "bad_words_ids": (_EMPTY, "absent"),
    "suppress_tokens": (_EMPTY, "absent"),
    "begin_suppress_tokens": (_EMPTY, "absent"),
    "forced_bos_token_id": ((None,), "absent"),
    "forced_eos_token_id": ((None,), "absent"),
}
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
        key: (_EMPTY, "absent: it changes which tokens may be drawn, and is not applied")
        for key in (
            "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids", "constraints",
            "sequence_bias", "stop_strings", "watermarking_config", "dola_layers",
        )
    },
    "forced_bos_token_id": ((None,), "absent"),
    "forced_eos_token_id": ((None,), "absent"),
    "forced_decoder_ids": (_EMPTY, "absent"),
    "token_healing": (_UNSET, "false"),
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
    "split_special_tokens": (_UNSET, "false: special tokens in a text are those tokens"),
}
#: Words of a key that changes how text is cut.
_OF_CUTTING = frozenset(("split", "lowercase", "normalize", "normalizer", "regex", "strip", "pre"))

# --- GGUF, behind `<architecture>.`

GGUF_USED = frozenset((
    "block_count", "context_length", "embedding_length", "feed_forward_length", "expert_count",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base", "rope.scale_linear",
    "rope.scaling.type", "rope.scaling.factor",
))  # fmt: skip
GGUF_HARMLESS = frozenset((
    "vocab_size",  # the embedding has as many rows
    "expert_used_count",  # of no experts
    "pooling_type",  # of embeddings of texts
    "rope.scaling.finetuned", "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",  # of YaRN alone, which is refused
))  # fmt: skip
_NOTHING: tuple[Values, str] = ((0,), "0 or absent")
_FACTOR: tuple[Values, str] = ((0, 1), "1 or absent")
GGUF_ONLY: dict[str, tuple[Values, str]] = {
    "attention.causal": ((True,), "true or absent"),
    "attention.scale": _NOTHING,
    "attention.output_scale": _FACTOR,
    "attention.sliding_window": _NOTHING,
    "attention.max_alibi_bias": _NOTHING,
    "attention.clamp_kqv": _NOTHING,
    "attention.shared_kv_layers": _NOTHING,
    "logit_scale": _FACTOR,
    "residual_scale": _FACTOR,
    "embedding_scale": _FACTOR,
    "attn_logit_softcapping": _NOTHING,
    "final_logit_softcapping": _NOTHING,
    "use_parallel_residual": _NOTHING,
    "swin_norm": _NOTHING,
    "leading_dense_block_count": _NOTHING,
    "expert_shared_count": _NOTHING,
    "nextn_predict_layers": _NOTHING,
    "tensor_data_layout": (("Meta AI original pth",), "'Meta AI original pth' or absent"),
    "rope.scaling.attn_factor": ((1,), "1 or absent: logits are not scaled"),
    "rope.scaling.alpha": _NOTHING,
    "rope.scaling.yarn_log_multiplier": _NOTHING,
    "rope.scaling.yarn_ext_factor": ((0, -1), "0, -1 or absent"),
    "rope.scaling.yarn_attn_factor": ((1, -1), "1, -1 or absent"),
}

# --- GGUF, behind `tokenizer.ggml.`

TOKENIZER_USED = frozenset((
    "model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eos_token_id",
    "eot_token_id", "eom_token_id", "eos_token_ids", "unknown_token_id", "seperator_token_id",
    "padding_token_id", "mask_token_id", "add_bos_token", "add_eos_token", "add_space_prefix",
    "remove_extra_whitespaces",
))  # fmt: skip
TOKENIZER_HARMLESS = frozenset((
    "token_type_count", "cls_token_id", "prefix_token_id", "suffix_token_id", "middle_token_id",
    *(f"fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")),
    "add_padding_token", "add_unknown_token", "add_mask_token",  # ollama's: of no effect there either
))  # fmt: skip
TOKENIZER_ONLY: dict[str, tuple[Values, str]] = {
    "add_sep_token": (_UNSET, "false"),
    "precompiled_charsmap": (_EMPTY, "empty"),
    "suppress_tokens": (_EMPTY, "empty"),
    "escape_whitespaces": ((True,), "true"),
    "treat_whitespace_as_suffix": (_UNSET, "false"),
    "normalizer.lowercase": (_UNSET, "false"),
    "normalizer.strip_accents": (_UNSET, "false"),
}


def check_hf_keys(raw: Mapping[str, Any]) -> None:
    """Refuses a config.json by the first key whose value would change the result."""
    _check_values(raw, HF_ONLY)
    kind = raw.get("model_type")
    if raw.get("use_sliding_window", None if kind == "llama" else False) is None:
        _check_values(raw, {"sliding_window": (_EMPTY, "absent: sliding windows are unsupported")})
    names = raw.get("architectures") or ()
    if names and not any(
        str(name).endswith("ForCausalLM") or name in ("LlamaModel", "Qwen3Model") for name in names
    ):
        raise ModelError(
            f"architectures must name a …ForCausalLM, got {reprlib.repr(names)}: another head or mask "
            "than a language model's"
        )
    for key in _unknown(raw, HF_USED, HF_HARMLESS, HF_ONLY):
        # Not to be causal is no default.
        defaults = (None,) if "causal" in _parts(key) else _EMPTY
        if _parts(key) & _FACTORS and _is_factor_of_one(raw[key]):
            continue
        if key == "original_max_position_embeddings" and not _has_rope_scaling(raw):
            continue  # says how scaled positions were trained
        if _means_computation(key) and not _is_one_of(raw[key], defaults):
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
    _check_values(scaling, ROPE_ONLY, "rope ")
    for key in _unknown(scaling, ROPE_USED, ROPE_HARMLESS, ROPE_ONLY):
        if not _is_one_of(scaling[key], _EMPTY):
            raise ModelError(
                f"rope {key} must be absent, since no rope that is read here has it, got "
                f"{reprlib.repr(scaling[key])}"
            )


def check_generation_keys(raw: Mapping[str, Any]) -> None:
    _check_values(raw, GENERATION_ONLY)
    unknown = _unknown(raw, GENERATION_USED, GENERATION_HARMLESS, GENERATION_ONLY)
    _refuse_by_name(
        raw, unknown, _OF_DRAWING, "generation_config.json", "which tokens may be drawn"
    )


def check_tokenizer_settings(raw: Mapping[str, Any]) -> None:
    """Refuses a tokenizer_config.json by the first key whose value would change ids."""
    _check_values(raw, SETTINGS_ONLY)
    unknown = _unknown(raw, SETTINGS_USED, SETTINGS_HARMLESS, SETTINGS_ONLY)
    _refuse_by_name(raw, unknown, _OF_CUTTING, "tokenizer_config.json", "how text is cut")


def _refuse_by_name(
    raw: Mapping[str, Any], keys: Iterable[str], told_by: frozenset[str], file: str, what: str
) -> None:
    for key in keys:
        neutral = _is_one_of(raw[key], _EMPTY) or (
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


def check_gguf_keys(architecture: str, fields: Mapping[str, Any]) -> None:
    """Refuses a GGUF file by the first key of its model whose value would change the result."""
    _check_values(fields, {"general.type": (("model",), "'model' or absent")})
    prefix = f"{architecture}."
    own = {
        key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)
    }
    _check_values(own, GGUF_ONLY, prefix)
    unknown = [prefix + key for key in _unknown(own, GGUF_USED, GGUF_HARMLESS, GGUF_ONLY)]
    # Without the architecture before them they belong to no model, and are not general either.
    unknown += [key for key in fields if key.startswith(("rope.", "attention."))]
    _refuse_unknown(unknown, fields)


def check_gguf_tokenizer_keys(fields: Mapping[str, Any]) -> None:
    prefix = "tokenizer.ggml."
    own = {
        key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)
    }
    _check_values(own, TOKENIZER_ONLY, prefix)
    _refuse_unknown(
        [
            prefix + key
            for key in _unknown(own, TOKENIZER_USED, TOKENIZER_HARMLESS, TOKENIZER_ONLY)
            if not (key.endswith("_token_id") or _is_one_of(own[key], _EMPTY))
        ],
        fields,
    )


def _refuse_unknown(keys: Iterable[str], fields: Mapping[str, Any]) -> None:
    for key in keys:
        raise ModelError(
            f"metadata field {key} must be absent, since nobody here knows what it changes, got "
            f"{reprlib.repr(fields[key])}: take it out with gguf-new-metadata --remove-metadata {key} if "
            "the model does not need it"
        )


def _check_values(
    raw: Mapping[str, Any], table: Mapping[str, tuple[Values, str]], prefix: str = ""
) -> None:
    for key, (values, expected) in table.items():
        if key in raw and not _is_one_of(raw[key], values):
            raise ModelError(f"{prefix}{key} must be {expected}, got {reprlib.repr(raw[key])}")


def _is_one_of(value: Any, values: Values) -> bool:
    return any(value == one and isinstance(value, str) == isinstance(one, str) for one in values)


def _unknown(raw: Iterable[str], *tables: Iterable[str]) -> list[str]:
    known = {key for table in tables for key in table}
    return [key for key in raw if key not in known]


def _parts(key: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", key.lower()))


def _means_computation(key: str) -> bool:
    parts = _parts(key)
    found = parts & _COMPUTATION - (_ATTENTION if parts & _OF_A_KERNEL else frozenset())
    return bool(found) and not parts & _OF_TRAINING
