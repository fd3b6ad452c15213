"""A static batch on a small random model: ragged prompts, chunks, endings, reuse, refusals."""

from __future__ import annotations

import pytest
import torch

from tests.engine.tiny import PROMPT, PROMPTS, greedy, random_model
from torch_fdattn.engine import Engine, PromptError, Sampling
from torch_fdattn.models import InferenceTransformer


@pytest.fixture
def model(device):
    return random_model(device)


def batch_of(model, **options) -> Engine:
    return Engine(model, batch=len(PROMPTS), capacity=48, **options)


def columns(steps) -> list[list[int]]:
    """The tokens of each sequence, from the tokens of each step."""
    return [[t for t in column if t is not None] for column in zip(*steps, strict=True)]


@pytest.mark.parametrize(
    ("architecture", "chunk"),
    [*(("qwen3", chunk) for chunk in (1, 3, 7, 19, 20, 10**30)), ("llama", 2), ("llama", 512)],
)
def test_ragged_prompts_give_the_tokens_of_each_alone(device, architecture, chunk):
    model = random_model(device, architecture)
    engine = batch_of(model, prefill_chunk=chunk)
    found = columns(engine.generate(PROMPTS, 20))
    assert found == [greedy(model, prompt, 20) for prompt in PROMPTS]
    held = [len(prompt) + 19 for prompt in PROMPTS]  # the last token is not stored
    assert engine.cache.held == engine.cache.lengths.tolist() == held


def test_it_runs_the_inference_form(model):
    """Of a plain model, over its weights; other models, and with fused=False any, run as they are, hooks included."""
    engine = batch_of(model)
    assert type(engine.model) is InferenceTransformer
    assert engine.model.norm.weight.data_ptr() == model.norm.weight.data_ptr()
    expected, calls = columns(engine.generate(PROMPTS, 3)), []
    model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    assert columns(batch_of(model).generate(PROMPTS, 3)) == expected
    assert not calls
    plain = batch_of(model, fused=False)
    assert plain.model is model
    assert columns(plain.generate(PROMPTS, 3)) == expected
    assert calls
    for other in (engine.model, torch.compile(model, backend="eager")):
        assert batch_of(other).model is other


def test_prefill_gives_the_logits_of_the_last_tokens(model, device):
    engine = batch_of(model, prefill_chunk=6)
    logits = engine.prefill(PROMPTS)
    with torch.no_grad():
        for row, prompt in zip(logits, PROMPTS, strict=True):
            expected = model(torch.tensor([prompt], device=device))[0, -1]
            torch.testing.assert_close(row, expected, atol=2e-4, rtol=1e-4)


def test_step_gives_the_logits_after_its_tokens(model, device):
    engine = batch_of(model)
    engine.prefill(PROMPTS)
    drawn = [3, 1, 4, 1]
    logits = engine.step(torch.tensor(drawn, device=device)[:, None])
    with torch.no_grad():
        for row, prompt, token in zip(logits, PROMPTS, drawn, strict=True):
            expected = model(torch.tensor([[*prompt, token]], device=device))[0, -1]
            torch.testing.assert_close(row, expected, atol=2e-4, rtol=1e-4)


def test_a_step_leaves_inactive_sequences_alone(model, device):
    engine = batch_of(model)
    engine.prefill(PROMPTS)
    before = engine.cache.held
    tokens = torch.tensor([[3], [1], [4], [1]], device=device)
    engine.step(tokens, active=[True, False, False, True])
    held = [before[0] + 1, before[1], before[2], before[3] + 1]
    assert engine.cache.held == engine.cache.lengths.tolist() == held
    fresh = batch_of(model)
    fresh.prefill(PROMPTS)
    for layer in range(2):
        for ours, expected in zip(engine.cache.layer(layer), fresh.cache.layer(layer), strict=True):
            assert torch.equal(ours[1:3], expected[1:3])


def test_each_sequence_ends_by_itself(model):
    alone = [greedy(model, prompt, 16) for prompt in PROMPTS]
    ends = [alone[0][3], alone[3][9]]
    engine = batch_of(model)
    steps = list(engine.generate(PROMPTS, 16, eos_ids=ends))
    expected = []
    for tokens in alone:
        first = min((tokens.index(end) for end in ends if end in tokens), default=15)
        expected.append(tokens[: first + 1])
    assert columns(steps) == expected
    assert len({len(tokens) for tokens in expected}) > 1  # else nothing was tested
    assert len(steps) == max(map(len, expected))
    for column in zip(*steps, strict=True):  # None from the end on
        ended = column.index(None) if None in column else len(column)
        assert set(column[ended:]) <= {None}
    lengths = [len(p) + len(t) - 1 for p, t in zip(PROMPTS, expected, strict=True)]
    assert engine.cache.held == engine.cache.lengths.tolist() == lengths


