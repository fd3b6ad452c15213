"""Every key of a configuration is used, harmless, or refused where it would change the result."""

from __future__ import annotations

import pytest

from tests.models.test_config import LLAMA
from torch_fdattn.models import ModelConfig, ModelError, config_keys, gguf_keys
from torch_fdattn.models.families import FAMILIES

transformers = pytest.importorskip("transformers", reason="transformers is the reference here")

TABLES = {
    "config.json": (config_keys.HF_USED, config_keys.HF_HARMLESS, config_keys.HF_ONLY),
    "rope": (config_keys.ROPE_USED, config_keys.ROPE_HARMLESS, config_keys.ROPE_ONLY),
    "gguf": (gguf_keys.GGUF_USED, gguf_keys.GGUF_HARMLESS, gguf_keys.GGUF_ONLY),
    "generation": (
        config_keys.GENERATION_USED, config_keys.GENERATION_HARMLESS, config_keys.GENERATION_ONLY,
    ),
    "settings": (config_keys.SETTINGS_USED, config_keys.SETTINGS_HARMLESS, config_keys.SETTINGS_ONLY),
    "tokenizer": (
        gguf_keys.TOKENIZER_USED, gguf_keys.TOKENIZER_HARMLESS, gguf_keys.TOKENIZER_ONLY,
    ),
}  # fmt: skip
SOMETHING = "something else"  # a value that no key has


@pytest.mark.parametrize("name", TABLES)
def test_no_key_stands_in_two_tables(name):
    used, harmless, only = (set(table) for table in TABLES[name])
    assert not (used & harmless | used & only | harmless & only)


CLASSES = {
    "LlamaConfig": "llama", "MistralConfig": "mistral", "Qwen2Config": "qwen2", "Qwen3Config": "qwen3",
    "SmolLM3Config": "smollm3", "Gemma2Config": "gemma2", "Gemma3TextConfig": "gemma3_text",
}  # fmt: skip


def test_every_family_has_a_class_here():
    assert set(CLASSES.values()) == set(FAMILIES)


@pytest.mark.parametrize("name", CLASSES)
def test_every_key_of_transformers_classes_is_known(name):
    theirs = getattr(transformers, name)()
    known = {key for table in TABLES["config.json"] for key in table}
    for table in (
        config_keys.HF_FAMILY_USED, config_keys.HF_FAMILY_HARMLESS, config_keys.HF_FAMILY_ONLY,
    ):  # fmt: skip
        known |= set(table.get(CLASSES[name], ()))
    assert set(theirs.to_dict()) <= known
    old = {key: SOMETHING for key in transformers.GenerationConfig._get_default_generation_params()}
    known |= {"epsilon_cutoff", "eta_cutoff"}  # no name of these means computation
    assert not {key for key in old if config_keys._means_computation(key)} - known
    ModelConfig.from_hf({**theirs.to_dict(), "model_type": theirs.model_type})


