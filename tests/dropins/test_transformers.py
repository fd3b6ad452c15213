"""attn_implementation="fdattn" against "eager", in small random models whose weights make attention matter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.launched import launched
from torch_fdattn.dropins import transformers as dropin
from torch_fdattn.ops.library import launches

transformers = pytest.importorskip("transformers", reason="transformers is the reference here")
hf = pytest.importorskip("transformers.masking_utils", reason="transformers is the reference here")


SMALL = dict(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


WINDOW = {"head_dim": 16, "sliding_window": 6}


DECODERS = {
    "Llama": {},
    "Mistral": {"sliding_window": 6},
    "Gemma2": {**WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "GptOss": {**WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
}


LENGTH, PADDED = 20, 5


@pytest.fixture(scope="module", autouse=True)
def registered():
    dropin.register()
    dropin.register()  # twice is once


@pytest.fixture(autouse=True)
def counted():
    launches.clear()


def models(name: str, head: str = "ForCausalLM", **config):
    """The same weights under eager and under ours."""
    made = []
    for attention in ("eager", "fdattn"):
        made_config = getattr(transformers, f"{name}Config")(
            **config, attn_implementation=attention
        )
        made.append(getattr(transformers, name + head)(made_config).eval())
    torch.manual_seed(0)
    for parameter in made[0].parameters():
        # Small ones, as models are born with, would spread all attention evenly.
        torch.nn.init.normal_(parameter, std=0.2)
    made[1].load_state_dict(made[0].state_dict())
    return made


def decoders(name: str):
    return models(name, **SMALL, **DECODERS[name])


def tokens(side: str = "none", length: int = LENGTH):
    """Two rows of tokens, the first padded on that side, and their attention mask."""
    ids = torch.randint(3, 64, (2, length))
    mask = torch.ones_like(ids)
    if side != "none":
        mask[0, : PADDED if side == "left" else None] = side != "left"
        if side == "right":
            mask[0, -PADDED:] = 0
    return ids * mask, mask


def run(model, ids, mask, **options):
    """Logits at tokens, and gradients of all parameters."""
    model.zero_grad()
    logits = model(ids, attention_mask=mask, **options).logits[mask.bool()]
    logits.logsumexp(-1).sum().backward()
    return logits.detach(), [x.grad for x in model.parameters() if x.grad is not None]


def agree(found, wanted):
    logits, gradients = found
    torch.testing.assert_close(logits, wanted[0], rtol=1e-4, atol=1e-4)
    assert len(gradients) == len(wanted[1]) > 0
    for a, b in zip(gradients, wanted[1], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_logits_and_gradients(name, side):
    eager, ours = decoders(name)
    ids, mask = tokens(side)
    agree(run(ours, ids, mask), run(eager, ids, mask))
    assert launches == {"attention_forward/cpu": 2, "attention_backward/cpu": 2}


def test_without_an_attention_mask():
    eager, ours = decoders("Mistral")
    ids, _ = tokens()
    torch.testing.assert_close(ours(ids).logits, eager(ids).logits, rtol=1e-4, atol=1e-4)


def test_gradient_checkpointing():
    eager, ours = decoders("Gemma2")
    ids, mask = tokens("left")
    wanted = run(eager, ids, mask)
    ours.gradient_checkpointing_enable()
    ours.train()  # without dropout in these
    agree(run(ours, ids, mask, use_cache=False), wanted)
    assert launches["attention_forward/cpu"] == 4


GENERATE = dict(max_new_tokens=8, do_sample=False, use_cache=True)


_OTHERS = (pytest.param(name, marks=pytest.mark.slow) for name in ("Mistral", "GptOss"))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2", *_OTHERS])
def test_greedy_text(name, side, cache):
    eager, ours = decoders(name)
    ids, mask = tokens(side)
    options = {**GENERATE, "attention_mask": mask, "eos_token_id": None}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    found = ours.generate(ids, **options)
    counted = dict(launches)
    assert torch.equal(found, eager.generate(ids, **options))
    if name == "Llama" and side == "none":  # all steps but the prompt's
        assert counted == {"attention_forward/cpu": 2, "decode_forward/cpu": 14}


def test_a_prompt_in_chunks():
    """Several queries over a cache of more keys stand at its end; by one mask each."""
    eager, ours = decoders("Mistral")
    ids, mask = tokens("left")
    results = []
    for model in (eager, ours):
        cache = transformers.DynamicCache(config=model.config)
        parts = []
        for start, end in ((0, 7), (7, 17), (17, 20)):
            with torch.no_grad():
                out = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache)
            parts.append(out.logits)
        results.append(torch.cat(parts, 1)[mask.bool()])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_packed_sequences_by_position_ids(name):
    eager, ours = decoders(name)
    ids, _ = tokens()
    ids, positions = ids[:1], torch.cat([torch.arange(n) for n in (9, 4, 7)])[None]
    options = {"position_ids": positions, "use_cache": False}
    wanted = eager(ids, **options).logits
    torch.testing.assert_close(ours(ids, **options).logits, wanted, rtol=1e-4, atol=1e-4)
    assert launches["attention_forward/cpu"] == 2
    # As DataCollatorWithFlattening gives them for flash attention.
    cu = torch.tensor([0, 9, 13, 20], dtype=torch.int32)
    options |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 9, "max_length_k": 9}
    torch.testing.assert_close(ours(ids, **options).logits, wanted, rtol=1e-4, atol=1e-4)
    assert launches["varlen_attention_forward/cpu"] == 2


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_bert(side):
    config = {k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "eos_token_id")}
    eager, ours = models("Bert", "ForMaskedLM", **config)
    ids, mask = tokens(side)
    agree(run(ours, ids, mask), run(eager, ids, mask))
    assert launches["attention_forward/cpu"] == 2


def test_whisper():
    """An encoder without a mask, a causal decoder, and attention from the one to the other."""
    eager, ours = models(
        "Whisper", "ForConditionalGeneration", vocab_size=64, d_model=64, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
        num_mel_bins=8, max_source_positions=12, max_target_positions=32, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    inputs = {"input_features": torch.randn(2, 8, 24), "decoder_input_ids": tokens(length=9)[0]}
    with torch.no_grad():
        torch.testing.assert_close(
            ours(**inputs).logits, eager(**inputs).logits, rtol=1e-4, atol=1e-4
        )
    assert launches["attention_forward/cpu"] == 2
    assert launches["decode_forward/cpu"] == 1  # nine queries over the encoder's twelve keys


@pytest.mark.parametrize("side", ["none", "right"])
def test_position_bias(side):
    """T5's, which joins the causal mask, padding, or nothing, and whose gradient is wanted."""
    config = {
        "vocab_size": 64,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 64,
        "num_layers": 1,
        "num_heads": 4,
    }
    eager, ours = models(
        "T5", "ForConditionalGeneration", **config, dropout_rate=0.0, decoder_start_token_id=0
    )
    ids, mask = tokens(side)
    target, target_mask = tokens(length=9)
    options = {"decoder_input_ids": target, "decoder_attention_mask": target_mask}

    if not ours._can_set_attn_implementation():  # before 5.15
        with pytest.raises(NotImplementedError, match="does not take its attention from"):
            ours(ids, attention_mask=mask, **options)
        return

    def both(model):
        model.zero_grad()
        logits = model(ids, attention_mask=mask, **options).logits
        logits.logsumexp(-1).sum().backward()
        return logits.detach(), [x.grad for x in model.parameters() if x.grad is not None]

    agree(both(ours), both(eager))


