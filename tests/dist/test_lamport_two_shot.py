"""All-reduces in two trips: the same bits on all ranks, stragglers, sizes that change, a rank that does not come.

Of three ranks and more; kernels on CPUs with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.dist.one_sided_matmuls import check_sum, draw, of_rank
from torch_fdattn.dist import (
    PeerTimeout,
    matmul_all_reduce,
    matmul_all_reduce_rms_norm,
    set_timeout,
)
from torch_fdattn.dist.symm.channel import _channels
from torch_fdattn.dist.tensor_parallel import gemm_all_reduce, lamport_two_shot, low_latency
from torch_fdattn.ops.library import INTERPRET


@pytest.fixture(autouse=True)
def _kernels(rank_device: torch.device) -> None:
    if rank_device.type == "cpu" and not INTERPRET:
        pytest.skip("tests a kernel: needs a CUDA device or TRITON_INTERPRET=1")
    if dist.get_world_size() < 3:
        pytest.skip("needs 3 ranks")


@pytest.fixture
def two_shots(monkeypatch) -> None:
    """However few the bytes."""
    monkeypatch.setattr(lamport_two_shot, "TWO_SHOT_BYTES", 1)


def check_same_everywhere(y: Tensor) -> None:
    everywhere = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, y)
    bits = [part.view(torch.uint8) for part in everywhere]
    assert all(torch.equal(part, bits[0]) for part in bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sums(group, rank_device, dtype: torch.dtype) -> None:
    """Calls of sizes that grow and shrink, ranks that come late, zeros of both signs."""
    world, rank = dist.get_world_size(), dist.get_rank()
    rng = random.Random(rank)
    for count in (2, 5000, 4, 0x3000, 2, 2, 2, 2500, 2500, 8, 8, 8):
        parts = [draw(count, device=rank_device, dtype=dtype) for _ in range(world)]
        for i, part in enumerate(parts):
            part[:: 2 + i] = 0.0
            part[:: 5 - i] = -0.0
            part[:2] = -0.0 if i else 0.0
        y = torch.full_like(parts[0], float("nan"))
        time.sleep(rng.random() * 0.003)
        lamport_two_shot.all_reduce(parts[rank], y, group, rank, world)
        check_sum(y, torch.stack(parts).double().sum(0), torch.stack(parts).sum(0))
        check_same_everywhere(y)


def test_zeros_and_not_a_numbers(group, rank_device) -> None:
    """Sums that are zero do not look as if they had not come; infinities and NaN arrive."""
    world, rank = dist.get_world_size(), dist.get_rank()
    x = torch.zeros(64, device=rank_device)
    x[rank] = 1.0 if rank else -0.0
    x[10], x[11] = float("inf"), float("nan")
    y = torch.empty_like(x)
    lamport_two_shot.all_reduce(x, y, group, rank, world)
    expected = torch.zeros_like(x)
    expected[1:world] = 1.0
    expected[10], expected[11] = float("inf"), float("nan")
    torch.testing.assert_close(y, expected, equal_nan=True)


@pytest.mark.usefixtures("two_shots")
@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [
        (1, 6, torch.float32),
        (2, 40, torch.float16),
        (5, 34, torch.float16),
        (33, 70, torch.float32),
    ],
)
def test_products(group, rank_device, rows: int, columns: int, dtype: torch.dtype) -> None:
    """Rows that ranks do not share out evenly, fewer rows than ranks; twice beside calls in one shot."""
    world = dist.get_world_size()
    x, weight = (draw(n, 24 * world, device=rank_device, dtype=dtype) for n in (rows, columns))
    right, mine = F.linear(x.double(), weight.double()), of_rank(24)
    # Parts are rounded before they are summed, as in any all-reduce of them.
    shares = (of_rank(24, rank) for rank in range(world))
    at_dtype = torch.stack([F.linear(x[:, share], weight[:, share]) for share in shares]).sum(0)
    for method in ("gemm_all_reduce", "low_latency") * 2:
        y = matmul_all_reduce(x[:, mine], weight[:, mine], group, method=method)
        check_sum(y, right, at_dtype)
        check_same_everywhere(y)


@pytest.mark.usefixtures("two_shots")
@pytest.mark.parametrize(("rows", "columns"), [(1, 34), (7, 128)])
def test_with_a_norm(group, rank_device, rows: int, columns: int) -> None:
    world = dist.get_world_size()
    x, weight = (draw(n, 24 * world, device=rank_device) for n in (rows, columns))
    residual, norm = draw(rows, columns, device=rank_device), draw(columns, device=rank_device)
    mine = of_rank(24)
    given = x[:, mine], weight[:, mine], group, residual, norm, 1e-5
    with torch.no_grad():
        for method in ("gemm_all_reduce", "low_latency"):
            normed, added = matmul_all_reduce_rms_norm(*given, method=method)
            expected = residual + F.linear(x, weight)
            torch.testing.assert_close(added, expected, atol=1e-4, rtol=1e-4)
            right = F.rms_norm(expected, (columns,), norm, 1e-5)
            torch.testing.assert_close(normed, right, atol=1e-4, rtol=1e-4)
            check_same_everywhere(added)
            check_same_everywhere(normed)


def test_when_two_trips_are_taken() -> None:
    """Where what the wire is spared outweighs the second one; never for two ranks."""
    shots, most = lamport_two_shot.shots, lamport_two_shot.TWO_SHOT_BYTES
    assert [shots(1 << 40, world) for world in (1, 2, 3)] == [1, 1, 2]
    assert [shots(nbytes, 4) for nbytes in (2 * most // 3 - 1, 2 * most // 3 + 1)] == [1, 2]


@pytest.mark.usefixtures("two_shots")
@pytest.mark.parametrize("rows", [None, 1, 2, 4])
def test_a_rank_that_does_not_come_is_named(group, rank_device, rows: int | None) -> None:
    """By ranks that own nothing of a product of few rows too; rows None: of a sum alone."""
    new = dist.new_group()
    last = dist.get_world_size() - 1
    x, weight = (
        torch.ones(rows or 4, 32, device=rank_device),
        torch.ones(64, 32, device=rank_device),
    )

    def call() -> Tensor:
        if rows is None:
            return low_latency.all_reduce(x, new.group_name)
        return gemm_all_reduce.matmul_all_reduce(x, weight, new.group_name)

    call()
    dist.barrier()
    set_timeout(1.5)  # of three ranks on two processors the other survivor may be late
    try:
        if dist.get_rank() != last:
            if dist.get_rank() == 0:
                time.sleep(0.2)  # a survivor that is itself a little late
            assert call().isnan().all()
            with pytest.raises(PeerTimeout, match=f"rank {last}"):
                call()
        dist.barrier()
    finally:
        set_timeout(10.0)
        for channels in _channels[new].values():
            channels[-1].fault.tensor.zero_()
    dist.destroy_process_group(new)
