"""Windows, rotary bases, softcaps and scales of each family's config.json."""

from __future__ import annotations

import re

import pytest
import torch

from tests.models.test_config import LLAMA
from torch_fdattn.models import (
    CONFIG_NAMES,
    ModelConfig,
    ModelError,
    Transformer,
    named_config,
    random_model,
)
from torch_fdattn.models.config import LayerConfig, RopeConfig

transformers = pytest.importorskip("transformers", reason="transformers is the reference here")

DEFAULT = RopeConfig()


def config(kind: str, **changes) -> ModelConfig:
    return ModelConfig.from_hf({**LLAMA, "model_type": kind, "num_hidden_layers": 6, **changes})


def windows(found: ModelConfig) -> list[int | None]:
    return [found.layer(i).window for i in range(found.num_layers)]


def thetas(found: ModelConfig) -> list[float]:
    return [found.layer(i).rope.theta for i in range(found.num_layers)]


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("llama", {}, [None] * 6),
        ("mistral", {}, [4096] * 6),  # what transformers takes where the key is left out
        ("mistral", {"sliding_window": None}, [None] * 6),
        ("mistral", {"sliding_window": 5}, [5] * 6),
        ("qwen2", {"sliding_window": 5}, [None] * 6),  # not used
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 4}, [None] * 4 + [4096] * 2),
        ("qwen3", {"use_sliding_window": True, "sliding_window": None}, [None] * 6),
        (
            "qwen3",
            {
                "use_sliding_window": True, "sliding_window": 5, "num_hidden_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            [5, None],
        ),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 5}, [None, None, None, 5, None, None]),
        ("gemma2", {}, [4096, None] * 3),
        ("gemma2", {"sliding_window_pattern": 3}, [4096, 4096, None] * 2),
        ("gemma3_text", {"sliding_window": 5}, [5] * 5 + [None]),
        ("gemma3_text", {"sliding_window_pattern": 2}, [4096, None] * 3),
    ],
)  # fmt: skip
def test_windows(kind, changes, expected):
    assert windows(config(kind, **changes)) == expected


def test_no_layer_of_its_own_is_no_list():
    for kind in ("llama", "qwen2", "qwen3"):
        assert config(kind).layers == ()
    assert config("mistral", sliding_window=None).layers == ()


def test_layers_without_positions():
    kinds = [config("smollm3").layer(i).rope.kind for i in range(6)]
    assert kinds == ["default", "default", "default", "none", "default", "default"]
    some = config("smollm3", no_rope_layers=[0, 1, 1, 1, 1, 1])
    assert some.rope_indices == (0, 1, 1, 1, 1, 1)
    assert some.layer(0) == LayerConfig(None, RopeConfig(kind="none"))
    assert config("smollm3").rope.theta == 2e6
    assert config("smollm3").tie_embeddings


