"""What attn_implementation=fdattn refuses, by name: other forms, models that attend by themselves, versions."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.dropins.test_transformers import LAYER, decoders, qkv, registered, tokens  # noqa: F401
from torch_fdattn.dropins import continuous_batching
from torch_fdattn.dropins import transformers as dropin

transformers = pytest.importorskip("transformers", reason="transformers is the reference here")
hf = pytest.importorskip("transformers.masking_utils", reason="transformers is the reference here")


def test_what_there_is_not():
    with pytest.raises(NotImplementedError, match="attends to no paged cache"):
        dropin.fdattn_attention(LAYER, *qkv(), None, cache=object())
    cu = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seq_lens_q needs a batch of one row, got 2 rows"):
        dropin.fdattn_attention(LAYER, *qkv(), None, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    one, bias = [x[:1] for x in qkv()], torch.zeros(1, 4, 8, 8)
    with pytest.raises(NotImplementedError, match="position_bias with cu_seq_lens_q"):
        dropin.fdattn_attention(LAYER, *one, None, cu_seq_lens_q=cu, position_bias=bias)
    with pytest.warns(UserWarning, match="makes no attention weights"):
        assert dropin.fdattn_attention(LAYER, *qkv(), None, output_attentions=True)[1] is None


@pytest.mark.parametrize("compiled", [False, True])
def test_models_that_attend_by_themselves_are_refused(compiled):
    """BLOOM adds its mask to its scores, whatever it is given as one."""
    torch._dynamo.reset()
    config = transformers.BloomConfig(
        vocab_size=64, hidden_size=64, n_layer=1, n_head=4, attn_implementation="fdattn"
    )
    model = transformers.BloomModel(config).eval()
    if compiled:
        model = torch.compile(model, backend="eager")
    message = "BloomModel of transformers .* does not take its attention from AttentionInterface"
    # Dynamo wraps what is raised while it traces.
    with pytest.raises(Exception if compiled else NotImplementedError, match=message):
        model(tokens()[0], use_cache=False)


def test_a_model_in_another_file_than_its_configurations_is_found():
    """BLIP's text model adds what it is given to its scores: padded, its answers were 0.16 off."""
    from transformers.models.blip.configuration_blip import BlipTextConfig
    from transformers.models.blip.modeling_blip_text import BlipTextModel

    config = BlipTextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=32, projection_dim=32,
    )  # fmt: skip
    model = BlipTextModel._from_config(config, attn_implementation="fdattn").eval()
    with pytest.raises(NotImplementedError, match=r"BlipText\w+ of transformers .* does not take"):
        model(torch.arange(4)[None], attention_mask=torch.tensor([[1, 1, 0, 0]]), is_decoder=False)


def test_generate_batch_without_the_context_manager():
    """Refused by transformers before anything runs; where it asks for paged|fdattn by itself, that computes it."""
    _, ours = decoders("Llama")
    config = transformers.GenerationConfig(max_new_tokens=4, do_sample=False)
    prompt = [3, 4, 5]
    if not continuous_batching.is_prefixed():
        with pytest.raises((ValueError, KeyError), match="fdattn"):
            ours.generate_batch([prompt], generation_config=config)
        return
    (made,) = ours.generate_batch([prompt], generation_config=config).values()
    expected = ours.generate(torch.tensor([prompt]), generation_config=config)
    assert made.generated_tokens == expected[0, len(prompt) :].tolist()


def test_versions(monkeypatch):
    def old(batch_size, cache_position, kv_length):
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(hf, "sdpa_mask", old)
        with pytest.raises(ImportError, match=r"needs transformers >= 5\.5, got transformers \d"):
            dropin.register()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[transformers\]'"):
        dropin.register()


@pytest.mark.parametrize("name", ["indices", "block_indices", "sinks"])
def test_what_would_be_lost_is_refused(name):
    """Sparse models tell any interface but eager's and sdpa's of their choice of keys by an argument."""
    q = torch.randn(1, 2, 3, 16)
    with pytest.raises(NotImplementedError, match=f"does not know {name} "):
        dropin.fdattn_attention(torch.nn.Module(), q, q, q, None, **{name: torch.zeros(1)})
