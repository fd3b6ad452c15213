"""What the device knows of the sequences that run: a row each, written when one is admitted and when it grows.

A step names rows and positions; tokens, pages and sampling parameters stand here already. A drawn token is written to its
row by the step that draws it, so that the next step finds it before the host has read it.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from torch_fdattn.engine.requests import Sequence
from torch_fdattn.engine.sampling_params import SamplingParams
from torch_fdattn.engine.scheduler import ScheduledStep

NO_PAGE = -1

_FLOATS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


class SequenceRows:
    """Rows of running sequences, and one behind them that no sequence has, for the padding of a batch.

    Attributes:
        padding_row: the number of that row: it has token 0 and no page.
        tokens: int64 (rows + 1, max_length), prompt and drawn tokens by position.
        pages: int32 (rows + 1, pages of a sequence).
        floats: float32 (rows + 1, …), parameters by name with `parameter`.
        top_k, seeds, prompt_lengths: int64 (rows + 1,).
    """

    def __init__(self, rows: int, max_length: int, page_size: int, device: torch.device) -> None:
        self.padding_row, self.device = rows, device
        self.tokens = torch.zeros(rows + 1, max_length, dtype=torch.int64, device=device)
        width = -(-max_length // page_size)
        self.pages = torch.full((rows + 1, width), NO_PAGE, dtype=torch.int32, device=device)
        self.floats = torch.zeros(rows + 1, len(_FLOATS), device=device)
        self._ints = torch.zeros(3, rows + 1, dtype=torch.int64, device=device)
        self.top_k, self.seeds, self.prompt_lengths = self._ints
        self._num_pages = [0] * (rows + 1)  # of each row, that stand in `pages`

    @staticmethod
    def bytes_of(rows: int, max_length: int, page_size: int) -> int:
        """Of the rows' tokens and pages."""
        int64, int32 = torch.int64.itemsize, torch.int32.itemsize
        return (rows + 1) * (max_length * int64 + -(-max_length // page_size) * int32)

    def parameter(self, name: str, rows: Tensor) -> Tensor:
        """A float of `SamplingParams` of these rows (n,), as (n, 1)."""
        return self.floats[rows, _FLOATS.index(name)][:, None]

    def update(self, step: ScheduledStep) -> None:
        """Rows of admitted sequences, proposals, and pages that sequences of the step have been given since."""
        if step.admitted:
            self._admit(step.admitted)
        rows, columns, pages = [], [], []
        for chunk in (*step.decodes, *step.prefills):
            own = chunk.sequence.pages
            for column in range(self._num_pages[chunk.row], len(own)):
                rows.append(chunk.row)
                columns.append(column)
                pages.append(own[column])
            self._num_pages[chunk.row] = len(own)
        if pages:
            at_rows, at_columns, new = to_device([rows, columns, pages], self.device)
            self.pages[at_rows, at_columns] = new.int()
        proposed = [
            (chunk.row, chunk.start + 1 + i, token)
            for chunk in step.decodes
            for i, token in enumerate(chunk.proposals)
        ]
        if proposed:
            lists = [list(x) for x in zip(*proposed, strict=True)]
            at_rows, positions, tokens = to_device(lists, self.device)
            self.tokens[at_rows, positions] = tokens

    def _admit(self, sequences: list[Sequence]) -> None:
        """By two copies to the device, however many they are: a step of prompts admits dozens."""
        lists = [
            [x.row for x in sequences],
            [x.params.top_k for x in sequences],
            [x.seed for x in sequences],
            [x.prompt_length for x in sequences],
            *(x.tokens for x in sequences),
        ]
        rows, top_k, seeds, prompt_lengths, *tokens = to_device(lists, self.device)
        self._ints[:, rows] = torch.stack([top_k, seeds, prompt_lengths])
        floats = torch.tensor([_floats(x.params) for x in sequences])
        self.floats[rows] = _pinned(floats, self.device).to(self.device, non_blocking=True)
        for sequence, own in zip(sequences, tokens, strict=True):
            self._num_pages[sequence.row] = 0
            self.tokens[sequence.row, : len(own)] = own


def _floats(params: SamplingParams) -> list[float]:
    return [getattr(params, name) for name in _FLOATS]


def to_device(lists: list[list[int]], device: torch.device) -> list[Tensor]:
    """int64 tensors of these numbers, by one copy that the host does not wait for."""
    flat = array("q")  # a quarter of the time of torch.tensor
    for numbers in lists:
        flat.fromlist(numbers)
    there = torch.frombuffer(flat, dtype=torch.int64) if flat else torch.empty(0, dtype=torch.int64)
    moved = _pinned(there, device).to(device, non_blocking=True)
    return list(moved.split([len(numbers) for numbers in lists]))


def _pinned(x: Tensor, device: torch.device) -> Tensor:
    return x.pin_memory() if device.type == "cuda" else x
