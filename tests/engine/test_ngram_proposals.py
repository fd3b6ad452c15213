"""Proposals by n-grams: which they are, what a sequence takes of the draws behind them, and what is refused."""

from __future__ import annotations

import dataclasses
import random

import pytest

from tests.engine.tiny import random_model
from torch_fdattn.engine import LLM, LogitsError, NgramSpeculation, SamplingParams
from torch_fdattn.engine.ngram_speculation import NgramProposer
from torch_fdattn.engine.requests import Request, Sequence
from torch_fdattn.engine.sampling_params import NO_TOKEN


def definition(tokens, shortest, longest, count):
    """What followed the last earlier occurrence of the longest n-gram, repeated where the tokens end."""
    for n in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                extended = list(tokens)
                for i in range(count):
                    extended.append(extended[start + n + i])
                return tuple(extended[len(tokens) :])
    return ()


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_proposals_are_those_of_the_definition(shortest, longest):
    draw = random.Random(0)
    speculation = NgramSpeculation(max_tokens=6, shortest=shortest, longest=longest)
    found = 0
    for alphabet in ([5], [0, 1], [0xD800, 0x10FFFF, 0], range(20)):  # surrogates are numbers too
        proposer, tokens = NgramProposer(speculation), []
        for _ in range(80):
            tokens += draw.choices(alphabet, k=draw.choice((1, 1, 3)))
            limit = draw.choice((0, 1, 4, 6, 100))
            if limit:  # of which nothing is remembered
                expected = definition(tokens, shortest, longest, min(limit, 6))
                assert proposer.propose(tokens, limit) == expected
                found += len(expected)
            assert proposer.propose(tokens, 0) == ()
    assert found > 300


def sequence_of(prompt, max_length, **params) -> Sequence:
    request = Request("a", list(prompt), SamplingParams(**params))
    return Sequence(request, 0, 0, max_length, None, None)


@pytest.mark.parametrize(
    ("drawn", "taken", "reason"),
    [
        ([4, 5, 6, 7], [4, 5, 6, 7], None),
        ([4, 5, 6, NO_TOKEN], None, None),
        (
            [4, 5, 9, NO_TOKEN],
            [4, 5, 9],
            None,
        ),  # what is drawn behind a rejected proposal is nobody's
        ([9, 5, 6, 7], [9], None),
        ([4, 8, 6, 7], [4, 8], "stop"),
        ([8, 5, 6, 7], [8], "stop"),
    ],
)
def test_what_a_sequence_takes(drawn, taken, reason):
    sequence = sequence_of([1, 2, 3], 20, stop_token_ids=(8,))
    sequence.num_computed, sequence.in_flight = 6, 1
    if taken is None:
        with pytest.raises(LogitsError, match="new token 3 of request 'a'"):
            sequence.accept(drawn, (4, 5, 6), [None] * 4)
        return
    assert sequence.accept(drawn, (4, 5, 6), [None] * 4) == len(taken)
    assert sequence.tokens == [1, 2, 3, *taken]
    assert (sequence.finish_reason, sequence.in_flight) == (reason, 0)
    assert sequence.num_computed == len(sequence.tokens) - 1


def test_bad_arguments_are_named(device):
    model = random_model(device)
    for name, limits in (
        ("max_tokens", "from 1 to 15"), ("shortest", "at least 1"), ("longest", "at least 2"),
        ("max_sequences", "at least 1"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name} must be {limits}, got 0"):
            NgramSpeculation(**{name: 0})
        with pytest.raises(TypeError, match=f"{name} must be an int, got 2.0"):
            NgramSpeculation(**{name: 2.0})
    with pytest.raises(ValueError, match="max_tokens must be from 1 to 15, got 16"):
        NgramSpeculation(max_tokens=16)
    with pytest.raises(TypeError, match="speculation must be a NgramSpeculation or None, got int"):
        LLM(model, pages=4, speculation=3)
    with pytest.raises(ValueError, match="speculation must be None where batch_invariant is True"):
        LLM(model, pages=4, speculation=NgramSpeculation(), batch_invariant=True)
    model.config = dataclasses.replace(model.config, vocab_size=0x110001)
    with pytest.raises(
        NotImplementedError, match=r"speculation needs .* 1114112 tokens, got 1114113"
    ):
        LLM(model, pages=4, speculation=NgramSpeculation())