def test_a_model_that_asks_for_masks_is_given_them():
    """Doge adds its own to it, in steps over a static cache too, where others are told lengths."""
    config = {**SMALL, "keep_window_size": 6}
    eager, ours = models("Doge", **config)
    ids, mask = tokens("none")
    agree(run(ours, ids, mask), run(eager, ids, mask))
    options = {**GENERATE, "attention_mask": mask, "eos_token_id": None, "disable_compile": True}
    for more in ({}, {"cache_implementation": "static"}):
        wanted = eager.generate(ids, **options, **more)
        assert torch.equal(ours.generate(ids, **options, **more), wanted)
    step = {"q_offset": torch.tensor(7), "allow_is_causal_skip": False}
    forms = [
        dropin.fdattn_mask(2, 1, 32, **step, config=model.config).dtype
        for model in (ours, decoders("Llama")[1])
    ]
    assert forms == [torch.bool, torch.int32]


@pytest.mark.slow
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_compiled(name, side):
    eager, ours = decoders(name)
    ids, mask = tokens(side)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found, wanted = (
            m(ids, attention_mask=mask, use_cache=False).logits for m in (compiled, eager)
        )
    torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()], rtol=1e-4, atol=1e-4)
    assert launches["attention_forward/cpu"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("side", ["none", "left"])
def test_generating_with_a_compiled_step(side):
    """As generate() does on GPUs with a static cache: masks are made outside of the graph, which keeps decode."""
    eager, ours = decoders("Llama")
    ids, mask = tokens(side)
    compiling = transformers.CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    compiling._compile_all_devices = True
    options = {
        **GENERATE,
        "attention_mask": mask,
        "eos_token_id": None,
        "cache_implementation": "static",
    }
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = ours.generate(ids, **options, compile_config=compiling)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    counted = dict(launches)
    assert torch.equal(found, eager.generate(ids, **options, disable_compile=True))
    assert counted["decode_forward/cpu"] >= 14


@pytest.mark.gpu
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_on_a_gpu(name, side):
    eager, ours = (model.cuda() for model in decoders(name))
    ids, mask = (x.cuda() for x in tokens(side))
    agree(run(ours, ids, mask), run(eager, ids, mask))
    assert launched()["attention_forward"] == launched()["attention_backward"] == 2
    if side == "right":
        return
    options = {**GENERATE, "attention_mask": mask, "eos_token_id": None}
    wanted = eager.generate(ids, **options)
    assert torch.equal(ours.generate(ids, **options), wanted)
    static = {"cache_implementation": "static", "disable_compile": name != "Llama"}
    assert torch.equal(ours.generate(ids, **options, **static), wanted)


def qkv(heads=4, queries=8, keys=8):
    return [torch.randn(2, heads, n, 16) for n in (queries, keys, keys)]


LAYER = SimpleNamespace(is_causal=True)


def test_dropout_drops_and_keeps_the_mean():
    """Over rows of the batch that are equal but for what is dropped."""
    q, k, v = (x[:1].expand(1000, -1, -1, -1) for x in qkv())
    drawn = dropin.fdattn_attention(LAYER, q, k, v, None, 0.5)[0]
    wanted = dropin.fdattn_attention(LAYER, q[:1], k[:1], v[:1], None)[0]
    assert (drawn[0] - drawn[1]).abs().max() > 0.1
    error = (drawn.mean(0) - wanted) / (drawn.std(0) / len(drawn) ** 0.5 + 1e-6)
    assert error.square().mean() < 1.5  # of a standard normal: 1


def test_dropout_of_a_model_in_training():
    _, ours = models("Llama", **SMALL, attention_dropout=0.5)
    ids, _ = tokens()
    still, again = (ours(ids).logits for _ in range(2))
    assert torch.equal(still, again)
    ours.train()
    a, b = (ours(ids).logits for _ in range(2))
    assert not torch.allclose(a, b)


def test_users_float_mask():
    q, k, v = qkv()
    bias = torch.randn(2, 1, 8, 8)
    found = dropin.fdattn_attention(LAYER, q, k, v, bias, scaling=0.3)[0]
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, scale=0.3)
    torch.testing.assert_close(found, wanted.transpose(1, 2))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (
            torch.ones(2, 8, dtype=torch.bool),
            r"attention_mask must have 4 dimensions.*got shape \(2, 8\)",
        ),
        (
            torch.ones(2, 1, 8, 8, dtype=torch.int32),
            "attention_mask must be boolean or floating point.*int32",
        ),
        (
            torch.ones(2, 4, 8, 8, dtype=torch.uint8),
            "attention_mask must be boolean or floating point.*uint8",
        ),
    ],
)
def test_masks_that_are_not_ours(mask, message):
    with pytest.raises(ValueError, match=message):
        dropin.fdattn_attention(LAYER, *qkv(), mask)
