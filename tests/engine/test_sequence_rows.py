"""What the device knows of sequences, behind the step that admits them."""

from __future__ import annotations

import types

import pytest
import torch

from torch_fdattn.engine import SamplingParams
from torch_fdattn.engine.scheduler import Chunk, ScheduledStep
from torch_fdattn.engine.sequence_rows import NO_PAGE, SequenceRows, to_device

CPU = torch.device("cpu")


def sequence(row: int, tokens: list[int], pages: list[int], seed: int, **params):
    return types.SimpleNamespace(
        row=row, tokens=tokens, pages=pages, seed=seed, prompt_length=len(tokens) - 1,
        params=SamplingParams(**params),
    )  # fmt: skip


def step_of(*admitted) -> ScheduledStep:
    chunks = [Chunk(x, x.row, 0, len(x.tokens), True) for x in admitted]
    return ScheduledStep([], chunks, list(admitted))


def test_each_has_its_own() -> None:
    rows = SequenceRows(4, 12, 4, CPU)
    first = sequence(2, [5, 6, 7, 8, 9], [3, 1], seed=11, temperature=0.5, top_k=7, min_p=0.25)
    second = sequence(0, [4, 3], [2], seed=-9, temperature=0.75, top_p=0.5, frequency_penalty=0.5)
    third = sequence(3, [1] * 9, [7, 6, 5], seed=2**40, top_k=1, repetition_penalty=2.0)
    rows.update(step_of(first, second, third))
    for own in (first, second, third):
        at = torch.tensor([own.row])
        assert rows.tokens[own.row, : len(own.tokens)].tolist() == own.tokens
        assert rows.pages[own.row].tolist() == own.pages + [NO_PAGE] * (3 - len(own.pages))
        found = rows.top_k[own.row], rows.seeds[own.row], rows.prompt_lengths[own.row]
        assert [int(x) for x in found] == [own.params.top_k, own.seed, own.prompt_length]
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty"):
            assert rows.parameter(name, at).item() == getattr(own.params, name)
    assert not rows.tokens[rows.padding_row].any()
    # Another sequence takes a row: all of its pages are written, and none of the other rows'.
    other = sequence(2, [8, 8, 8, 8, 8, 8], [9, 8], seed=0)
    rows.update(step_of(other))
    assert rows.pages[2, :2].tolist() == [9, 8]
    assert rows.seeds.tolist() == [-9, 0, 0, 2**40, 0]


@pytest.mark.parametrize("lists", [[[]], [[], [2**63 - 1, -1], []], [[1], [2, 3]]])
def test_numbers_to_the_device(lists: list[list[int]]) -> None:
    found = to_device(lists, CPU)
    assert [x.tolist() for x in found] == lists
    assert all(x.dtype == torch.int64 for x in found)
