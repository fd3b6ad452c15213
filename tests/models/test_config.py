"""config.json, in all the forms that are read, and the errors for those that are not."""

from __future__ import annotations

import json
import re

import pytest
import torch

from torch_fdattn.models import ModelConfig, ModelError

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_old_and_new_rope_forms_are_the_same():
    old = {**LLAMA, "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **SCALING}}
    older = {**LLAMA, "rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **SCALING}}
    new = {**LLAMA, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", **SCALING}}
    config = ModelConfig.from_hf(new)
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(older) == config
    assert (config.rope.theta, config.rope.kind, config.rope.factor) == (500000.0, "llama3", 8.0)
    assert config.rope.original_max_positions == 8192
    assert (config.head_dim, config.dtype, config.qk_norm) == (128, torch.bfloat16, False)


def test_defaults_of_each_architecture():
    llama = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert ModelConfig.from_hf(llama).num_kv_heads == 32
    qwen3 = ModelConfig.from_hf({**LLAMA, "model_type": "qwen3", "hidden_size": 1024})
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.rope.kind) == (128, True, "default")
    assert ModelConfig.from_hf({**LLAMA, "rope_scaling": None}).rope.theta == 10000.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "gemma3n"},
            "model_type must be one of llama, .*, gemma3_text, got 'gemma3n'",
        ),
        ({"model_type": None}, "model_type must be one of llama, mistral, .*, got None"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope type must be one of default, linear, llama3, got 'yarn'",
        ),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        *(
            (
                {
                    key: {
                        kind: {"rope_type": "default", "rope_theta": 1e6}
                        for kind in ("full_attention", "sliding_attention")
                    }
                },
                "rope parameters must be the same for all layers, got some for full_attention, slid",
            )
            for key in ("rope_parameters", "rope_scaling")
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            r"layer_types must all be 'full_attention', got \['sliding_attention'\]",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window must be false"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "quantization_config must be absent, got {'quant_method': 'awq'}",
        ),
        ({"num_key_value_heads": 5}, "num_heads must be a multiple of num_kv_heads, got 32 and 5"),
        ({"num_hidden_layers": 0}, "num_layers must be a positive integer below .*, got 0"),
        ({"hidden_size": "wide"}, "a value of the wrong kind"),
        *(
            ({"head_dim": size}, f"head_dim must be a multiple of 8 from 16 to 256, got {size}")
            for size in (8, 63, 100, 264)
        ),
        ({"torch_dtype": "int7"}, "dtype must be one of bfloat16, .*, got 'int7'"),
        ({"quantization_config": "x"}, "quantization_config must be absent, got 'x'"),
        ({"tie_word_embeddings": "yes"}, "tie_embeddings must be true or false, got 'yes'"),
        ({"num_key_value_heads": 0}, "num_kv_heads must be a positive integer"),
        ({"rope_theta": 0}, "rope theta must be a positive finite number, got 0"),
    ],
)
def test_unsupported_configs_are_refused(change, message):
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf({**LLAMA, **change})


WRONG_NUMBERS = ["abc", [], {}, -1, True, float("nan"), float("inf"), 10**400]


@pytest.mark.parametrize("value", [*WRONG_NUMBERS, None], ids=lambda value: str(value)[:6])
def test_wrong_numbers_are_refused(value, tmp_path):
    def refused(change, *, scaling=None):
        rope = {"rope_theta": 1e4, "rope_type": "llama3", **SCALING, **(scaling or {})}
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**LLAMA, "rope_parameters": rope, **change}))
        with pytest.raises(ModelError, match=re.escape(f"{path}: ")):
            ModelConfig.from_file(path)

    refused({"vocab_size": value})
    refused({"rms_norm_eps": value})
    for name in SCALING:
        refused({}, scaling={name: value})
        refused({}, scaling={name: 0})
    if value is not None:  # null: the default base
        refused({}, scaling={"rope_theta": value})
    refused({}, scaling={"low_freq_factor": 4.0})


@pytest.mark.parametrize("name", ["LlamaConfig", "Qwen3Config"])
def test_every_default_is_that_of_transformers(name):
    transformers = pytest.importorskip("transformers", reason="transformers is the reference here")
    theirs = getattr(transformers, name)()
    written = ModelConfig.from_hf({**theirs.to_dict(), "model_type": theirs.model_type})
    required = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    raw = {key: getattr(theirs, key) for key in required.split()}
    assert ModelConfig.from_hf({"model_type": theirs.model_type, **raw}) == written


def test_a_missing_key_is_named():
    raw = {key: value for key, value in LLAMA.items() if key != "vocab_size"}
    with pytest.raises(ModelError, match="vocab_size is missing"):
        ModelConfig.from_hf(raw)


def test_errors_of_a_file_name_it(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(ModelError, match=r"config\.json: no such file"):
        ModelConfig.from_file(path)
    path.write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: not valid JSON"):
        ModelConfig.from_file(path)
    path.write_text("[" * 100_000)
    with pytest.raises(ModelError, match=r"config\.json: not valid JSON"):
        ModelConfig.from_file(path)
    with pytest.raises(ModelError, match=r"must be a regular file, got a folder"):
        ModelConfig.from_file(tmp_path)
    path.write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json: must hold a JSON object, got list"):
        ModelConfig.from_file(path)
    path.write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ModelError, match=r"config\.json: model_type must be one of"):
        ModelConfig.from_file(path)
