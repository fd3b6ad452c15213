"""transformers' models with random weights: every attention is rewritten or reported, and logits agree."""

import pytest
import torch

pytest.importorskip("transformers")
import transformers

from tests.compile_backend.harness import Recorder

SMALL = dict(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)  # fmt: skip


def model(name, attention):
    torch.manual_seed(0)
    if name == "Bert":
        config = transformers.BertConfig(**SMALL, attn_implementation=attention)
        return transformers.BertModel(config).eval()
    if name == "GPT2":
        config = transformers.GPT2Config(
            vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=64,
            attn_implementation=attention,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config).eval()
    extra = {"head_dim": 16} if name == "Qwen3" else {}
    config = getattr(transformers, f"{name}Config")(
        **SMALL, **extra, num_key_value_heads=2, attn_implementation=attention
    )
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def run(found, tokens, **options):
    torch._dynamo.reset()
    backend = Recorder("eager")
    compiled = torch.compile(
        lambda x: found(x, **options)[0], backend=backend, dynamic=options.pop("dynamic", None)
    )
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(tokens), found(tokens, **options)[0], rtol=1e-4, atol=1e-5
        )
    return backend.found.report


#: The others are alike, and slow ones: the models' own imports and graphs take most of the time.
QUICK = [("GPT2", "eager")]
ALL = [(name, how) for name in ("Llama", "Qwen3", "GPT2", "Bert") for how in ("sdpa", "eager")]


@pytest.mark.parametrize(
    ("name", "attention"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in ALL],
)
def test_every_site_is_rewritten(name, attention):
    report = run(model(name, attention), torch.randint(0, 64, (2, 20)))
    assert [site.op for site in report] == ["attention"] * 2, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_stays_beside_the_causal_flag(attention):
    found = model("Llama", attention)
    padding = torch.ones(2, 20, dtype=torch.long)
    padding[0, :5] = 0
    report = run(found, torch.randint(0, 64, (2, 20)), attention_mask=padding)
    for site in report:
        assert site.op == "attention"
        assert "mask: causal and explicit padding (mask-data)" in site.notes


@pytest.mark.slow
def test_returned_weights_are_reported():
    found = model("GPT2", "eager")
    tokens = torch.randint(0, 64, (2, 20))
    report = run(lambda x: found(x, output_attentions=True).attentions, tokens)
    assert report.reasons == ["scores-used"] * 2


@pytest.mark.slow
def test_training():
    found = model("Llama", "eager").train()
    tokens = torch.randint(0, 64, (2, 20))
    torch._dynamo.reset()
    backend = Recorder("aot_eager")
    compiled = torch.compile(lambda x: found(x, labels=x).loss, backend=backend)
    grads = []
    for loss in (compiled, lambda x: found(x, labels=x).loss):
        found.zero_grad()
        loss(tokens).backward()
        grads.append([x.grad for x in found.parameters()])
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    assert [site.op for site in backend.found.report] == ["attention"] * 2
