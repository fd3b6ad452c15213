"""Small transformers models with weights in which everything matters, and their GGUF form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is the reference here")
pytest.importorskip("safetensors", reason="needs the extra models")

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # so that a short test sees all three regimes
}
_SMALL = {
    "vocab_size": 160,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_NO_END = {"bos_token_id": None, "eos_token_id": None}
_GEMMA = {  # a scale that is not the head size's
    "head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 20, "pad_token_id": None, **_NO_END,
}  # fmt: skip
CONFIGS = {
    "llama3": ("llama", {"rope_parameters": _LLAMA3_ROPE}),
    "llama3_tied": ("llama", {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama3_biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama_linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
    ),
    "llama2": (  # multi-head attention with heads of 128
        "llama",
        {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_tied": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_biases": ("qwen3", {"head_dim": 32, "attention_bias": True}),
    "qwen3_window": (
        "qwen3",
        {"head_dim": 32, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2_window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
    ),
    "mistral": ("mistral", {"sliding_window": 24}),
    "mistral_full": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "smollm3": ("smollm3", {"pad_token_id": None, "num_hidden_layers": 4, **_NO_END}),
    "smollm3_window": (
        "smollm3",
        {
            "pad_token_id": None, "no_rope_layers": [0, 1, 0], "use_sliding_window": True,
            "sliding_window": 24, **_NO_END,
        },
    ),
    "gemma2": ("gemma2", {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 12.0}),
    "gemma3": (
        "gemma3_text",
        {
            **_GEMMA,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
}  # fmt: skip
#: One of each family, with a window where it has any.
FAMILIES = (
    "llama3",
    "mistral",
    "qwen2_window",
    "qwen3_window",
    "smollm3_window",
    "gemma2",
    "gemma3",
)


def reference(name: str):
    """The transformers model of a case: fp32, eager attention, no parameter at its default."""
    architecture, changes = CONFIGS[name]
    config_class = {
        "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "smollm3": transformers.SmolLM3Config,
        "gemma2": transformers.Gemma2Config,
        "gemma3_text": transformers.Gemma3TextConfig,
    }[architecture]
    config = config_class(**{**_SMALL, **changes})
    config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(noise * 1.5 / parameter.shape[1] ** 0.5)
            else:
                one = "norm" in parameter_name and not architecture.startswith("gemma")
                parameter.copy_(0.3 * noise + one)
    return model


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


_GEMMA_GGUF_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_gguf(path: Path, model, kind: str = "F32", fields=lambda writer: None) -> None:
    """As llama.cpp's converter does; matrices in the quantisation `kind`."""
    gguf = pytest.importorskip("gguf", reason="needs the package gguf")
    config = model.config
    gemma = config.model_type.startswith("gemma")
    writer = gguf.GGUFWriter(str(path), config.model_type.removesuffix("_text"))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "llama3":  # carried as what each plain frequency is divided by
        plain = 1 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim)
        scaled = model.model.rotary_emb.inv_freq
        writer.add_tensor("rope_freqs.weight", (plain / scaled).float().numpy())
    if gemma:
        writer.add_sliding_window(config.sliding_window)
        writer.add_final_logit_softcapping(config.final_logit_softcapping or 0.0)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    fields(writer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, leaf = name.rpartition(".")
        if stem.startswith("model.layers."):
            layer, part = stem.removeprefix("model.layers.").split(".", 1)
            names = {**_GGUF_NAMES, **(_GEMMA_GGUF_NAMES if gemma else {})}
            gguf_name = f"blk.{layer}.{names[part]}.{leaf}"
        else:
            gguf_name = f"{_GGUF_NAMES[stem]}.{leaf}"
        if gemma and name.endswith("norm.weight"):
            tensor = tensor + 1
        if config.model_type in ("llama", "smollm3") and ("q_proj" in name or "k_proj" in name):
            halves = tensor.unflatten(0, (-1, 2, head_dim // 2))
            tensor = halves.transpose(1, 2).flatten(0, 2)
        data = tensor.contiguous().numpy()
        if tensor.dim() == 2 and kind != "F32":
            dtype = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(gguf_name, gguf.quantize(data, dtype), raw_dtype=dtype)
        else:
            writer.add_tensor(gguf_name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
