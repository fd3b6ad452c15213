"""Which pages a sequence has: a free list and a page table on the host, mirrored on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# In the table: no page. What would be read there is masked, what would be written is dropped.
_NONE = -1


class PageTable:
    """Hands out `pages` pages of `page_size` tokens to `batch` sequences as they grow and shrink.

    All decisions are on the host and follow from lengths alone, so that ranks which hold the same lengths hold
    the same table. The device's copy keeps its address: it is updated in place before the work that
    needs it, and a captured CUDA graph reads what it finds there.

    Attributes:
        on_device: int32 (batch, pages that a sequence can have).
        free: numbers of the pages that no sequence has; the last is taken first.
    """

    def __init__(
        self, batch: int, capacity: int, page_size: int, pages: int, device: torch.device | str
    ) -> None:
        self.page_size, self.pages = page_size, pages
        shape = batch, -(-capacity // page_size)
        self._on_host = torch.full(shape, _NONE, dtype=torch.int32)
        self.on_device = torch.full(shape, _NONE, dtype=torch.int32, device=device)
        self._owned = [0] * batch
        self.free = list(range(pages - 1, -1, -1))

    def expect_enough(self, lengths: Sequence[int]) -> None:
        """Raises where pages are missing for sequences of these lengths."""
        needed = sum(map(max, self._needed(lengths), self._owned))
        if needed > self.pages:
            raise ValueError(
                f"pages must be at least {needed} for sequences of {', '.join(map(str, lengths))} tokens "
                f"at {self.page_size} a page, got {self.pages}"
            )

    def grow(self, lengths: Sequence[int]) -> None:
        """Gives every sequence the pages that it lacks for these lengths, or raises and gives none."""
        self.expect_enough(lengths)
        changed = []
        for sequence, needed in enumerate(self._needed(lengths)):
            for column in range(self._owned[sequence], needed):
                self._on_host[sequence, column] = self.free.pop()
                changed.append(column)
            self._owned[sequence] = max(self._owned[sequence], needed)
        self._update(changed)

    def shrink(self, lengths: Sequence[int]) -> None:
        """Takes back the pages beyond these lengths."""
        changed = []
        for sequence, needed in enumerate(self._needed(lengths)):
            for column in reversed(range(needed, self._owned[sequence])):
                self.free.append(int(self._on_host[sequence, column]))
                self._on_host[sequence, column] = _NONE
                changed.append(column)
            self._owned[sequence] = min(self._owned[sequence], needed)
        self._update(changed)

    def _needed(self, lengths: Sequence[int]) -> list[int]:
        return [-(-length // self.page_size) for length in lengths]

    def _update(self, changed: list[int]) -> None:
        """Copies the columns that changed: a decode step that fills a page changes one."""
        if changed:
            columns = slice(min(changed), max(changed) + 1)
            self.on_device[:, columns].copy_(self._on_host[:, columns])
