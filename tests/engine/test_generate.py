"""The generation loop on a small random model: chunks, endings, sampling, statistics, refusals."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torch_fdattn.dist import ShardedKVCache
from torch_fdattn.engine import PromptError, Sampling, Stats, generate
from torch_fdattn.models import ModelConfig, Transformer

CONFIG = ModelConfig(
    architecture="qwen3",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=128,
)
PROMPT = [5, 9, 33, 2, 17, 60, 1]


@pytest.fixture
def model(device):
    return random_model(device)


def random_model(device):
    torch.manual_seed(0)
    model = Transformer(CONFIG).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def cache_for(device, capacity=64, batch=1):
    return ShardedKVCache(2, batch, 2, capacity, 16, dtype=torch.float32, device=device)


@torch.no_grad()
def greedy(model, prompt, count):
    """The definition: the whole sequence scored anew for every token."""
    tokens = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([tokens], device=model.norm.weight.device))
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 512, 10**30])
def test_greedy_tokens_whatever_the_chunks(model, device, chunk):
    widths = []
    model.register_forward_pre_hook(lambda module, inputs: widths.append(inputs[0].shape[1]))
    found = list(generate(model, cache_for(device), PROMPT, 20, prefill_chunk=chunk))
    starts = range(0, len(PROMPT), min(chunk, len(PROMPT)))
    assert widths == [min(chunk, len(PROMPT) - start) for start in starts] + [1] * 19
    assert found == greedy(model, PROMPT, 20)


def test_a_second_prompt_over_what_the_cache_holds(model, device):
    cache = cache_for(device)
    first = list(generate(model, cache, PROMPT, 5))
    assert cache.lengths.tolist() == [len(PROMPT) + 4]  # the last token is not stored
    second = [first[-1], 40, 41, 42]
    whole = PROMPT + first[:-1] + second
    assert list(generate(model, cache, second, 6, prefill_chunk=3)) == greedy(model, whole, 6)


def test_it_ends_with_an_end_token(model, device):
    tokens = greedy(model, PROMPT, 12)
    end = tokens[4]
    found = list(generate(model, cache_for(device), PROMPT, 12, eos_ids=[end]))
    assert found == tokens[: tokens.index(end) + 1]


def test_the_capacity_is_used_to_the_last_place(model, device):
    cache = cache_for(device, capacity=len(PROMPT) + 9)
    assert len(list(generate(model, cache, PROMPT, 10))) == 10
    assert int(cache.lengths) == cache.capacity


@pytest.mark.parametrize(
    ("prompt", "count", "error", "message"),
    [
        ([], 5, PromptError, "prompt must have at least one token, got none"),
        ([1, 64], 5, PromptError, "prompt must hold token ids from 0 to 63, got 1 to 64"),
        ([-1, 3], 5, PromptError, "prompt must hold token ids from 0 to 63, got -1 to 3"),
        (
            [1] * 60,
            6,
            PromptError,
            "prompt of 60 tokens and 6 new ones, after 0 held, need 65 places, the cache has 64",
        ),
        ([1], 0, ValueError, "max_new_tokens must be at least 1, got 0"),
    ],
)
def test_bad_prompts_are_refused_at_once(model, device, prompt, count, error, message):
    with pytest.raises(error, match=message):
        generate(model, cache_for(device), prompt, count)


def test_bad_arguments_are_refused(model, device):
    with pytest.raises(ValueError, match="prefill_chunk must be at least 1, got 0"):
        generate(model, cache_for(device), PROMPT, 5, prefill_chunk=0)
    with pytest.raises(ValueError, match="cache must have batch 1, got 2"):
        generate(model, cache_for(device, batch=2), PROMPT, 5)
    for value in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"temperature must be at least 0 and .*, got {value}"):
            Sampling(temperature=value)
    for value in (-(2**63) - 1, 2**64):
        with pytest.raises(ValueError, match=rf"seed must be from -2\*\*63 to .*, got {value}"):
            Sampling(seed=value)
    for value in (-(2**63), 2**64 - 1):
        Sampling(seed=value).generator(torch.device(device))
    with pytest.raises(ValueError, match=r"top_p must be in \(0, 1\], got 0"):
        Sampling(top_p=0)


def one_rank(rank: int, folder: Path) -> None:
    """Tokens of this rank: greedy, then drawn with a seed of its own."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = dist.group.WORLD
    found = []
    for sampling in (Sampling(), Sampling(temperature=2.0, seed=rank)):
        cache = ShardedKVCache(
            2, 1, 2, 64, 16,
            dtype=torch.float32, device="cpu", group_name=group.group_name, kv_block=4,
        )  # fmt: skip
        tokens = generate(random_model("cpu"), cache, PROMPT, 20, sampling=sampling, group=group)
        found.append(list(tokens))
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def test_ranks_agree_though_each_would_draw_otherwise(tmp_path):
    torch.multiprocessing.spawn(one_rank, (tmp_path,), nprocs=2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first[0] == greedy(random_model("cpu"), PROMPT, 20)
    assert first[1] != first[0]


def test_the_seed_decides(model, device):
    def draw(seed):
        sampling = Sampling(temperature=1.5, seed=seed)
        return list(generate(model, cache_for(device), PROMPT, 30, sampling=sampling))

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)
    assert draw(None) != draw(None)


