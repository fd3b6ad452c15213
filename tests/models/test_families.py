"""Each family over the caches and through `LLM`: prompts in chunks, across a window's border, and text."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch

from tests.engine.cached_batch import CachedBatch
from tests.models.hf_models import CONFIGS, FAMILIES, reference
from torch_fdattn.engine import LLM, SamplingParams
from torch_fdattn.models import ModelConfig, ModelError, Transformer, load_model
from torch_fdattn.models.families import FAMILIES as ALL_FAMILIES

transformers = pytest.importorskip("transformers", reason="transformers is the reference here")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="needs safetensors")
TOLERANCE = 2e-4  # logits spread over about ±5
WINDOW = 24  # of the models that have one
GREEDY = 14


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """(transformers' model, ours read from the folder that transformers saved)."""
    theirs = reference(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return theirs, load_model(folder)


def prompts(config) -> list[list[int]]:
    """Shorter than the window, at its border, and beyond it."""
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(config.vocab_size, (n,), generator=generator).tolist()
        for n in (WINDOW - 3, WINDOW, 61)
    ]


def test_every_family_is_tested() -> None:
    assert {CONFIGS[name][0] for name in FAMILIES} == set(ALL_FAMILIES)


@pytest.mark.parametrize("cache", ["contiguous", "paged"])
@torch.no_grad()
def test_chunks_and_steps_equal_transformers(pair, device, cache: str) -> None:
    """Prompts of several lengths in chunks of 20 columns, then teacher-forced steps over the border of the window."""
    theirs, ours = (model.to(device) for model in pair)
    given = prompts(theirs.config)
    generator = torch.Generator().manual_seed(5)
    tail = torch.randint(theirs.config.vocab_size, (len(given), 6), generator=generator).tolist()
    options = {"page_size": 8} if cache == "paged" else {}
    batch = CachedBatch(ours, cache, batch=len(given), capacity=80, chunk=20, **options)
    found = [batch.prefill(given)]
    for step in zip(*tail, strict=True):
        found.append(batch.step(torch.tensor(step, device=device)[:, None]))
    for i, prompt in enumerate(given):
        tokens = torch.tensor([prompt + tail[i]], device=device)
        expected = theirs(tokens).logits[0, len(prompt) - 1 :]
        torch.testing.assert_close(
            torch.stack([logits[i] for logits in found]), expected, atol=TOLERANCE, rtol=0
        )


@torch.no_grad()
def test_greedy_text_equals_transformers_generate(pair, device) -> None:
    theirs, ours = (model.to(device) for model in pair)
    prompt = prompts(theirs.config)[0]  # it grows over the window's border
    tokens = torch.tensor([prompt], device=device)
    expected = theirs.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=GREEDY, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    llm = LLM(ours, max_model_len=64, max_batch_tokens=16, page_size=4, pages=16)
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=GREEDY))
    assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist()
    llm.close()


@torch.no_grad()
def test_continuous_batching_equals_transformers(pair, device) -> None:
    """Log-probabilities of prompts in chunks and of the tokens drawn behind them, all of them in one batch."""
    theirs, ours = (model.to(device) for model in pair)
    params = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=8, logprobs=8)
    llm = LLM(ours, max_model_len=80, max_batch_tokens=20, page_size=8, pages=32)
    for output in llm.generate(prompts(theirs.config), params):
        (completion,) = output.outputs
        tokens = output.prompt_token_ids + completion.token_ids
        expected = theirs(torch.tensor([tokens], device=device)).logits[0].log_softmax(-1)
        listed = [*output.prompt_logprobs[1:], *completion.logprobs]
        assert len(listed) == len(tokens) - 1
        for row, entries in zip(expected, listed, strict=False):
            for token, entry in entries.items():
                assert abs(float(row[token]) - entry.logprob) < TOLERANCE
    llm.close()


def changed(model: Transformer, **changes) -> Transformer:
    """The same weights under another configuration."""
    other = Transformer(dataclasses.replace(model.config, **changes)).eval()
    other.load_state_dict(model.state_dict())
    return other


