"""Small random models of any class of transformers', by shrinking the numbers of its default configuration."""

from __future__ import annotations

import copy
import re

import torch
import transformers
from transformers.models.auto import modeling_auto as auto

#: Numbers by what their names say, the first rule that fits.
_RULES = (
    (r"vocab_size.*|.*_vocab_size|entity_vocab_size", 97),
    (
        r"(max|n)_(source_|target_|encoder_|decoder_)?(position|ctx|positions).*|max_seq_len(gth)?|seq_length|context_length",
        128,
    ),
    (
        r"attention_window|sliding_window|sliding_window_size|window_size|local_attention|attention_chunk_size",
        6,
    ),
    (
        r"(num_|n_)?(key_value_heads|kv_heads|head_kv|query_groups|attention_groups)|multi_query_group_num|num_global_key_value_heads",
        2,
    ),
    (r"mamba_n_heads|mamba_num_heads", 8),
    (r"(.*_)?(heads|n_head|num_heads|n_heads|attention_heads)", 4),
    (r"linear_num_(key|value)_heads", 4),
    (r"n_routed_experts|num_experts|num_local_experts|moe_num_experts|n_experts", 4),
    (r"num_experts_per_tok|moe_topk|moe_k|top_k_experts|num_experts_per_token|moe_top_k", 2),
    (
        r"n_group|topk_group|first_k_dense_replace|n_shared_experts|num_shared_experts|num_nextn_predict_layers|decoder_sparse_step|encoder_sparse_step",
        1,
    ),
    (r"(.*_)?(num_layers|n_layers?|layers|num_hidden_layers|num_blocks)", 2),
    (r"(.*_)?lora_rank|.*_rank|lora_.*_dim", 16),
    (r"hidden_size_per_layer_input|embedding_size|classifier_proj_size", 16),
    (r"qk_head_dim", 32),
    (
        r"(.*_)?head_dim|d_kv|head_size|(q|k|v|qk|value|key)_(head|nope|rope)_?(head)?_?dim|attention_head_size|kv_channels",
        16,
    ),
    (r".*(intermediate|ffn|inner|feed_forward|mlp|ff).*|d_inner|shared_expert_.*size", 64),
    (
        r"hidden_size|d_model|n_embd|embed_dim|dim|emb_dim|word_embed_proj_dim|(.*_)?hidden_dim|model_dim|width|d_embed",
        64,
    ),
    (r"(mamba_|ssm_)?(d_state|state_size|n_state|ssm_state_size)", 8),
    (r"rotary_dim", 8),
    (r"attn_layer_period|full_attention_interval", 2),
    (r"attn_layer_offset", 1),
    (r"index_topk|index_n_heads", 4),
    (r"index_head_dim", 32),
)
_RULES = tuple((re.compile(pattern), number) for pattern, number in _RULES)
_ROUNDS = ("dropout", "drop", "layerdrop")  # what must be 0 for two runs to agree


def shrunk(config: dict, layers: int = 2) -> dict:
    """The same configuration with numbers small; everything that is not a size stays."""
    small = {}
    for name, value in config.items():
        if name in ("id2label", "label2id", "per_layer_config"):
            continue
        if isinstance(value, dict) and "layer" not in name:
            small[name] = shrunk(value, layers)
        elif (
            name == "layer_types"
            or name.endswith("layers_block_type")
            or (isinstance(value, list) and len(value) == config.get("num_hidden_layers"))
            or isinstance(value, bool)
            or not isinstance(value, (int, float))
        ):
            small[name] = value
        elif isinstance(value, float):
            small[name] = 0.0 if any(x in name for x in _ROUNDS) else value
        elif name.endswith("token_id"):
            small[name] = min(value, 3)
        else:
            small[name] = next(
                (min(value, n) for rule, n in _RULES if rule.fullmatch(name) and value > 0), value
            )
    return _consistent(small, config, layers)


