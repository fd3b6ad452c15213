"""The model against transformers' on random weights: logits, gradients, and every way of caching."""

from __future__ import annotations

import pytest
import torch

from tests.models.hf_models import CONFIGS, reference
from torch_fdattn.dist import ShardedKVCache
from torch_fdattn.models import load_model

TOLERANCE = 2e-4  # logits spread over about ±5


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request, tmp_path_factory):
    """(transformers' model, ours read from the folder that transformers saved)."""
    theirs = reference(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder, max_shard_size="200KB" if request.param == "qwen3" else "1GB")
    return theirs, load_model(folder)


@pytest.fixture
def tokens(pair):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(pair[0].config.vocab_size, (2, 90), generator=generator)


def cache_for(model, device, capacity=96):
    config = model.config
    return ShardedKVCache(
        config.num_layers,
        2,
        config.num_kv_heads,
        capacity,
        config.head_dim,
        dtype=torch.float32,
        device=device,
    )


@torch.no_grad()
def test_logits_equal_transformers(pair, tokens, device):
    theirs, ours = (model.to(device) for model in pair)
    expected = theirs(tokens.to(device)).logits
    assert expected.abs().max() > 3  # the weights do something
    torch.testing.assert_close(ours(tokens.to(device)), expected, atol=TOLERANCE, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("chunks", [[90], [1] * 12, [20, 1, 1, 40, 16, 2, 10]], ids=str)
def test_cached_steps_equal_the_uncached_logits(pair, tokens, device, chunks):
    ours = pair[1].to(device)
    tokens = tokens[:, : sum(chunks)].to(device)
    cache = cache_for(ours, device)
    steps = torch.cat([ours(chunk, cache) for chunk in tokens.split(chunks, dim=1)], dim=1)
    torch.testing.assert_close(steps, ours(tokens), atol=TOLERANCE, rtol=0)
    assert cache.lengths.tolist() == [sum(chunks)] * 2


@torch.no_grad()
def test_last_only_is_the_last_row(pair, tokens, device):
    ours, tokens = pair[1].to(device), tokens.to(device)
    last = ours(tokens, last_only=True)
    torch.testing.assert_close(last, ours(tokens)[:, -1:], atol=TOLERANCE, rtol=0)


@torch.no_grad()
def test_sequences_of_different_lengths_in_one_cache(pair, tokens, device):
    """Rows prefilled with padding, their lengths then set apart: padding is overwritten, not seen."""
    ours, tokens = pair[1].to(device), tokens.to(device)
    cache, lengths = cache_for(ours, device), [30, 17]
    ours(tokens[:, :30], cache)
    cache.lengths.copy_(torch.tensor(lengths))
    following = torch.stack([row[n : n + 3] for row, n in zip(tokens, lengths, strict=True)])
    steps = torch.cat([ours(following[:, i : i + 1], cache) for i in range(3)], dim=1)
    for row, n in enumerate(lengths):
        whole = ours(tokens[row : row + 1, : n + 3])
        torch.testing.assert_close(steps[row], whole[0, n:], atol=TOLERANCE, rtol=0)


def test_gradients_equal_transformers(pair, tokens, device):
    theirs, ours = (model.to(device) for model in pair)
    tokens = tokens[:, :40].to(device)
    losses = []
    for model in (theirs, ours):
        model.requires_grad_(True).zero_grad()
        logits = model(tokens)
        logits = getattr(logits, "logits", logits)
        losses.append(
            torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        )
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0])
    expected = {name.removeprefix("model."): p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(
            parameter.grad,
            expected[name],
            atol=1e-4 * scale,
            rtol=1e-3,
            msg=lambda m, n=name: n + m,
        )
    for model in (theirs, ours):
        model.requires_grad_(False).zero_grad()


@torch.no_grad()
def test_rope_survives_changes_of_dtype(pair, tokens):
    """Frequencies stay fp32: rounded to bf16 they would turn distant positions wrongly."""
    ours = pair[1].cpu()
    before = ours.rotary.frequencies.clone()
    ours.to(torch.bfloat16)
    assert ours.rotary.frequencies.dtype is torch.float32
    assert torch.equal(ours.rotary.frequencies, before)
    assert ours(tokens[:, :8]).dtype is torch.bfloat16
    ours.to(torch.float32)
    ours.load_state_dict(
        {name.removeprefix("model."): t for name, t in pair[0].cpu().state_dict().items()},
        strict=False,
    )


@torch.no_grad()
def test_the_inference_form_has_the_same_logits(pair, tokens, device):
    """At once, and in cached steps."""
    model, tokens = pair[1].to(device), tokens.to(device)
    fused, expected = model.for_inference(), model(tokens)
    torch.testing.assert_close(fused(tokens), expected, atol=TOLERANCE, rtol=0)
    last = fused(tokens, last_only=True)
    torch.testing.assert_close(last, expected[:, -1:], atol=TOLERANCE, rtol=0)
    cache = cache_for(model, device)
    chunks = tokens.split([20, 1, 1, 40, 16, 2, 10], dim=1)
    steps = torch.cat([fused(chunk, cache) for chunk in chunks], dim=1)
    torch.testing.assert_close(steps, expected, atol=TOLERANCE, rtol=0)
