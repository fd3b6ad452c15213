"""Drawing on the device against plain formulas, a row at a time."""

from __future__ import annotations

import math

import pytest
import torch

from tests.engine.tiny import PROMPTS, random_model
from torch_fdattn.engine import LLM, SamplingParams
from torch_fdattn.engine.random_numbers import hash64, seed_of_completion, uniform
from torch_fdattn.engine.requests import Request, Sequence
from torch_fdattn.engine.sampler import Constraints, SampleNeeds, draw, keep_top, penalise, sample
from torch_fdattn.engine.sampling_params import NO_TOKEN
from torch_fdattn.engine.scheduler import Chunk, ScheduledStep
from torch_fdattn.engine.sequence_rows import SequenceRows
from torch_fdattn.engine.step_constraints import constraints_of
from torch_fdattn.ops.block_sums import block_sums

VOCAB = 50


def rows_of(params, tokens, prompt_lengths, device):
    """Rows of sequences that have these tokens, and what `sample` takes of them."""
    rows = SequenceRows(len(params), 32, 4, torch.device(device))
    admitted = []
    for row, (own, ids, length) in enumerate(zip(params, tokens, prompt_lengths, strict=True)):
        sequence = Sequence(
            Request("", ids[:length], own), 0, own.seed or row, 32, text=None, matcher=None
        )
        sequence.tokens, sequence.row = ids, row
        admitted.append(sequence)
    rows.update(ScheduledStep([], [], admitted))
    row_ids = torch.arange(len(params), device=device)
    return rows, row_ids, torch.tensor([len(x) for x in tokens], device=device)


def drawn(logits, params, device, constraints=None, tokens=None):
    tokens = [[1, 2, 3]] * len(params) if tokens is None else tokens
    rows, row_ids, lengths = rows_of(params, tokens, [1] * len(params), device)
    needs = SampleNeeds.of(params, [len(x) for x in tokens])
    return sample(logits, rows, row_ids, lengths, needs, constraints or Constraints())


def kept_by_definition(logits: list[float], params: SamplingParams) -> set[int]:
    """Which tokens can be drawn, in plain Python: min_p, then top_k, then top_p of what is left."""
    scaled = [x / params.temperature for x in logits]
    weights = {i: math.exp(x - max(scaled)) for i, x in enumerate(scaled)}
    weights = {i: w for i, w in weights.items() if w >= params.min_p}
    order = sorted(weights, key=lambda i: (-weights[i], i))[: params.top_k or None]
    total, before, kept = sum(weights[i] for i in order), 0.0, set()
    for i in order:
        if params.top_p < 1 and kept and before / total >= params.top_p:
            break
        kept.add(i)
        before += weights[i]
    return kept


@pytest.mark.parametrize(
    "options",
    [
        {}, {"top_k": 1}, {"top_k": 7}, {"top_k": 1000}, {"top_p": 0.5}, {"top_p": 1e-9}, {"min_p": 0.2},
        {"min_p": 1.0}, {"top_k": 9, "top_p": 0.6, "min_p": 0.05, "temperature": 1.7},
        {"temperature": 0.3, "top_p": 0.9},
    ],
    ids=str,
)  # fmt: skip
def test_draws_follow_the_definition(options, device):
    """A thousand draws of one distribution: from its support alone, and as often as it says."""
    torch.manual_seed(1)
    one = torch.randn(12, device=device) * 2
    n = 1000
    params = [SamplingParams(seed=i + 1, **options) for i in range(n)]
    tokens = drawn(one.expand(n, -1), params, device)
    kept = kept_by_definition(one.tolist(), params[0])
    counts = torch.bincount(tokens, minlength=12).cpu()
    assert {i for i in range(12) if counts[i]} <= kept
    hidden = [i not in kept for i in range(12)]
    scaled = (one.cpu() / params[0].temperature).masked_fill(torch.tensor(hidden), -torch.inf)
    expected = scaled.softmax(-1) * n
    # 5 standard deviations of a binomial distribution, and 1 for the small ones.
    assert ((counts - expected).abs() <= 5 * expected.sqrt() + 1).all()


def test_keep_top_by_row(device):
    torch.manual_seed(2)
    logits = torch.randn(40, VOCAB, device=device)
    top_k = torch.randint(0, 12, (40, 1), device=device)
    top_p = torch.rand(40, 1, device=device).clamp(min=0.01)
    top_p[::5] = 1
    for row, own_k, own_p, found in zip(
        logits, top_k, top_p, keep_top(logits, top_k, top_p), strict=True
    ):
        params = SamplingParams(top_k=int(own_k), top_p=float(own_p))
        kept = found.isfinite().nonzero()[:, 0].tolist()
        assert set(kept) == kept_by_definition(row.tolist(), params)
        assert torch.equal(found[kept], row[kept])


