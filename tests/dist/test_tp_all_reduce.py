"""All-reduces of matmuls through symmetric memory: by words, values and tiles, of few and of many numbers."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.dist.one_sided_matmuls import METHODS, _kernels, check_sum, draw, expect_launch, of_rank  # noqa: F401
from tests.dist.test_tp_linear import leaf
from torch_fdattn.dist import (
    matmul_all_reduce,
    set_timeout,
)
from torch_fdattn.dist.consensus import assume_equal_on_all_ranks
from torch_fdattn.dist.symm.channel import _channels
from torch_fdattn.dist.tensor_parallel import lamport_exchange, low_latency, tiled_all_reduce


@pytest.mark.parametrize("rows", [1, 5, 21])
@pytest.mark.parametrize("method", METHODS)
def test_matmul_all_reduce(group, rank_device, method: str, rows: int) -> None:
    world = dist.get_world_size()
    dtype = torch.float32 if rows == 5 else torch.float16
    features, columns = (72 if rows == 5 else 300), 34
    x = draw(rows, world * features, device=rank_device, dtype=dtype)
    weight = draw(columns, world * features, device=rank_device, dtype=dtype)
    bias, dy = (draw(*shape, device=rank_device, dtype=dtype) for shape in ((columns,), (rows, columns)))  # fmt: skip
    mine = of_rank(features)
    ours = leaf(x[:, mine]), leaf(weight[:, mine])
    with expect_launch(method):
        y = matmul_all_reduce(*ours, group, leaf(bias), method=method)
    parts = [x[:, of_rank(features, r)] @ weight[:, of_rank(features, r)].t() for r in range(world)]
    exact = x.double() @ weight.double().t() + bias.double()
    check_sum(y, exact, torch.stack(parts).sum(0) + bias)
    everywhere = [torch.empty_like(y) for _ in range(world)]
    dist.all_gather(everywhere, y.detach())
    assert all(torch.equal(part, y) for part in everywhere)
    y.backward(dy)
    for found, a, b in ((ours[0].grad, dy, weight[:, mine]), (ours[1].grad, dy.t(), x[:, mine])):
        check_sum(found, a.double() @ b.double(), a @ b)


@pytest.mark.parametrize(("shots", "dtype"), [(1, torch.float32), (2, torch.float16)])
def test_all_reduce_by_tiles(group, rank_device, shots: int, dtype: torch.dtype) -> None:
    """One number, tiles that the ranks do not share out evenly, whole ones: the bits of words, on all ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if world == 1:
        pytest.skip("needs 2 ranks")
    tile = 4096 // torch.empty(0, dtype=dtype).element_size()
    for count in (1, 3 * tile + 7, world * tile):
        parts = [draw(count, device=rank_device, dtype=dtype) for _ in range(world)]
        y = torch.full_like(parts[0], float("nan"))
        for _ in range(3):
            tiled_all_reduce.all_reduce(parts[rank], y, group, rank, world, shots=shots)
        assert torch.equal(y, low_latency.all_reduce(parts[rank], group))
        check_sum(y, torch.stack(parts).double().sum(0), torch.stack(parts).sum(0))
        everywhere = [torch.empty_like(y) for _ in range(world)]
        dist.all_gather(everywhere, y)
        assert all(torch.equal(part, y) for part in everywhere)