def test_draws_follow_the_tempered_distribution(device):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], device=device).expand(20000, -1)
    sampling = Sampling(temperature=0.7, seed=0)
    drawn = sampling.draw(logits, sampling.generator(logits.device)).flatten()
    found = torch.bincount(drawn, minlength=4) / len(drawn)
    torch.testing.assert_close(found, torch.softmax(logits[0] / 0.7, 0), atol=0.015, rtol=0)


@pytest.mark.parametrize(("top_p", "kept"), [(0.45, [2]), (0.55, [0, 2]), (0.85, [0, 1, 2])])
def test_top_p_keeps_the_smallest_set_that_holds_it(device, top_p, kept):
    weights = torch.tensor([0.25, 0.2, 0.5, 0.05], device=device)
    sampling = Sampling(temperature=1.0, top_p=top_p, seed=0)
    logits = weights.log().expand(5000, -1)
    drawn = sampling.draw(logits, sampling.generator(logits.device)).flatten()
    found = torch.bincount(drawn, minlength=4) / len(drawn)
    expected = torch.zeros_like(weights)
    expected[kept] = weights[kept] / weights[kept].sum()
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0)
    assert found[[i for i in range(4) if i not in kept]].sum() == 0


def test_a_tiny_top_p_or_temperature_is_greedy(model, device):
    expected = greedy(model, PROMPT, 15)
    for sampling in (
        Sampling(1.0, top_p=1e-9), Sampling(1.0, top_p=1e-300), Sampling(1e-4), Sampling(1e-40),
        Sampling(5e-324, top_p=0.5),
    ):  # fmt: skip
        found = generate(model, cache_for(device), PROMPT, 15, sampling=sampling)
        assert list(found) == expected


def test_statistics(model, device):
    stats, cache = Stats(), cache_for(device)
    assert (stats.tokens_per_s, stats.gb_per_s) == (0, 0)
    list(generate(model, cache, PROMPT, 4, stats=stats))
    assert (stats.prompt_tokens, stats.new_tokens) == (len(PROMPT), 4)
    assert stats.first_token_s > 0
    assert stats.tokens_per_s == pytest.approx(3 / stats.decode_s)
    # three steps: all weights but the input embedding, and a cache of 8, 9 and 10 tokens
    weights = sum(p.nbytes for p in model.parameters()) - model.embed_tokens.weight.nbytes
    per_token = 2 * 2 * 2 * 16 * 4  # K and V, layers, heads, head_dim, fp32
    assert stats.decode_bytes == 3 * weights + (8 + 9 + 10) * per_token


def test_the_callers_time_is_not_counted(model, device):
    stats = Stats()
    for _ in generate(model, cache_for(device), PROMPT, 4, stats=stats):
        time.sleep(0.2)
    assert stats.decode_s < 0.4