@pytest.mark.parametrize("kind", FAMILIES)
def test_values_of_a_familys_keys_that_change_the_result_are_refused(kind):
    raw = {**LLAMA, "model_type": kind}
    for key, (values, _) in config_keys.HF_FAMILY_ONLY.get(kind, {}).items():
        for value in values:
            ModelConfig.from_hf({**raw, key: value})
        with pytest.raises(ModelError, match=f"{key} must be .*, got 'something else'"):
            ModelConfig.from_hf({**raw, key: SOMETHING})
    right = ModelConfig.from_hf(raw)
    for key in config_keys.HF_FAMILY_HARMLESS.get(kind, ()):
        assert ModelConfig.from_hf({**raw, key: 7}) == right


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_key_that_a_family_uses_is_read(kind):
    """A value that cannot be is refused by the key, or the configuration is another."""
    raw = {**LLAMA, "model_type": kind, "num_hidden_layers": 8}
    if kind in ("qwen2", "qwen3", "smollm3"):
        raw |= {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
    right = ModelConfig.from_hf(raw)
    others = {"use_sliding_window": False, "no_rope_layers": [0] * 8}
    for key in config_keys.HF_FAMILY_USED.get(kind, ()):
        assert ModelConfig.from_hf({**raw, key: others.get(key, 3)}) != right, key


def test_values_of_config_json_that_change_the_result_are_refused():
    for key, (values, _) in config_keys.HF_ONLY.items():
        for value in values:
            ModelConfig.from_hf({**LLAMA, key: value})
        with pytest.raises(ModelError, match=f"{key} must be .*, got 'something else'"):
            ModelConfig.from_hf({**LLAMA, key: SOMETHING})


def test_harmless_keys_of_config_json_change_nothing():
    right = ModelConfig.from_hf(LLAMA)
    assert config_keys.HF_HARMLESS
    changed = [
        key for key in config_keys.HF_HARMLESS if ModelConfig.from_hf({**LLAMA, key: 7}) != right
    ]
    assert not changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 4096}, "sliding_window must be absent: .*, got 4096"),
        ({"architectures": ["LlamaBiModel"]}, r"architectures must name a …ForCausalLM, got \['Lla"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures must name"),
        ({"logit_scale": 0.0625}, "logit_scale must be absent, since no llama model .* got 0.0625"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier must be absent"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be absent"),
        ({"use_qk_norm": True}, "use_qk_norm must be absent"),
        ({"num_local_experts": 8}, "num_local_experts must be absent"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention must be absent"),
        ({"mlp_gate_softcap": 1.0}, "mlp_gate_softcap must be absent"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "original_max_position_embeddings": 4096},
         "original_max_position_embeddings must be absent"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers must be absent"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "attention_factor": 1.2}},
         "rope attention_factor must be 1: .*, got 1.2"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "short_factor": [1.0]}},
         "rope short_factor must be absent"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0},
          "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
         "rope_parameters and rope_scaling must say the same"),
    ],
)  # fmt: skip
def test_keys_that_nobody_knows_but_whose_names_mean_computation_are_refused(change, message):
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf({**LLAMA, **change})


def test_unset_and_unrelated_keys_are_harmless():
    unset = {"num_experts": 0, "qk_layernorm": False, "attn_bias": None, "mlp_only_layers": []}
    unrelated = {"seq_length": 4096, "attn_pdrop": 0.1, "use_flash_attn": True, "my_project": "x"}
    assert ModelConfig.from_hf({**LLAMA, **unset, **unrelated}) == ModelConfig.from_hf(LLAMA)


_LLAMA31 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("flash_attention_window", 4096), ("rope_initial_scale", 2.0), ("parallel_block", True),
        ("normalize_embeddings", True), ("use_causal", False), ("causal_attention", True), ("dim_model_base", 256),
        ("attn_scale_per_head", 2.0), ("softmax_temperature", 2.0), ("use_dynamic_ntk", True), ("prefix_lm", True),
        ("kv_channels", 32), ("swiglu_alpha", 1.7), ("add_unit_offset", True), ("logits_scaling", 8.0), ("scale_attn_by_layer", True),
    ],
)  # fmt: skip
def test_unknown_keys_that_mean_computation_are_refused(key, value):
    with pytest.raises(ModelError, match=key):
        ModelConfig.from_hf({**LLAMA, key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_flash_attention", True), ("attn_pdrop", 0.1), ("init_scale_attn", 0.1),
        ("flash_attn_implementation", "triton"), ("router_loss_weight", 0.1), ("my_notes", "norm"),
        ("use_causal", None), ("attention_backend", "x"), ("logits_scaling", 1.0), ("residual_multiplier", 1),
        ("original_max_position_embeddings", 4096),
    ],
)  # fmt: skip
def test_unknown_keys_of_training_and_kernels_are_passed_over(key, value):
    assert ModelConfig.from_hf({**LLAMA, key: value}) == ModelConfig.from_hf(LLAMA)


