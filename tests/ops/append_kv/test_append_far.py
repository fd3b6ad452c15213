"""Caches of more than 2³¹ elements: what is appended lands where it belongs, and nowhere else.

int8, so that 2 GiB suffice: zeros, of which a CPU keeps only the pages that are written to.
"""

import numpy as np
import pytest
import torch

import torch_fdattn

pytestmark = pytest.mark.interpreter
ELEMENTS = 2**31 + 2**24
DIM = 128
#: (shape, strides) of a cache that reaches beyond 2³¹ along one of its dimensions.
VIEWS = {
    "positions": ((1, 1, 2**24 + 100, DIM), (1, 1, DIM, 1)),
    "heads": ((1, 9, 64, DIM), (1, 2**28, DIM, 1)),
    "sequences": ((9, 1, 64, DIM), (2**28, 1, DIM, 1)),
    "elements": ((1, 1, 64, DIM), (1, 1, 1, (2**31 + 2**23) // (DIM - 1))),
}


@pytest.fixture
def zeros(device):
    if device == "cpu":
        return torch.from_numpy(np.zeros(ELEMENTS, np.int8))
    free, _ = torch.cuda.mem_get_info()
    if free < 2 * ELEMENTS:
        pytest.skip(f"needs {2 * ELEMENTS >> 30} GiB of free GPU memory, found {free >> 30}")
    return torch.zeros(ELEMENTS, dtype=torch.int8, device=device)


def check(buffer, view, expected):
    """These slots hold these rows; once they are cleared, nothing is left in the buffer."""
    for slot, row in expected.items():
        assert torch.equal(view[slot], row), slot
        view[slot] = 0
    for chunk in buffer.view(torch.int64).split(2**25):  # eight elements at a time
        assert not chunk.any()


def rows(*shape, device):
    """Whole numbers, none of them 0, which int8 keeps as they are."""
    return torch.randint(1, 128, (*shape, DIM), device=device).float()


@pytest.mark.parametrize(
    "far",
    [
        pytest.param(x, marks=() if x in ("positions", "sequences") else pytest.mark.slow)
        for x in VIEWS
    ],
)
def test_contiguous(far, zeros, device):
    (batch, heads, capacity, _), strides = VIEWS[far]
    cache = zeros.as_strided((batch, heads, capacity, DIM), strides)
    new = rows(batch, heads, 3, device=device)
    lens = torch.full((batch,), capacity - 2, dtype=torch.int32, device=device)
    # K and V in one place: the same is written twice. The third token finds no room.
    torch_fdattn.append_kv(cache, cache, new, new, lens)
    check(
        zeros, cache,
        {
            (b, h, capacity - 2 + t): new[b, h, t].to(torch.int8)
            for b in range(batch) for h in range(heads) for t in range(2)
        },
    )  # fmt: skip


def test_paged(zeros, device):
    """The pool's last pages, and an entry one beyond them."""
    heads, page = 2, 16
    pages = ELEMENTS // (heads * page * DIM)
    pool = zeros[: pages * heads * page * DIM].view(pages, heads, page, DIM)
    new = rows(2, heads, 20, device=device)
    table = [[pages - 1, pages - 3], [pages // 2, pages]]
    torch_fdattn.paged_append_kv(
        pool, pool, torch.tensor(table, dtype=torch.int32, device=device), new, new,
        torch.zeros(2, dtype=torch.int32, device=device),
    )  # fmt: skip
    check(
        zeros, pool,
        {
            (table[b][t // page], h, t % page): new[b, h, t].to(torch.int8)
            for b in range(2) for h in range(heads) for t in range(20)
            if table[b][t // page] < pages
        },
    )  # fmt: skip
