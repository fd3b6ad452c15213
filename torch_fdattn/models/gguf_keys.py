"""Every key of a GGUF file's metadata: used, harmless, or refused where its value would change the result.

As config_keys.py; but these keys are llama.cpp's, so that one that nobody knows is refused.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from torch_fdattn.models.config_keys import (
    EMPTY,
    UNSET,
    Values,
    check_values,
    is_one_of,
    unknown_keys,
)
from torch_fdattn.models.errors import ModelError

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
#: By architecture, what its files have besides.
GGUF_FAMILY_USED: dict[str, frozenset[str]] = {
    "gemma2": frozenset((
        "attention.sliding_window", "attention.sliding_window_pattern", "attn_logit_softcapping",
        "final_logit_softcapping",
    )),
    "gemma3": frozenset((
        "attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa",
        "final_logit_softcapping",
    )),
}  # fmt: skip
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
    "add_sep_token": (UNSET, "false"),
    "precompiled_charsmap": (EMPTY, "empty"),
    "suppress_tokens": (EMPTY, "empty"),
    "escape_whitespaces": ((True,), "true"),
    "treat_whitespace_as_suffix": (UNSET, "false"),
    "normalizer.lowercase": (UNSET, "false"),
    "normalizer.strip_accents": (UNSET, "false"),
}


def check_gguf_keys(architecture: str, fields: Mapping[str, Any]) -> None:
    """Refuses a GGUF file by the first key of its model whose value would change the result."""
    check_values(fields, {"general.type": (("model",), "'model' or absent")})
    prefix = f"{architecture}."
    own = {
        key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)
    }
    used = GGUF_USED | GGUF_FAMILY_USED.get(architecture, frozenset())
    only = {key: value for key, value in GGUF_ONLY.items() if key not in used}
    check_values(own, only, prefix)
    unknown = [prefix + key for key in unknown_keys(own, used, GGUF_HARMLESS, only)]
    # Without the architecture before them they belong to no model, and are not general either.
    unknown += [key for key in fields if key.startswith(("rope.", "attention."))]
    _refuse_unknown(unknown, fields)


def check_gguf_tokenizer_keys(fields: Mapping[str, Any]) -> None:
    prefix = "tokenizer.ggml."
    own = {
        key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)
    }
    check_values(own, TOKENIZER_ONLY, prefix)
    _refuse_unknown(
        [
            prefix + key
            for key in unknown_keys(own, TOKENIZER_USED, TOKENIZER_HARMLESS, TOKENIZER_ONLY)
            if not (key.endswith("_token_id") or is_one_of(own[key], EMPTY))
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
