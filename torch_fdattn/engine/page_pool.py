"""Pages with reference counts, and the prefix cache over them.

A full page of tokens has a name: a hash of the page's tokens and of the name before it, so that a name stands for
all tokens from the beginning on. A sequence whose tokens begin with pages of known names takes these pages in place of
computing them. Pages are never written again once they are full, so sharing needs no copies.

A page that nobody holds any more keeps its name and its contents until the pool needs it: least recently used first, and
of one sequence its last page first, since without the ones before it no page can be reached.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

#: What stands before the first page.
ROOT = b""


def page_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a page of these tokens behind the page of the name `parent`: 16 bytes, so that nobody finds two chains
    of one name."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class PagePool:
    """Hands out the pages 0 to pages - 1, counts who holds them, and finds them by their hash.

    Attributes:
        pages: how many there are.
        num_free: how many nobody holds, remembered ones included.
        peak_used: how many were held at a time so far.
    """

    def __init__(self, pages: int) -> None:
        self.pages, self.peak_used = pages, 0
        self._holders = [0] * pages
        self._hashes: list[bytes | None] = [None] * pages
        self._by_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(pages))  # next one first

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages for one holder, or None and nothing changed where fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self._forget(page)
            self._holders[page] = 1
        self._note_peak()
        return pages

    def take_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """The pages of the longest run of these hashes from the first on that are there, each with one holder more."""
        pages = []
        for name in hashes:
            if (page := self._by_hash.get(name)) is None:
                break
            if not self._holders[page]:
                del self._free[page]
            self._holders[page] += 1
            pages.append(page)
        self._note_peak()
        return pages

    def register(self, page: int, name: bytes) -> None:
        """From now on the page is found by this hash, unless another page is already: then it stays the holder's own."""
        if self._hashes[page] is None and name not in self._by_hash:
            self._hashes[page], self._by_hash[name] = name, page

    def release(self, pages: Sequence[int]) -> None:
        """One holder of each of these pages of one sequence, in their order, lets go of them."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free[page] = None
                # Without a name nothing is lost when it is taken.
                self._free.move_to_end(page, last=self._hashes[page] is not None)

    def forget_all(self) -> None:
        """No page is found by its hash any more."""
        for page in self._by_hash.values():
            self._hashes[page] = None
        self._by_hash.clear()

    def _note_peak(self) -> None:
        self.peak_used = max(self.peak_used, self.pages - self.num_free)

    def _forget(self, page: int) -> None:
        if (name := self._hashes[page]) is not None:
            del self._by_hash[name]
            self._hashes[page] = None