def _consistent(small: dict, config: dict, layers: int) -> dict:
    types = small.get("layer_types")
    depth = config.get("num_hidden_layers")
    if isinstance(types, list) and types:
        # One run of layers that shows every kind.
        kinds = [i for i, kind in enumerate(types) if kind not in types[:i]]
        others = [i for i in range(len(types)) if i not in kinds]
        kept = sorted([*kinds, *others[: max(0, layers - len(kinds))]])
        for name, value in list(small.items()):
            if isinstance(value, list) and len(value) == len(types):
                small[name] = [value[i] for i in kept]
        for name in ("num_hidden_layers", "num_layers", "n_layer"):
            if name in small:
                small[name] = len(kept)
    elif isinstance(depth, int):
        for name, value in list(small.items()):
            if isinstance(value, list) and len(value) == depth:
                small[name] = value[: small["num_hidden_layers"]]
    for dims in ("num_key_value_heads", "num_kv_heads"):
        if config.get(dims) is not None and config.get(dims) == config.get("num_attention_heads"):
            small[dims] = small["num_attention_heads"]
    if small.get("head_dim", 0) is None:
        small["head_dim"] = 16
    if small.get("num_key_value_heads", 0) is None:
        small["num_key_value_heads"] = small["num_attention_heads"]
    if "mrope_section" in small:
        small["mrope_section"] = [2, 3, 3]
    return small


#: What no rule on names finds, by the configuration's name.
_CHANGES = {
    "BambaConfig": {"attn_layer_indices": [1], "mamba_d_head": 16},
    "GraniteMoeHybridConfig": {"mamba_d_head": 16, "layer_types": ["mamba", "attention"]},
    "FalconH1Config": {"mamba_d_head": 16, "mamba_d_ssm": 128},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "DoryConfig": {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1, "num_hidden_layers": 3},
    "ZambaConfig": {"layers_block_type": ["mamba", "hybrid"]},
    "Zamba2Config": {"layers_block_type": ["mamba", "hybrid"], "layer_types": ["mamba", "hybrid"]},
    "RecurrentGemmaConfig": {"block_types": ["recurrent", "attention"]},
    "BertConfig": {"is_decoder": False},
    "EsmConfig": {"vocab_size": 97, "hidden_size": 64, "pad_token_id": 1, "mask_token_id": 3},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Mamba2Config": {"num_heads": 8},
    "ReformerConfig": {"axial_pos_embds_dim": [32, 32], "is_decoder": True},
    "SqueezeBertConfig": {"embedding_size": 64},
    "T5GemmaConfig": {"is_encoder_decoder": False},
    "RwkvConfig": {"attention_hidden_size": 64},
    "XmodConfig": {"default_language": "en_XX"},
    "XLNetConfig": {"d_head": 16},
    "OlmoHybridConfig": {"layer_types": ["linear_attention", "full_attention"]},
    "DeepseekV2Config": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "Dots1Config": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
                    "n_shared_experts": 1, "moe_intermediate_size": 64},
    "Gemma3nTextConfig": {"num_kv_shared_layers": 0},
}  # fmt: skip


def tiny_config(config_class: type, changes: dict | None = None):
    default = config_class()
    changes = _CHANGES.get(config_class.__name__, {}) | (changes or {})
    small = shrunk(default.to_dict()) | changes
    small.pop("architectures", None)
    return config_class.from_dict(small)


def pair(model_class: type, changes: dict | None = None, attentions=("eager", "fdattn")):
    """The same weights under both attentions; large ones, so that attention matters."""
    config = tiny_config(model_class.config_class, changes)
    with torch.device("meta"):
        count = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
    if count > 5e7:
        raise RuntimeError(
            f"{count / 1e6:.0f} million parameters are left when its sizes are shrunk"
        )
    made = []
    for attention in attentions:
        torch.manual_seed(0)
        made.append(
            model_class._from_config(copy.deepcopy(config), attn_implementation=attention).eval()
        )
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in made[0].parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
    for model in made[1:]:
        model.load_state_dict(made[0].state_dict())
    return made


def classes() -> dict[type, str]:
    """Every class of the auto-mappings of text, with what it is used for."""
    found: dict[type, str] = {}
    for use, names in (
        ("seq2seq", auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        ("masked", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
        ("causal", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("encoder", auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES),
    ):
        for value in names.values():
            for name in value if isinstance(value, (tuple, list)) else (value,):
                one = getattr(transformers, name, None)
                if one is not None:
                    found.setdefault(one, use)
    return found
