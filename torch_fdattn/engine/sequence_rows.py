"""What the device knows of the sequences that run: a row each, written when one is admitted and when it grows.

A step names rows and positions; tokens, pages and sampling parameters stand here already. A drawn token is written to its
row by the step that draws it, so that the next step finds it before the host has read it.
"""

from __future__ import annotations

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
        for sequence in step.admitted:
            self._admit(sequence)
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

    def _admit(self, sequence: Sequence) -> None:
        row, params = sequence.row, sequence.params
        self._num_pages[row] = 0
        (tokens,) = to_device([sequence.tokens], self.device)
        self.tokens[row, : len(tokens)] = tokens
        (ints,) = to_device([[params.top_k, sequence.seed, sequence.prompt_length]], self.device)
        self._ints[:, row] = ints
        floats = torch.tensor(_floats(params))
        self.floats[row].copy_(_pinned(floats, self.device), non_blocking=True)


def _floats(params: SamplingParams) -> list[float]:
    return [getattr(params, name) for name in _FLOATS]


def to_device(lists: list[list[int]], device: torch.device) -> list[Tensor]:
    """int64 tensors of these numbers, by one copy that the host does not wait for."""
    flat = torch.tensor([x for numbers in lists for x in numbers], dtype=torch.int64)
    moved = _pinned(flat, device).to(device, non_blocking=True)
    return list(moved.split([len(numbers) for numbers in lists]))


def _pinned(x: Tensor, device: torch.device) -> Tensor:
    return x.pin_memory() if device.type == "cuda" else x
