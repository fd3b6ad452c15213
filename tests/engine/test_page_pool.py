"""Pages: who holds them, and which are found by their tokens."""

from __future__ import annotations

import random

from torch_fdattn.engine.page_pool import ROOT, PagePool, page_hash


def chain(*pages) -> list[bytes]:
    names = []
    for tokens in pages:
        names.append(page_hash(names[-1] if names else ROOT, tokens))
    return names


def test_a_name_stands_for_all_tokens_before_it():
    first, second = chain([1, 2], [3, 4])
    assert chain([1, 2], [3, 4]) == [first, second]
    assert len({first, second, *chain([1, 3], [3, 4]), *chain([3, 4]), *chain([1, 2, 3, 4])}) == 6


def test_pages_are_shared_and_come_back():
    pool, names = PagePool(4), chain([1], [2], [3])
    pages = pool.allocate(3)
    for page, name in zip(pages, names, strict=True):
        pool.register(page, name)
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert pool.take_prefix(names[:2]) == pages[:2]
    pool.release(pages)
    assert pool.num_free == 2  # the other holder's are not
    pool.release(pages[:2])
    assert pool.num_free == 4
    assert pool.take_prefix([*names, *chain([9])]) == pages  # remembered
    assert pool.take_prefix(chain([2])) == []
    assert (pool.num_free, pool.peak_used) == (1, 3)


def test_the_least_recently_used_are_forgotten_first_and_ends_before_beginnings():
    pool, old, new = PagePool(5), chain([1], [2]), chain([5], [6])
    for names in (old, new):
        pages = pool.allocate(2)
        for page, name in zip(pages, names, strict=True):
            pool.register(page, name)
        pool.release(pages)
    pool.allocate(1)  # the one that has no name
    assert len(pool.take_prefix(old)) == 2
    pool.release(pool.take_prefix(old) * 1)
    pool.allocate(1)
    assert len(pool.take_prefix(new)) == 1  # its end is gone
    assert len(pool.take_prefix(old)) == 2


def test_one_page_has_a_name():
    """Of two sequences that computed the same tokens at the same time, the second keeps its page for itself."""
    pool, (name,) = PagePool(2), chain([1])
    first, second = pool.allocate(2)
    pool.register(first, name)
    pool.register(second, name)
    pool.release([second])
    assert pool.take_prefix([name]) == [first]
    assert pool.allocate(1) == [second]


def test_drawn_traffic_keeps_the_count():
    draw, pool = random.Random(0), PagePool(20)
    held: list[list[int]] = []
    for step in range(3000):
        if held and draw.random() < 0.45:
            pool.release(held.pop(draw.randrange(len(held))))
        else:
            names = chain(*[[draw.randrange(2)] for _ in range(draw.randrange(1, 5))])
            pages = pool.take_prefix(names)
            more = pool.allocate(len(names) - len(pages))
            if more is None:
                pool.release(pages)
                continue
            for page, name in zip(more, names[len(pages) :], strict=True):
                pool.register(page, name)
            held.append(pages + more)
        assert pool.num_free == 20 - len({page for pages in held for page in pages}), step
    for pages in held:
        pool.release(pages)
    assert sorted(pool.allocate(20)) == list(range(20))
