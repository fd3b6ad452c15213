"""What a layer may see is what its mask was made for, whatever the layer's own flag says: a few classes of sweep.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is the reference here")

import transformers

from tests.dropins.sweep import ask
from tests.dropins.tiny_models import pair
from torch_fdattn.dropins import transformers as dropin


@pytest.fixture(scope="module", autouse=True)
def registered():
    dropin.register()


CLASSES = {
    "BigBirdPegasusForCausalLM": "causal",  # decoders whose layers say is_causal=False
    "PegasusXForConditionalGeneration": "seq2seq",
    "DeepseekV4ForCausalLM": "causal",  # calculates with its masks
    "MistralForCausalLM": "causal",
}
MORE = {
    "Gemma4ForCausalLM": "causal",  # heads of 512
    "BartForConditionalGeneration": "seq2seq",
    "NllbMoeForConditionalGeneration": "seq2seq",
    "T5EncoderModel": "encoder",
    "RobertaForMaskedLM": "masked",
    "GptOssForCausalLM": "causal",
    "Gemma3nForCausalLM": "causal",
}
NAMES = [*CLASSES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]


@pytest.mark.parametrize("name", NAMES)
def test_taken(name):
    found = ask(getattr(transformers, name), (CLASSES | MORE)[name])
    assert (found.verdict, found.reason) == ("taken", "")


def test_the_table_has_no_silent_difference():
    text = (Path(__file__).parent / "sweep.md").read_text(encoding="utf-8")
    rows = [
        line.split(" | ")
        for line in text.splitlines()
        if line.startswith("| ") and "| class" not in line
    ]
    assert len(rows) > 250
    assert {row[2] for row in rows} <= {"taken", "refused", "no attention of ours", "not built"}
    taken = {row[0].removeprefix("| ") for row in rows if row[2] == "taken"}
    assert {"BigBirdPegasusForCausalLM", "NllbMoeForConditionalGeneration"} <= taken
    assert {"PegasusXForConditionalGeneration", "Gemma4ForCausalLM", "LlamaForCausalLM"} <= taken


def test_a_model_that_asks_for_masks_alone_is_refused():
    """TrOCR attends by itself, and would go without the mask that it asked us for."""
    found = ask(transformers.TrOCRForCausalLM, "causal")
    assert found.verdict == "refused"
    assert "does not take its attention from AttentionInterface" in found.reason


@pytest.mark.parametrize("compiled", [False, True])
def test_a_decoder_that_is_told_to_see_everything(compiled):
    """Its layers say is_causal=True, its configuration False: the mask is of both directions."""
    eager, ours = pair(transformers.LlamaForCausalLM, {"is_causal": False})
    ids = torch.randint(5, 90, (2, 20))
    torch._dynamo.reset()
    run = torch.compile(ours, backend="eager") if compiled else ours
    with torch.no_grad():
        found, wanted = (m(ids, use_cache=False).logits for m in (run, eager))
        assert not torch.allclose(eager(ids[:, :9], use_cache=False).logits, wanted[:, :9])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(
    not hasattr(transformers, "Gemma4ForCausalLM"), reason="needs a transformers with Gemma 4"
)
@pytest.mark.parametrize("kept", [1, 3])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_layers_that_attend_for_the_last_tokens_alone(cache, kept, padded):
    """Gemma 4's that share keys cut the rows of their masks: of ours too, with the window that these hold."""
    kinds = ["sliding_attention", "full_attention"] * 2
    models = pair(
        transformers.Gemma4ForCausalLM,
        {"layer_types": kinds, "num_hidden_layers": 4, "num_kv_shared_layers": 2},
    )
    assert models[0].config.sliding_window == 6
    ids = torch.randint(5, 90, (2, 20))
    mask = torch.ones_like(ids)
    mask[0, : 5 * padded] = 0
    results = []
    for model in models:
        if cache == "dynamic":
            past = transformers.DynamicCache(config=model.config)
        else:
            past = transformers.StaticCache(config=model.config, max_cache_len=40)
        with torch.no_grad():
            out = model(ids, attention_mask=mask, past_key_values=past, logits_to_keep=kept)
        results.append(out.logits)
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
