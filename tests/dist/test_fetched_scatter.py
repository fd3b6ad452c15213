"""`copy_engine`'s reduce-scatter that fetches: what holds for the one that sends holds for it, here of any rows."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.dist.test_tp_failures import Failure, fails
from tests.dist.test_tp_one_sided import (  # noqa: F401 (these tests run here again)
    _kernels,
    check_sum,
    draw,
    of_rank,
    test_a_rank_that_comes_late,
    test_a_rank_that_does_not_come,
    test_checkpointed_training,
    test_compiled_training,
    test_epochs_wrap,
    test_graphs,
    test_matmul_reduce_scatter,
    test_uneven_rows,
)
from torch_fdattn.dist import matmul_reduce_scatter
from torch_fdattn.dist.tp_linear import copy_engine, fetched_scatter
from torch_fdattn.dist.tp_linear.copies import Copies


@pytest.fixture(autouse=True)
def fetched(monkeypatch) -> list[torch.Tensor]:
    """Its results, so that no test passes without it."""
    if (world := dist.get_world_size()) != 2:
        pytest.skip(f"needs 2 ranks: found {world}")
    found, run = [], fetched_scatter.matmul_reduce_scatter
    monkeypatch.setattr(fetched_scatter, "LEAST_ROWS", 0)
    monkeypatch.setattr(
        fetched_scatter, "matmul_reduce_scatter", lambda *a: found.append(run(*a)) or found[-1]
    )
    return found


def test_it_is_what_runs(group, rank_device, fetched) -> None:
    x, weight = draw(6, 16, device=rank_device), draw(8, 16, device=rank_device)
    y = matmul_reduce_scatter(x, weight, group, strategy="copy_engine")
    assert fetched == [y] or fetched[0].data_ptr() == y.data_ptr()


def test_which_calls(monkeypatch) -> None:
    least = 2048
    monkeypatch.setattr(fetched_scatter, "LEAST_ROWS", least)
    assert fetched_scatter.takes([least, least + 1])
    assert not fetched_scatter.takes([least, least - 1])
    assert not fetched_scatter.takes([least] * 3)


@pytest.mark.parametrize("rows", [[4, 4], [1, 1], [3, 8], [5, 1]])
def test_a_bias_of_each_rank(group, rank_device, rows: list[int]) -> None:
    """Which ranks may have or not, each its own; rows that do not halve."""
    rank = dist.get_rank()
    xs = [draw(sum(rows), 16, device=rank_device) for _ in range(2)]
    weights = [draw(6, 16, device=rank_device) for _ in range(2)]
    bias = draw(6, device=rank_device)
    y = copy_engine.matmul_reduce_scatter(
        xs[rank], weights[rank], group, rows, bias if rank else None
    )
    own = slice(rank * rows[0], rank * rows[0] + rows[rank])
    parts = [F.linear(x[own], w) for x, w in zip(xs, weights, strict=True)]
    exact = sum(F.linear(x[own].double(), w.double()) for x, w in zip(xs, weights, strict=True))
    check_sum(y, exact + bias.double(), parts[0] + (parts[1] + bias))


@pytest.mark.parametrize("who", ["all", "rank 0"])
def test_one_that_fails_half_way(group, rank_device, monkeypatch, who: str) -> None:
    """When it has given its halves: they are not taken for the next call's."""
    weight = draw(6, 16, device=rank_device)
    for i in range(4):
        x = draw(6, 16, device=rank_device) + i
        with monkeypatch.context() as patch:
            if i == 1 and (who == "all" or dist.get_rank() == 0):
                patch.setattr(Copies, "fetch", fails)
                with pytest.raises(Failure):
                    matmul_reduce_scatter(x, weight, group, strategy="copy_engine")
                continue
            y = matmul_reduce_scatter(x, weight, group, strategy="copy_engine")
            torch.testing.assert_close(y, 2 * F.linear(x, weight)[of_rank(3)])
