"""Where a kernel may write the keys and values of a step whose cache ranks share."""

from __future__ import annotations

import pytest
import torch

from torch_fdattn.engine import sharded_pages
from torch_fdattn.engine.paged_step import Decodes, Prefills
from torch_fdattn.engine.sharded_pages import ShardedPagedKV
from torch_fdattn.ops.rotary import KVSlots


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(autouse=True)
def first_of_two_ranks(monkeypatch) -> None:
    monkeypatch.setattr(sharded_pages, "rank_and_size", lambda *_: (0, 2))


def step_of(positions: torch.Tensor, pages: torch.Tensor, decodes=None, prefills=None):
    """In pages of four tokens of each rank."""
    kv = ShardedPagedKV(
        1, 8, 4, 2, 16, dtype=torch.float32, device=torch.device("cpu"), form=None, group_name="two", strategy="auto",
        hierarchy=None, rank_invariant=False,
    )  # fmt: skip
    return kv.step(positions, pages, decodes, prefills, False)


def test_decodes_go_to_the_slots_of_this_rank() -> None:
    """Positions 3 and 9 are the first rank's, at places 3 and 1 of a page; 6 is the other's."""
    table = int32(5, 6, 2, 3, 1, 7).view(3, 2)
    decodes = Decodes(table, int32(4, 7, 10))
    to = step_of(torch.tensor([3, 6, 9]), int32(5, 2, 7), decodes).kv_slots(0)
    assert isinstance(to, KVSlots)
    assert to.pages.tolist() == [5, -1, 7]
    assert to.slots[::2].tolist() == [3, 1]


def test_a_share_of_a_chunk_has_no_slots() -> None:
    """Not even of one token, of which a rank's share is as many: the other rank's is padding."""
    for tokens in (1, 5):
        chunk = Prefills(int32(0, tokens), int32(5, 2).view(1, 2), int32(tokens))
        step = step_of(torch.arange(tokens), int32(5).expand(tokens), None, chunk)
        assert step.kv_slots(0) is None
