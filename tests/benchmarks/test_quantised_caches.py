"""The KL divergence that `quantised_caches` reports, on a small random model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks import quantised_caches
from benchmarks.__main__ import main
from benchmarks.quantised_caches import compare, teacher_forced
from benchmarks.registry import KV_DTYPES
from benchmarks.results import Results
from tests.engine.tiny import random_model
from torch_fdattn.dist.kv_cache.scales import KV_FORMATS

TOKENS = [(i * i + 3) % 64 for i in range(75)]  # more than are compared at a time


@pytest.fixture
def model():
    return random_model("cpu").for_inference()


def test_formats_are_the_packages() -> None:
    assert tuple(KV_FORMATS) == KV_DTYPES


@pytest.mark.parametrize("chunk", [1, 20, 256])
def test_logits_are_the_models(model, chunk: int) -> None:
    tokens = torch.tensor(TOKENS)
    found = teacher_forced(model, tokens, None, chunk)
    with torch.inference_mode():
        expected = model(tokens[None])[0]
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def test_the_same_cache_changes_nothing(model) -> None:
    tokens = torch.tensor(TOKENS)
    exact, again = (teacher_forced(model, tokens, None) for _ in range(2))
    perplexity = F.cross_entropy(exact[:-1], tokens[1:]).exp().item()
    found = compare(exact, again, tokens)
    assert (found.kl_mean, found.kl_max, found.perplexity_change) == (0, 0, 0)
    assert found.top1_agreement == 100
    assert found.perplexity == pytest.approx(perplexity, rel=1e-5)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_it_is_torchs_own_divergence(model, kv_dtype: str) -> None:
    tokens = torch.tensor(TOKENS)
    logits = [teacher_forced(model, tokens, x).clone() for x in (None, kv_dtype)]
    found = compare(*logits, tokens)
    p, q = (x[:-1].double().log_softmax(-1) for x in logits)
    kl = F.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    assert found.kl_mean == pytest.approx(kl.mean().item(), rel=1e-9)
    assert found.kl_max == pytest.approx(kl.max().item(), rel=1e-9)
    assert 0 < found.kl_mean < found.kl_max
    before, after = (F.cross_entropy(x[:-1], tokens[1:]).exp().item() for x in logits)
    assert found.perplexity_change == pytest.approx(100 * (after / before - 1), abs=1e-3)
    same = (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    assert found.top1_agreement == pytest.approx(100 * same)


def test_two_tokens_by_hand() -> None:
    exact, found = torch.zeros(3, 2), torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0], [9.0, 0.0]])
    result = compare(exact, found, torch.tensor([0, 1, 1]))
    assert result.kl_max == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))
    assert result.kl_mean == pytest.approx(result.kl_max / 2)
    assert result.perplexity == pytest.approx(math.sqrt(2 * 4))  # of 1/2 and 1/4
    assert result.perplexity_change == pytest.approx(100 * (math.sqrt(2) - 1))


class Bytes:
    def encode(self, text: str) -> list[int]:
        return [byte % 64 for byte in text.encode()]


def test_the_command(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(
        quantised_caches, "load_model", lambda name, dtype, device: random_model(device).to(dtype)
    )
    monkeypatch.setattr(quantised_caches, "load_tokenizer", lambda name: Bytes())
    text = tmp_path / "sayings.txt"
    text.write_text("A stitch in time saves nine. " * 3)
    words = f"quantised_caches --device cpu --texts {text} --tokens 40 --json {tmp_path}"
    assert main(words.split()) == 0
    (file,) = tmp_path.glob("*_quantised-caches-fp32.json")
    results = Results.load(file)
    assert {row.case for row in results.rows} == {"smollm2 sayings 40 tokens fp32"}
    by_impl = {row.impl: row.value for row in results.rows if row.metric == "perplexity"}
    assert set(by_impl) == {*KV_DTYPES, "fp32"}
    for row in results.rows:
        if row.metric == "perplexity_change":
            ratio = by_impl[row.impl] / by_impl["fp32"]
            assert row.value == pytest.approx(100 * (ratio - 1), abs=1e-2)
    assert "| smollm2 sayings 40 tokens fp32 |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*words.split(), "--tokens", "129"])
    assert "--tokens must be at most the model's 128, got 129" in capsys.readouterr().err
    text.write_text("A")
    with pytest.raises(SystemExit):
        main(words.split())
    assert "--texts must have two tokens at least, got 1 of sayings" in capsys.readouterr().err
