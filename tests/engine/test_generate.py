"""One sequence through the engine: chunks, endings, sampling, statistics, refusals."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.engine.tiny import POSITION, PROMPT, PROMPTS, greedy, random_model
from torch_fdattn.engine import Engine, PromptError, Sampling, Stats


@pytest.fixture
def model(device):
    return random_model(device)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 512, 10**30])
def test_greedy_tokens_whatever_the_chunks(model, chunk):
    widths = []
    engine = Engine(model, capacity=64, prefill_chunk=chunk, cuda_graph=False)
    engine.model.register_forward_pre_hook(lambda module, inputs: widths.append(inputs[0].shape[1]))
    found = list(engine.stream(PROMPT, 20))
    starts = range(0, len(PROMPT), min(chunk, len(PROMPT)))
    assert widths == [min(chunk, len(PROMPT) - start) for start in starts] + [1] * 19
    assert found == greedy(model, PROMPT, 20)


def test_a_second_prompt_over_what_the_cache_holds(model):
    engine = Engine(model, capacity=64, prefill_chunk=3)
    first = list(engine.stream(PROMPT, 5))
    assert engine.cache.lengths.tolist() == [len(PROMPT) + 4]  # the last token is not stored
    second = [first[-1], 40, 41, 42]
    whole = PROMPT + first[:-1] + second
    assert list(engine.stream(second, 6)) == greedy(model, whole, 6)


def test_it_ends_with_an_end_token(model):
    tokens = greedy(model, PROMPT, 12)
    end = tokens[4]
    found = list(Engine(model, capacity=64).stream(PROMPT, 12, eos_ids=[end]))
    assert found == tokens[: tokens.index(end) + 1]


def test_the_capacity_is_used_to_the_last_place(model):
    engine = Engine(model, capacity=len(PROMPT) + 9)
    assert len(list(engine.stream(PROMPT, 10))) == 10
    assert engine.cache.lengths.tolist() == [engine.capacity]


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
def test_bad_prompts_are_refused_at_once(model, prompt, count, error, message):
    with pytest.raises(error, match=message):
        Engine(model, capacity=64, cuda_graph=False).stream(prompt, count)


def test_a_prompt_is_checked_against_what_is_held(model):
    engine = Engine(model, capacity=64, cuda_graph=False)
    engine.prefill([[1] * 50])
    message = "prompt of 10 tokens and 6 new ones, after 50 held, need 65 places, the cache has 64"
    with pytest.raises(PromptError, match=message):
        engine.stream([1] * 10, 6)


def one_rank(rank: int, folder: Path) -> None:
    """Tokens of this rank: greedy, then drawn with a seed of its own."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = dist.group.WORLD
    found = []
    for sampling in (Sampling(), Sampling(temperature=2.0, seed=rank)):
        engine = Engine(random_model("cpu"), capacity=64, kv_group=group.group_name, kv_block=4)
        found.append(list(engine.stream(PROMPT, 20, sampling=sampling)))
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.slow  # test_mesh.py has it of batches
def test_ranks_agree_though_each_would_draw_otherwise(tmp_path):
    torch.multiprocessing.spawn(one_rank, (tmp_path,), nprocs=2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first[0] == greedy(random_model("cpu"), PROMPT, 20)
    assert first[1] != first[0]


def test_the_seed_decides(model):
    def draw(seed):
        sampling = Sampling(temperature=1.5, seed=seed)
        return list(Engine(model, capacity=64).stream(PROMPT, 30, sampling=sampling))

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)
    assert draw(None) != draw(None)


def test_a_tiny_top_p_or_temperature_is_greedy(model):
    engine = Engine(model, capacity=64)
    expected = greedy(model, PROMPT, 15)
    for sampling in (
        Sampling(1.0, top_p=1e-9), Sampling(1.0, top_p=1e-300), Sampling(1e-4), Sampling(1e-40),
        Sampling(5e-324, top_p=0.5),
    ):  # fmt: skip
        engine.reset()
        assert list(engine.stream(PROMPT, 15, sampling=sampling)) == expected


def test_statistics(model):
    stats = Stats()
    assert (stats.tokens_per_s, stats.gb_per_s) == (0, 0)
    list(Engine(model, capacity=64).stream(PROMPT, 4, stats=stats))
    assert (stats.prompt_tokens, stats.new_tokens) == (len(PROMPT), 4)
    assert stats.first_token_s > 0
    assert stats.tokens_per_s == pytest.approx(3 / stats.decode_s)
    # three steps: all weights but the input embedding, and a cache of 8, 9 and 10 tokens
    weights = sum(p.nbytes for p in model.parameters()) - model.embed_tokens.weight.nbytes
    assert stats.decode_bytes == 3 * weights + (8 + 9 + 10) * POSITION


def test_statistics_count_over_the_batch(model):
    """Four sequences, of which one ends with its second token."""
    stats, engine = Stats(), Engine(model, batch=4, capacity=64)
    end = greedy(model, PROMPTS[0], 2)[1]
    steps = list(engine.generate(PROMPTS, 3, eos_ids=[end], stats=stats))
    tokens = [token for step in steps for token in step if token is not None]
    assert steps[2][0] is None
    assert (stats.prompt_tokens, stats.new_tokens) == (sum(map(len, PROMPTS)), len(tokens))
    assert stats.tokens_per_s == pytest.approx((len(tokens) - 4) / stats.decode_s)


def test_the_callers_time_is_not_counted(model):
    stats = Stats()
    for _ in Engine(model, capacity=64).stream(PROMPT, 4, stats=stats):
        time.sleep(0.2)
    assert stats.decode_s < 0.4