def published(architecture, sizes, **more):
    """A published config.json: vocabulary, width, MLP, layers, heads, key heads, context; and the rest."""
    names = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    ]
    kind = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[architecture]
    return {
        "architectures": [kind], "model_type": architecture, "hidden_act": "silu",
        "initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0", **dict(zip(names, sizes, strict=True)), **more,
    }  # fmt: skip


_QWEN3 = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "head_dim": 128, "max_window_layers": 36, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
_META = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000, "mlp_bias": False,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
PUBLISHED = {
    "Llama-2-7b": published(
        "llama", (32000, 4096, 11008, 32, 32, 32, 4096), _name_or_path="meta-llama/Llama-2-7b-hf",
        bos_token_id=1, eos_token_id=2, pretraining_tp=1, rms_norm_eps=1e-05, rope_scaling=None,
        tie_word_embeddings=False,
    ),
    "Llama-3-8B-Instruct": published(
        "llama", (128256, 4096, 14336, 32, 32, 8, 8192), **_META, rope_scaling=None, eos_token_id=128009
    ),
    "Llama-3.1-8B-Instruct": published(
        "llama", (128256, 4096, 14336, 32, 32, 8, 131072), **_META, rope_scaling=_LLAMA31,
        eos_token_id=[128001, 128008, 128009],
    ),
    "Llama-3.2-1B": published(
        "llama", (128256, 2048, 8192, 16, 32, 8, 131072),
        **{**_META, "tie_word_embeddings": True, "rope_scaling": {**_LLAMA31, "factor": 32.0}},
        head_dim=64, eos_token_id=128001,
    ),
    "an unsloth copy": published(
        "llama", (128256, 4096, 14336, 32, 32, 8, 131072), **_META, rope_scaling=_LLAMA31, head_dim=128,
        eos_token_id=128009, pad_token_id=128004, unsloth_fixed=True, unsloth_version="2024.9.post4",
    ),
    "TinyLlama-1.1B-Chat": published(
        "llama", (32000, 2048, 5632, 22, 32, 4, 2048), attention_bias=False, bos_token_id=1,
        eos_token_id=2, pretraining_tp=1, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=10000.0,
        tie_word_embeddings=False,
    ),
    "vicuna-7b-v1.5-16k": published(
        "llama", (32000, 4096, 11008, 32, 32, 32, 4096), _name_or_path="vicuna-7b-v1.5-16k",
        bos_token_id=1, eos_token_id=2, max_sequence_length=16384, pad_token_id=0, pretraining_tp=1,
        rms_norm_eps=1e-05, rope_scaling={"factor": 4.0, "type": "linear"}, tie_word_embeddings=False,
    ),
    "CodeLlama-7b": published(
        "llama", (32016, 4096, 11008, 32, 32, 32, 16384), bos_token_id=1, eos_token_id=2,
        rms_norm_eps=1e-05, rope_scaling=None, rope_theta=1000000, tie_word_embeddings=False,
        pretraining_tp=1,
    ),
    "deepseek-coder-1.3b": published(
        "llama", (32256, 2048, 5504, 24, 16, 16, 16384), bos_token_id=32013, eos_token_id=32021,
        pretraining_tp=1, rms_norm_eps=1e-06, rope_scaling={"factor": 4.0, "type": "linear"},
        rope_theta=100000, tie_word_embeddings=False,
    ),
    "SmolLM2-135M-Instruct": published(
        "llama", (49152, 576, 1536, 30, 9, 3, 8192), attention_bias=False, attention_dropout=0.0,
        bos_token_id=1, eos_token_id=2, is_llama_config=True, mlp_bias=False, pad_token_id=2,
        pretraining_tp=1, rms_norm_eps=1e-05, rope_interleaved=False, rope_scaling=None,
        rope_theta=100000, tie_word_embeddings=True,
        **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}},
    ),
    "Yi-6B": published(
        "llama", (64000, 4096, 11008, 32, 32, 4, 4096), bos_token_id=1, eos_token_id=2, pad_token_id=0,
        pretraining_tp=1, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=5000000.0,
        tie_word_embeddings=False, attention_bias=False,
    ),
    "Falcon3-7B-Instruct": published(
        "llama", (131072, 3072, 23040, 28, 12, 4, 32768), activation="swiglu", attention_bias=False,
        attention_dropout=0.0, eos_token_id=11, head_dim=256, mlp_bias=False, pad_token_id=2023,
        pretraining_tp=1, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=1000042,
        tie_word_embeddings=False,
    ),
    "granite-3b-code": published(
        "llama", (49152, 2560, 10240, 32, 32, 32, 2048), attention_bias=True, attention_dropout=0.1,
        bos_token_id=0, eos_token_id=0, mlp_bias=True, pad_token_id=0, pretraining_tp=1,
        rms_norm_eps=1e-05, rope_scaling=None, rope_theta=10000, tie_word_embeddings=True,
    ),
    "LLaMA-2-7B-32K": published(
        "llama", (32000, 4096, 11008, 32, 32, 32, 32768), bos_token_id=1, eos_token_id=2, pad_token_id=0,
        auto_map={"AutoModelForCausalLM": "modeling_flash_llama.LlamaForCausalLM"}, pretraining_tp=1,
        rms_norm_eps=1e-05, rope_scaling={"factor": 8.0, "type": "linear"}, tie_word_embeddings=False,
    ),
    "Qwen3-0.6B": published(
        "qwen3", (151936, 1024, 3072, 28, 16, 8, 40960), **_QWEN3, tie_word_embeddings=True
    ),
    "Qwen3-8B": published(
        "qwen3", (151936, 4096, 12288, 36, 32, 8, 40960), **_QWEN3, tie_word_embeddings=False
    ),
    "Qwen3-Embedding-0.6B": published(
        "qwen3", (151669, 1024, 3072, 28, 16, 8, 32768), **_QWEN3, tie_word_embeddings=True
    ),
    "Qwen3-8B, saved by transformers 5": {
        key: value for key, value in published(
            "qwen3", (151936, 4096, 12288, 36, 32, 8, 40960), **_QWEN3, tie_word_embeddings=False,
            dtype="bfloat16", layer_types=["full_attention"] * 36, pad_token_id=None,
            rope_parameters={"rope_theta": 1000000, "rope_type": "default"},
        ).items() if key not in ("rope_scaling", "rope_theta", "torch_dtype")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(name):
    raw = PUBLISHED[name]
    config = ModelConfig.from_hf(raw)
    theirs = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[
        raw["model_type"]
    ](**raw)
    assert config.head_dim == theirs.head_dim
    assert config.rope.theta == theirs.rope_parameters["rope_theta"]
    assert config.rope.kind == theirs.rope_parameters["rope_type"]
    assert config.tie_embeddings == theirs.tie_word_embeddings


def test_every_key_of_a_generation_config_is_drawing_or_judged():
    """What is neither named nor a way of drawing: ids, lengths, caches, forms of what is returned."""
    theirs = set(transformers.GenerationConfig().to_dict())
    assert theirs >= config_keys.GENERATION_USED
    judged = set(config_keys.GENERATION_ONLY)
    # transformers drops a key now and then; those that stand here are its own.
    assert len(judged & theirs) >= len(judged) - 2
    config_keys.check_generation_keys({key: None for key in theirs})
    published = {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    config_keys.check_generation_keys({**published, "guidance_scale": 1.0, "suppress_tokens": []})
    for key in judged:
        with pytest.raises(ModelError, match=f"{key} must be "):
            config_keys.check_generation_keys({key: [7]})