def test_all_reduce_by_values(group, rank_device) -> None:
    """Calls of sizes that grow and shrink, ranks that come late, zeros of both signs: the same bits on all ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if world == 1:
        pytest.skip("needs 2 ranks")
    rng = random.Random(rank)
    for turn, count in enumerate((2, 5000, 4, 0x3000, 2, 2, 2, 2500, 2500, 8, 8, 8)):
        dtype = torch.float32 if turn % 3 else torch.float16
        parts = [draw(count, device=rank_device, dtype=dtype) for _ in range(world)]
        for i, part in enumerate(parts):
            part[:: 2 + i] = 0.0
            part[:: 5 - i % 4] = -0.0
            part[:2] = -0.0 if i else 0.0
        y = torch.full_like(parts[0], float("nan"))
        time.sleep(rng.random() * 0.003)
        lamport_exchange.all_reduce(parts[rank], y, group, rank, world)
        by_tiles = torch.empty_like(y)
        tiled_all_reduce.all_reduce(parts[rank], by_tiles, group, rank, world, shots=1)
        assert torch.equal(y, by_tiles)
        check_sum(y, torch.stack(parts).double().sum(0), torch.stack(parts).sum(0))
        everywhere = [torch.empty_like(y) for _ in range(world)]
        dist.all_gather(everywhere, y)
        bits = [part.view(torch.int16) for part in everywhere]
        assert all(torch.equal(part, bits[0]) for part in bits)


@pytest.mark.parametrize("shots", [1, 2])
def test_tiles_lie_where_wide_stores_may(group, rank_device, shots: int) -> None:
    """Behind flags of any number."""
    world = dist.get_world_size()
    if world == 1:
        pytest.skip("needs 2 ranks")
    new = dist.new_group()
    x = torch.full((5,), 7.0, device=rank_device)
    tiled_all_reduce.all_reduce(
        x, torch.empty_like(x), new.group_name, new.rank(), world, shots=shots
    )
    dist.barrier()
    (where,) = _channels[new][f"low_latency/{shots}_shot", rank_device]
    numbers = where.memory.local.view(torch.float32)
    found = (numbers == 7).nonzero().flatten().tolist()
    firsts = [i for i in found if i - 1 not in found]
    # Of two shots, the second's tiles are sums, and rank 0 owns the only tile.
    assert len(firsts) == (world - 1 if shots == 1 or not new.rank() else 0)
    assert all(i % 4 == 0 for i in firsts)
    dist.destroy_process_group(new)


def test_many_numbers(group, rank_device, monkeypatch) -> None:
    """Two ranks send them in parts, others as tiles; an odd number of 16 bits is tiles."""
    world = dist.get_world_size()
    if world == 1:
        pytest.skip("needs 2 ranks")
    tiles, parts = [], []
    by_tiles, by_values = tiled_all_reduce.all_reduce, lamport_exchange.all_reduce
    monkeypatch.setattr(low_latency, "LL_MAX_BYTES", 16)
    monkeypatch.setattr(low_latency, "LAMPORT_BYTES", 16)
    monkeypatch.setattr(
        tiled_all_reduce,
        "all_reduce",
        lambda *a, shots: tiles.append(shots) or by_tiles(*a, shots=shots),
    )
    monkeypatch.setattr(
        lamport_exchange, "all_reduce", lambda *a: parts.append(a[0].numel()) or by_values(*a)
    )
    for shape, dtype in (((4,), torch.float32), ((3, 3), torch.float32), ((9,), torch.float16)):
        x = draw(*shape, device=rank_device).to(dtype)
        for _ in range(3):
            torch.testing.assert_close(low_latency.all_reduce(x, group), world * x)
    shots = 2 if world > 2 else 1
    assert tiles == [shots] * (6 if world > 2 else 3)
    assert parts == [4] * 3 + ([4, 4, 1] * 3 if world == 2 else [])


def test_sums_in_products(rank_device) -> None:
    """Of weights that lie otherwise, of memory that was outgrown, with another time limit and another precision."""
    cuda, world = rank_device.type == "cuda", dist.get_world_size()
    group, dtype = dist.new_group(range(world)), torch.bfloat16 if cuda else torch.float16

    def check(rows: int, columns: int, across: bool) -> None:
        x = draw(rows, 64, device=rank_device, dtype=dtype)
        weight = draw(columns, 64, device=rank_device, dtype=dtype)
        lies = weight.t().contiguous().t() if across else weight
        y = matmul_all_reduce(x, lies, group.group_name, method="gemm_all_reduce")
        check_sum(y, world * x.double() @ weight.double().t(), world * F.linear(x, weight))

    try:
        with assume_equal_on_all_ranks():
            for case in ((8, 64, False), (8, 64, True), (100, 640 if cuda else 72, False), (8, 64, False)):  # fmt: skip
                for _ in range(5 if cuda else 1):
                    check(*case)
            set_timeout(9.0)
            check(8, 64, False)
    finally:
        set_timeout(10.0)
    if cuda and world > 1:
        x, weight = (draw(n, 64, device=rank_device) for n in (8, 64))
        given = x, weight, group.group_name
        exact = [matmul_all_reduce(*given, method="gemm_all_reduce") for _ in range(4)]
        settings, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.allow_tf32
        try:
            settings.allow_tf32 = True
            coarse = [matmul_all_reduce(*given, method="gemm_all_reduce") for _ in range(4)]
        finally:  # not by monkeypatch, which would take it away
            settings.allow_tf32 = before
        assert not torch.equal(exact[-1], coarse[-1])
        assert torch.equal(exact[-1], matmul_all_reduce(*given, method="gemm_all_reduce"))