def test_ragged_prompts_over_ragged_prefixes(model):
    engine = batch_of(model, prefill_chunk=4)
    engine.prefill(PROMPTS)
    second = [[1, 2], [50, 51, 52, 53, 54, 55, 56], [9], [8, 8, 8]]
    found = columns(engine.generate(second, 8))
    wholes = [a + b for a, b in zip(PROMPTS, second, strict=True)]
    assert found == [greedy(model, whole, 8) for whole in wholes]


def test_truncate_keeps_a_prefix(model):
    engine = batch_of(model)
    list(engine.generate(PROMPTS, 9))
    engine.truncate(5)
    held = [*PROMPTS[0], *greedy(model, PROMPTS[0], 9)][:5]
    assert engine.cache.held == engine.cache.lengths.tolist() == [5, 5, 5, 5]
    second = [[1, 2], [50, 51, 52], [9], [8, 8, 8]]
    assert columns(engine.generate(second, 6))[0] == greedy(model, held + second[0], 6)
    engine.truncate(1000)
    assert engine.cache.held == [12, 13, 11, 13]
    with pytest.raises(ValueError, match="length must be at least 0, got -1"):
        engine.truncate(-1)


def test_reset_forgets(model):
    engine = batch_of(model)
    first = list(engine.generate(PROMPTS, 6))
    engine.reset()
    assert engine.cache.held == engine.cache.lengths.tolist() == [0] * 4
    assert list(engine.generate(PROMPTS, 6)) == first


def test_seeds_decide_for_the_whole_batch(model):
    def draw(seed):
        sampling = Sampling(temperature=1.5, seed=seed)
        return list(batch_of(model).generate([PROMPT] * 4, 20, sampling=sampling))

    assert draw(3) == draw(3) != draw(4)
    assert len({tuple(tokens) for tokens in columns(draw(3))}) == 4  # each row draws its own


def test_the_capacity_is_used_to_the_last_place_and_no_further(model, device):
    engine = Engine(model, batch=2, capacity=9, cuda_graph=False)
    engine.prefill([PROMPT, [1]])
    tokens = torch.zeros(2, 1, dtype=torch.int64, device=device)
    engine.step(tokens)
    engine.step(tokens)
    message = "sequence 0 must fit the cache's capacity of 9 tokens, got 1 new tokens after 9"
    with pytest.raises(ValueError, match=message):
        engine.step(tokens)
    assert engine.cache.held == engine.cache.lengths.tolist() == [9, 3]
    engine.step(tokens, active=[False, True])
    assert engine.cache.held == [9, 4]


@pytest.mark.parametrize(
    ("prompts", "count", "error", "message"),
    [
        ([[1]], 5, ValueError, "prompts must be 2, one for each sequence of the .*, got 1"),
        ([[1], []], 5, PromptError, r"prompts\[1\] must have at least one token, got none"),
        (
            [[1], [64]],
            5,
            PromptError,
            r"prompts\[1\] must hold token ids from 0 to 63, got 64 to 64",
        ),
        (
            [[1], [1] * 60],
            6,
            PromptError,
            r"prompts\[1\] of 60 tokens and 6 new ones, after 0 held, need 65 places, the cache has 64",
        ),
        ([1, 2], 5, TypeError, r"prompts\[0\] must be a sequence of token ids, got int"),
        ([[1], [2]], 0, ValueError, "max_new_tokens must be at least 1, got 0"),
    ],
)
def test_bad_prompts_are_refused_at_once(model, prompts, count, error, message):
    engine = Engine(model, batch=2, capacity=64, cuda_graph=False)
    with pytest.raises(error, match=message):
        engine.generate(prompts, count)
    assert engine.cache.held == [0, 0]


def test_prefill_refuses_what_does_not_fit(model):
    engine = Engine(model, batch=2, capacity=64, cuda_graph=False)
    message = r"prompts\[1\] of 65 tokens, after 0 held, need 65 places, the cache has 64"
    with pytest.raises(PromptError, match=message):
        engine.prefill([[1], [1] * 65])
    assert engine.cache.held == [0, 0]


def test_bad_arguments_are_refused(model, device):
    for name in ("batch", "capacity", "prefill_chunk", "kv_block"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            Engine(model, **{"capacity": 8, name: 0})
    engine = Engine(model, batch=2, capacity=8, cuda_graph=False)
    with pytest.raises(ValueError, match=r"tokens must have shape \(2, 1\) like .*, got \(2,\)"):
        engine.step(torch.zeros(2, dtype=torch.int64, device=device))
    tokens = torch.zeros(2, 1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="active must have 2 entries like the batch, got 1"):
        engine.step(tokens, active=[True])
    with pytest.raises(ValueError, match="engine must have batch 1 to stream, got 2"):
        engine.stream(PROMPT, 1)
    with pytest.raises(RuntimeError, match=r"needs an initialised torch\.distributed"):
        Engine(model, capacity=8, tp_group="0")
    with pytest.raises(ValueError, match=r"cuda_graph must be None or False where .* on cpu, got"):
        Engine(model.cpu(), capacity=8, cuda_graph=True)