@pytest.mark.parametrize("vocab", [5, 2048, 5000])
def test_a_draw_is_the_inverse_of_the_distribution_function(device, vocab):
    torch.manual_seed(3)
    scaled = torch.randn(400, vocab, device=device) * 4
    scaled[::2] = scaled[::2].masked_fill(torch.rand(200, vocab, device=device) < 0.7, -torch.inf)
    scaled[:, vocab // 2] = 0
    numbers = torch.rand(400, dtype=torch.float64, device=device)
    numbers[:4] = torch.tensor([0.0, 0.0, 1 - 2.0**-53, 1 - 2.0**-53], device=device)
    temperature = torch.rand(400, device=device) + 0.5
    tokens = draw(scaled, temperature, block_sums(scaled, temperature), numbers)[:, None]
    weights = (scaled.double() / temperature[:, None]).softmax(-1)
    assert (weights.gather(1, tokens) > 0).all()
    ends = weights.cumsum(-1).gather(1, tokens)[:, 0]
    assert (numbers < ends + 1e-6).all()
    assert (numbers > ends - weights.gather(1, tokens)[:, 0] - 1e-6).all()


def test_penalties_follow_the_definition(device):
    torch.manual_seed(3)
    cases = [(1.3, 0.0, 0.0), (1.0, 0.5, 0.0), (1.0, 0.0, -0.7), (0.6, 1.0, 0.4), (1.0, 0.0, 0.0)]
    names = "repetition_penalty", "presence_penalty", "frequency_penalty"
    params = [SamplingParams(**dict(zip(names, case, strict=True))) for case in cases]
    tokens, prompt_lengths = [[5, 6, 6, 7, 7, 7, 0]] * 5, [2, 3, 1, 4, 2]
    rows, row_ids, lengths = rows_of(params, tokens, prompt_lengths, device)
    logits = torch.randn(5, VOCAB, device=device)
    found = penalise(logits, rows, row_ids, lengths, longest=7)
    for i, (repetition, presence, frequency) in enumerate(cases):
        outputs = tokens[i][prompt_lengths[i] :]
        for token in range(VOCAB):
            expected = float(logits[i, token])
            if token in tokens[i]:
                expected = expected / repetition if expected > 0 else expected * repetition
            expected -= frequency * outputs.count(token) + presence * (token in outputs)
            assert abs(float(found[i, token]) - expected) < 1e-5


def test_what_may_not_be_drawn_is_not(device):
    logits = torch.zeros(3, VOCAB, device=device)
    logits[:, 4] = 9
    allowed = torch.zeros(1, VOCAB, dtype=torch.bool, device=device)
    allowed[0, 11] = True
    banned = torch.tensor([0], device=device), torch.tensor([4], device=device)
    constraints = Constraints(banned, torch.tensor([2], device=device), allowed)
    tokens = drawn(logits, [SamplingParams(temperature=0)] * 3, device, constraints).tolist()
    assert tokens == [0, 4, 11]
    assert float(logits[0, 4]) == 9  # the caller's are as they were


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_p": 0.5, "min_p": 0.1}], ids=str)
def test_rows_that_are_no_distribution_give_no_token(options, device):
    logits = torch.zeros(4, VOCAB, device=device)
    logits[0, 3], logits[1, 3], logits[2] = math.nan, math.inf, -math.inf
    tokens = drawn(logits, [SamplingParams(**options)] * 4, device)
    assert tokens[:3].tolist() == [NO_TOKEN] * 3
    assert 0 <= int(tokens[3]) < VOCAB


def test_extreme_parameters_draw_the_most_likely(device):
    logits = torch.tensor([[1e4, -1e4, 1e4 + 1, 0.0]], device=device)
    for options in ({"temperature": 1e-40}, {"temperature": 1e-3}, {"top_p": 1e-30}):
        assert drawn(logits, [SamplingParams(**options, seed=4)], device).tolist() == [2]


def test_the_highest_temperature_draws_what_is_allowed(device):
    banned = (
        torch.zeros(VOCAB - 1, dtype=torch.int64, device=device),
        torch.arange(VOCAB - 1, device=device),
    )
    for options in ({}, {"top_k": 3}, {"min_p": 0.5}):
        params = [SamplingParams(temperature=1e300, seed=1, **options)]
        assert drawn(
            torch.zeros(1, VOCAB, device=device), params, device, Constraints(banned)
        ).tolist() == [VOCAB - 1]


def test_random_numbers(device):
    """Uniform, apart for neighbouring seeds and counters, and the published SplitMix64 numbers."""
    seeds = torch.arange(200, device=device)[:, None].expand(-1, 200)
    numbers = uniform(seeds, torch.arange(200, device=device).expand(200, -1))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert numbers.unique().numel() == numbers.numel()
    counts = torch.histc(numbers.float(), 20, 0, 1)
    assert ((counts - 2000).abs() < 5 * 2000**0.5).all()
    for a, b in ((numbers[:, 1:], numbers[:, :-1]), (numbers[1:], numbers[:-1])):
        assert abs(float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])) < 0.03
    # The first two of SplitMix64 seeded by 1234567.
    golden = 0x9E3779B97F4A7C15
    states = [(1234567 + i * golden) % 2**64 for i in (1, 2)]
    signed = torch.tensor([x - 2**64 if x >= 2**63 else x for x in states], device=device)
    assert [x % 2**64 for x in hash64(signed).tolist()] == [
        6457827717110365317,
        3203168211198807973,
    ]
    assert len({seed_of_completion(7, i) for i in range(100)}) == 100
    assert seed_of_completion(7, 0) == 7