def test_rotary_bases_of_gemma_3():
    """In the form of the hub's files and in transformers 5's; a scaling is of the layers that see everything."""
    linear = {"rope_type": "linear", "factor": 8.0}
    old = config("gemma3_text", rope_theta=1e5, rope_local_base_freq=500.0, rope_scaling=linear)
    new = config(
        "gemma3_text",
        rope_parameters={
            "full_attention": {**linear, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    )
    assert old == new
    assert thetas(old) == [500.0] * 5 + [1e5]
    assert old.layer(5).rope == RopeConfig(1e5, "linear", 8.0)
    assert thetas(config("gemma3_text")) == [1e4] * 5 + [1e6]


def test_softcaps_and_scales():
    found = config("gemma2", query_pre_attn_scalar=144)
    assert (found.softcap, found.logit_softcap, found.attention_scale) == (50.0, 30.0, 144**-0.5)
    none = config("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (none.softcap, none.logit_softcap) == (0.0, 0.0)
    gemma3 = config("gemma3_text")
    assert (gemma3.softcap, gemma3.logit_softcap, gemma3.attention_scale) == (0.0, 0.0, 1 / 16)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gemma2", {"sliding_window": None}, "sliding_window must be a positive integer where layer_types has"),
        ("gemma2", {"sliding_window": 0}, "window must be a positive integer .*, got 0"),
        ("gemma2", {"sliding_window_pattern": 0}, "sliding_window_pattern must be a positive integer"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive number, got 0"),
        ("gemma2", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar must be a positive number"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "softcap must be finite and at least 0, got -1.0"),
        ("gemma2", {"final_logit_softcapping": float("nan")}, "logit_softcap must be finite and at"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types must have 6 entries like num_hidden_layers, got 1"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 6}, "layer_types must be full_attention or sliding_att"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation must be 'gelu_pytorch_tanh', got 'gelu'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention must be false"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be absent: transf"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters must have full_attention and sl"),
        ("gemma3_text", {"rope_scaling": {"rope_type": "yarn"}}, "rope type must be one of default"),
        ("mistral", {"layer_types": ["full_attention"] * 6}, "layer_types must all be 'sliding_attention'"),
        ("mistral", {"sliding_window": "wide"}, "window must be a positive integer below"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 6}, "sliding_window must be a positive integer"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": None}, "a value of the wrong kind"),
        ("qwen2", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be absent, since no qwen2"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must have a 0 or 1 for each of 6 layers"),
        ("smollm3", {"no_rope_layers": [2] * 6}, "no_rope_layers must have a 0 or 1"),
        ("smollm3", {"no_rope_layer_interval": 0}, "a value of the wrong kind"),
        *((kind, {"num_hidden_layers": 2**40}, "num_layers must be a positive integer below 65536")
          for kind in ("llama", "gemma2", "smollm3")),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(kind, changes, message):
    with pytest.raises(ModelError, match=message):
        config(kind, **changes)


@pytest.mark.parametrize(
    "name", ["MistralConfig", "Qwen2Config", "SmolLM3Config", "Gemma2Config", "Gemma3TextConfig"]
)
def test_every_default_is_that_of_transformers(name):
    theirs = getattr(transformers, name)()
    written = ModelConfig.from_hf({**theirs.to_dict(), "model_type": theirs.model_type})
    required = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    raw = {key: getattr(theirs, key) for key in required.split()}
    assert ModelConfig.from_hf({"model_type": theirs.model_type, **raw}) == written


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": (LayerConfig(None, DEFAULT),)}, "layers must have an entry for each of the 2 layers, got 1"),
        ({"softcap": float("inf")}, "softcap must be finite and at least 0, got inf"),
        ({"attention_scale": 0.0}, "attention_scale must be a positive finite number, got 0.0"),
    ],
)  # fmt: skip
def test_configurations_that_cannot_be(changes, message):
    with pytest.raises(ModelError, match=message):
        ModelConfig("llama", 64, 32, 48, 2, 2, 1, 16, 8, **changes)


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_named_configurations_have_the_published_sizes(name):
    """As many parameters as the name says; Gemma counts without its embeddings."""
    with torch.device("meta"):
        parameters = sum(x.numel() for x in Transformer(named_config(name)).parameters())
    told, unit = re.search(r"-([\d.]+)([bBmM])", name).groups()
    size = float(told) * {"b": 1e9, "m": 1e6}[unit.lower()]
    assert 0.95 * size < parameters < 1.35 * size


def test_the_hubs_sparse_text_config_of_gemma_3():
    text = {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    around = {
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
        "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02,
        "mm_tokens_per_image": 256, "transformers_version": "4.50.0.dev0", "vision_config": {"hidden_size": 1152},
    }  # fmt: skip
    assert ModelConfig.from_hf({**around, "text_config": text}) == named_config("gemma-3-4b")
    bf16 = ModelConfig.from_hf({**around, "torch_dtype": "bfloat16", "text_config": text})
    assert bf16.dtype is torch.bfloat16


def test_an_unknown_name_names_the_others():
    with pytest.raises(ModelError, match=r"name must be one of Llama-2-7b, .*, got 'GPT-5'"):
        named_config("GPT-5")


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_random_models_are_drawn_by_their_seed(kind):
    small = ModelConfig(kind, 64, 32, 48, 2, 2, 1, 16, 32)
    one, same, other = (random_model(small, seed=seed) for seed in (0, 0, 1))
    tokens = torch.arange(9)[None]
    assert torch.equal(one(tokens), same(tokens))
    assert not torch.equal(one(tokens), other(tokens))
    assert {x.dtype for x in one.parameters()} == {torch.bfloat16}
    assert not any(x.requires_grad or x.is_meta for x in one.parameters())
    assert 0.015 < one.layers[0].mlp.up_proj.weight.float().std() < 0.025
    assert one.norm(torch.ones(1, 32, dtype=torch.bfloat16)).eq(1).all()