@torch.no_grad()
def test_every_option_of_a_layer_matters(pair) -> None:
    """Without its window, rope, softcap or scale a model of these weights is another: the comparisons see them."""
    ours = pair[1].cpu()
    config, tokens = ours.config, torch.arange(60)[None]
    without = {
        "layers": (), "softcap": 0.0, "logit_softcap": 0.0, "attention_scale": None,
    }  # fmt: skip
    for name, value in without.items():
        if getattr(config, name) != value:
            other = changed(ours, **{name: value})
            assert (other(tokens) - ours(tokens)).abs().max() > 50 * TOLERANCE, name


@torch.no_grad()
def test_bf16_is_as_near_as_transformers_bf16(pair) -> None:
    """The error rule on logits: twice transformers' own error at this dtype, and two roundings."""
    theirs, ours = (copy.deepcopy(model.cpu()) for model in pair)
    tokens = torch.arange(60)[None]
    exact = theirs.double()(tokens).logits
    error = (theirs.bfloat16()(tokens).logits.double() - exact).abs().max()
    rounding = ((exact + 0.3).bfloat16() - 0.3 - exact).abs().max()
    plain = ours.bfloat16()
    for form in (plain, plain.for_inference()):
        assert (form(tokens).double() - exact).abs().max() <= 2 * error + 2 * rounding


def test_layers_say_how_they_attend() -> None:
    """What a cache of another engine is asked for."""
    model = Transformer(
        ModelConfig.from_hf({**reference("gemma2").config.to_dict(), "model_type": "gemma2"})
    )
    first, second = (model.layers[i].self_attn.mask_options for i in range(2))
    assert first.keywords() == {"window": (WINDOW - 1, 0), "softcap": 5.0, "scale": 20**-0.5}
    assert second.keywords() == {"softcap": 5.0, "scale": 20**-0.5}
    fused = model.for_inference()
    assert [block.self_attn.mask_options for block in fused.layers] == [first, second, first]
    plain = Transformer(ModelConfig("llama", 64, 32, 48, 1, 2, 1, 16, 8))
    assert plain.layers[0].self_attn.mask_options.keywords() == {}


class Forgetful:
    """A cache that knows no options."""

    def __init__(self) -> None:
        self.lengths = torch.zeros(1, dtype=torch.int32)

    def append(self, layer, k, v) -> None:
        self.kv = k, v

    def attend(self, layer, q):
        return q


def test_a_cache_without_options_refuses_a_layer_that_has_them() -> None:
    model = Transformer(
        ModelConfig("gemma2", 64, 32, 48, 1, 2, 1, 16, 8, softcap=50.0)
    )  # fmt: skip
    with torch.no_grad(), pytest.raises(TypeError, match="unexpected keyword argument 'softcap'"):
        model(torch.tensor([[1, 2]]), Forgetful())


@pytest.mark.parametrize("form", ["new", "hub"])
@torch.no_grad()
def test_the_text_model_of_a_gemma_3_that_takes_images(tmp_path, form: str) -> None:
    """As transformers saves it, and with the names of the hub's files."""
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    text = reference("gemma3").config
    config = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    theirs = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    for parameter in theirs.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path)
    if form == "hub":
        path = tmp_path / "model.safetensors"
        tensors = {
            name.replace("model.language_model.", "language_model.model.").removeprefix("model."): x
            for name, x in safetensors_torch.load_file(path).items()
        }
        safetensors_torch.save_file(tensors, path)
    tokens = torch.arange(60)[None]
    expected = theirs(tokens, token_type_ids=torch.zeros_like(tokens)).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(load_model(tmp_path)(tokens), expected, atol=TOLERANCE, rtol=0)
    raw = json.loads((tmp_path / "config.json").read_text())
    for changes, message in (
        ({"quantization_config": {"bits": 4}}, "quantization_config must be absent"),
        ({"text_config": {"model_type": "gemma2"}}, "text_config must have model_type gemma3_text"),
        ({"architectures": ["Gemma3Model"]}, "architectures must be"),
        ({"tie_word_embeddings": False, "text_config": {**raw["text_config"], "tie_word_embeddings": True}},
         "tie_word_embeddings must be the same in text_config, got True"),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=message):
            ModelConfig.from_hf({**raw, **changes})