def test_a_seeded_request_draws_the_same_whatever_else_runs(device):
    model = random_model(device)
    params = SamplingParams(seed=11, max_tokens=16, temperature=0.8)
    other = SamplingParams(seed=12, max_tokens=9, top_k=3, repetition_penalty=1.5, min_p=0.1)

    def tokens(prompts, sampling, **options):
        llm = LLM(model, max_model_len=64, pages=40, cuda_graph=False, **options)
        return llm.generate(prompts, sampling)[0].outputs[0].token_ids

    alone = tokens([PROMPTS[0]], params)
    assert alone == tokens(PROMPTS, [params, other, other, params])
    assert alone == tokens(PROMPTS, [params, *[other] * 3], max_batch_tokens=5)
    assert alone != tokens([PROMPTS[0]], SamplingParams(seed=12, max_tokens=16, temperature=0.8))
    unseeded = {tuple(tokens([PROMPTS[0]], SamplingParams(max_tokens=16))) for _ in range(3)}
    assert len(unseeded) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n must be from 1 to"),
        ({"n": 1.0}, "n must be an int, got 1.0"),
        ({"n": True}, "n must be an int, got True"),
        ({"max_tokens": 0}, "max_tokens must be from 1 to"),
        ({"min_tokens": 17}, "min_tokens must be at most max_tokens, 16, got 17"),
        ({"temperature": -1}, "temperature must be at least 0 and finite, got -1"),
        ({"temperature": math.nan}, "temperature must be at least 0 and finite, got nan"),
        ({"temperature": math.inf}, "temperature must be at least 0 and finite, got inf"),
        (
            {"temperature": 10**400},
            "temperature must be at least 0 and finite, got an int of 1329 bits",
        ),
        ({"temperature": -(10**5000)}, "temperature must be at least 0 and finite, got an int of"),
        ({"top_p": 10**5000}, "top_p must be above 0 and at most 1, got an int of 16610 bits"),
        ({"n": 10**5000}, "n must be from 1 to 2147483647, got an int of 16610 bits"),
        ({"temperature": "1"}, "temperature must be a number, got '1'"),
        ({"top_k": -1}, "top_k must be from 0 to"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1, got 1.1"),
        ({"min_p": 2}, "min_p must be from 0 to 1, got 2"),
        ({"seed": 2**63}, "seed must be from"),
        ({"repetition_penalty": 0}, "repetition_penalty must be from 0.001 to 1000, got 0"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty must be from 0.001 to 1000, got 1e-39"),
        ({"presence_penalty": 2.5}, "presence_penalty must be -2 to 2, got 2.5"),
        ({"stop": "x"}, "stop must be a tuple of str, got 'x'"),
        ({"stop": ("",)}, "stop must hold strings of at least one character"),
        ({"stop": ("a",) * 65}, "stop must hold at most 64 strings, got 65: leave some out"),
        (
            {"stop": ("b", "a" * 1001)},
            "stop must hold strings of at most 1000 characters, got one of 1001",
        ),
        (
            {"stop_token_ids": (1,) * 1025},
            "stop_token_ids must hold at most 1024 token ids, got 1025",
        ),
        ({"stop_token_ids": (1.0,)}, "stop_token_ids must be a tuple of int"),
        ({"ignore_eos": 1}, "ignore_eos must be a bool, got 1"),
        ({"logprobs": 65}, "logprobs must be from 0 to 64, got 65"),
        ({"json_schema": {}}, "json_schema must be a str or None, got dict"),
        ({"json_schema": "{}", "grammar": "a"}, "grammar must be None where json_schema is given"),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_bad_parameters_are_named(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        SamplingParams(**options)


def test_tokens_banned_before_min_tokens_are_listed_once_for_each_request():
    def request(eos_ids=frozenset({7}), **options):
        return Request("a", [1], SamplingParams(stop_token_ids=(9, 4), **options), eos_ids)

    assert request().banned_ids == []
    assert request(min_tokens=2, ignore_eos=True).banned_ids == [4, 9]
    early = request(min_tokens=2)
    assert early.banned_ids == [4, 7, 9]
    assert early.end_ids == {4, 7, 9}
    sequence = Sequence(early, 0, 0, 8, text=None, matcher=None)
    step = ScheduledStep([], [Chunk(sequence, 0, 0, 1, samples=True)], [])
    early.end_ids = None  # not looked at by a draw
    rows, tokens = constraints_of(step, torch.device("cpu")).banned
    assert (rows.tolist(), tokens.tolist()) == ([0, 0, 0], [4, 7, 9])
    later = ScheduledStep([Chunk(sequence, 0, 2, 1, samples=True)], [], [])
    assert constraints_of(later, torch.device("cpu")).is_empty
