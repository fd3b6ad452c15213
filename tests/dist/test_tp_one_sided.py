"""The tensor-parallel matmuls through symmetric memory: on CPUs with TRITON_INTERPRET=1, on GPUs over NVLink."""

from __future__ import annotations

import ctypes
import functools
import random
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.dist.dense_layers import HIDDEN, config
from tests.dist.parts import randomise
from tests.dist.test_tp_linear import leaf
from tests.epochs import start_at
from torch_fdattn.dist import (
    TPMLP,
    PeerTimeout,
    all_gather_matmul,
    matmul_all_reduce,
    matmul_all_reduce_rms_norm,
    matmul_reduce_scatter,
    set_timeout,
)
from torch_fdattn.dist.consensus import assume_equal_on_all_ranks
from torch_fdattn.dist.symm.channel import _channels
from torch_fdattn.dist.tensor_parallel import lamport_exchange, low_latency, tiled_all_reduce
from torch_fdattn.dist.tensor_parallel.auto import ALL_REDUCE, GATHER, SCATTER
from torch_fdattn.dist.tensor_parallel.copies import Copies
from torch_fdattn.dist.tensor_parallel.layers import TokenRows
from torch_fdattn.models.transformer import MLP
from torch_fdattn.ops.library import INTERPRET, launches
from torch_fdattn.testing import assert_launched

STRATEGIES = ("copy_engine", "fused", "low_latency")
#: With so many features a rank; rows of 37 are no multiple of 16 bytes, which tensor descriptors need.
WAYS = [
    ("copy_engine", 40, torch.float16),
    ("fused", 40, torch.float16),
    ("fused", 40, torch.float32),
    ("fused", 37, torch.float16),
    ("low_latency", 40, torch.float16),
    ("low_latency", 40, torch.float32),
]
METHODS = ("low_latency", "gemm_all_reduce")


@pytest.fixture(autouse=True)
def _kernels(rank_device: torch.device) -> None:
    if rank_device.type == "cpu" and not INTERPRET:
        pytest.skip("tests a kernel: needs a CUDA device or TRITON_INTERPRET=1")


def draw(*shape: int, device, dtype=torch.float32) -> Tensor:
    """Seeded alike on all ranks (conftest), so drawn alike."""
    return torch.randn(shape).to(device, dtype)


def check_sum(ours: Tensor, exact: Tensor, at_dtype: Tensor) -> None:
    """The error rule: at_dtype is torch's result in the inputs' dtype, exact the one of fp64."""
    rounding = ((exact.to(ours.dtype) + 0.3 - 0.3).double() - exact).abs().max().item()
    bound = 2 * (at_dtype.double() - exact).abs().max().item() + 2 * rounding
    error = (ours.double() - exact).abs().max().item() if exact.numel() else 0.0
    assert error <= bound, (error, bound)


def of_rank(count: int, rank: int | None = None) -> slice:
    rank = dist.get_rank() if rank is None else rank
    return slice(rank * count, (rank + 1) * count)


def expect_launch(*names: str):
    """That kernels ran; one rank alone has nobody to talk to."""
    return assert_launched(
        *(f"tensor_parallel/{name}" for name in names if dist.get_world_size() > 1)
    )


@pytest.mark.parametrize(("strategy", "features", "dtype"), WAYS)
def test_all_gather_matmul(
    group, rank_device, strategy: str, features: int, dtype: torch.dtype
) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    rows, sizes = 19, (33, 8)
    x = draw(world * rows, features, device=rank_device, dtype=dtype)
    weights = [
        [draw(n + r, features, device=rank_device, dtype=dtype) for n in sizes]
        for r in range(world)
    ]
    dys = [[draw(len(x), len(w), device=rank_device, dtype=dtype) for w in ws] for ws in weights]
    ours_x, ours_w = leaf(x[of_rank(rows)]), [leaf(w) for w in weights[rank]]
    with expect_launch(f"{strategy}_all_gather"):
        ys = all_gather_matmul(ours_x, ours_w, group, strategy=strategy)
    for y, w in zip(ys, weights[rank], strict=True):
        check_sum(y, x.double() @ w.double().t(), x @ w.t())
    torch.autograd.backward(ys, dys[rank])
    exact = sum(
        dy.double() @ w.double()
        for of_dy, of_w in zip(dys, weights, strict=True)
        for dy, w in zip(of_dy, of_w, strict=True)
    )
    partials = [
        sum(dy @ w for dy, w in zip(*pair, strict=True)) for pair in zip(dys, weights, strict=True)
    ]
    at_dtype = torch.stack(partials).sum(0)
    own = of_rank(rows)
    check_sum(ours_x.grad, exact[own], at_dtype[own])
    for w, dy in zip(ours_w, dys[rank], strict=True):
        check_sum(w.grad, dy.double().t() @ x.double(), dy.t() @ x)
    with torch.no_grad():  # the same bits again, without what a backward needs
        for y, again in zip(ys, all_gather_matmul(ours_x, ours_w, group, strategy=strategy), strict=True):  # fmt: skip
            assert torch.equal(y, again)


@pytest.mark.parametrize(("strategy", "features", "dtype"), WAYS)
def test_matmul_reduce_scatter(
    group, rank_device, strategy: str, features: int, dtype: torch.dtype
) -> None:
    world = dist.get_world_size()
    rows, columns = 19, 34
    x = draw(world * rows, world * features, device=rank_device, dtype=dtype)
    weight = draw(columns, world * features, device=rank_device, dtype=dtype)
    dy = draw(len(x), columns, device=rank_device, dtype=dtype)
    own, mine = of_rank(rows), of_rank(features)
    ours = leaf(x[:, mine]), leaf(weight[:, mine])
    with expect_launch(f"{strategy}_reduce_scatter"):
        y = matmul_reduce_scatter(*ours, group, strategy=strategy)
    parts = [
        x[own, of_rank(features, r)] @ weight[:, of_rank(features, r)].t() for r in range(world)
    ]
    check_sum(y, x[own].double() @ weight.double().t(), torch.stack(parts).sum(0))
    y.backward(dy[own])
    for found, a, b in ((ours[0].grad, dy, weight[:, mine]), (ours[1].grad, dy.t(), x[:, mine])):
        check_sum(found, a.double() @ b.double(), a @ b)
    with torch.no_grad():
        assert torch.equal(y, matmul_reduce_scatter(*ours, group, strategy=strategy))


@pytest.mark.parametrize(
    ("strategy", "late"),
    [("copy_engine", "last"), ("fused", "first"), ("fused", "last"), ("low_latency", "first")],
)
def test_a_rank_that_comes_late(group, rank_device, strategy: str, late: str) -> None:
    """What it has not sent yet is waited for."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x = draw(world * 4, 32, device=rank_device)
    weight = draw(world, 16, 32, device=rank_device)[rank]
    wrong = torch.zeros(2, device=rank_device)
    for _ in range(2):  # what was sent in a call before is other data
        x = x + 1
        mine = x * (rank + 1)
        whole = mine @ weight.t()
        dist.all_reduce(whole)
        for i, right in enumerate((x @ weight.t(), whole[of_rank(4)])):
            if rank == (0 if late == "first" else world - 1):
                time.sleep(0.2)
            if i == 0:
                (found,) = all_gather_matmul(x[of_rank(4)], [weight], group, strategy=strategy)
            else:
                found = matmul_reduce_scatter(mine, weight, group, strategy=strategy)
            wrong[i] += not torch.allclose(found, right, rtol=1e-4, atol=1e-4)
    dist.all_reduce(wrong)  # all ranks fail, or none
    assert wrong.tolist() == [0, 0]


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
            part[:: 5 - i] = -0.0
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


@pytest.mark.parametrize("shares", [(5, 0, 3, 1), (2, 3, 0, 4)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_uneven_rows(group, rank_device, strategy: str, shares: tuple[int, ...]) -> None:
    """Any number of rows on any rank; `fused` leaves them to `collective`."""
    world, rank = dist.get_world_size(), dist.get_rank()
    rows = list(shares[:world])
    first = sum(rows[:rank])
    x, weight = draw(sum(rows), 16, device=rank_device), draw(8, 16, device=rank_device)
    own = slice(first, first + rows[rank])
    before = launches.total()
    for _ in range(2):
        (y,) = all_gather_matmul(x[own], [weight], group, rows=rows, strategy=strategy)
        torch.testing.assert_close(y, F.linear(x, weight))
        y = matmul_reduce_scatter(x, weight, group, rows=rows, strategy=strategy)
        torch.testing.assert_close(y, world * F.linear(x, weight)[own])
        assert y.data_ptr() % 16 == 0
    assert world == 1 or (launches.total() > before) == (strategy != "fused")
    x, weight = x.requires_grad_(), weight.requires_grad_()
    (y,) = all_gather_matmul(x[own], [weight], group, rows=rows, strategy=strategy)
    z = matmul_reduce_scatter(x, weight, group, rows=rows, strategy=strategy)
    z += 1  # nobody's view
    (y.sum() + z.sum()).backward()
    ones = torch.ones(len(x), 8, device=rank_device)
    right = ones @ weight.detach()
    right[own] *= 1 + world
    torch.testing.assert_close(x.grad, right)
    torch.testing.assert_close(weight.grad, 2 * ones.t() @ x.detach())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_compiled_training(group, rank_device, strategy: str) -> None:
    """A graph holds the raw ops, forward and backward."""
    torch._dynamo.reset()
    world = dist.get_world_size()
    x, weight = draw(3, 16, device=rank_device), draw(8, 16, device=rank_device)

    def step(x, weight):
        (y,) = all_gather_matmul(x, [weight], group, strategy=strategy)
        y = matmul_reduce_scatter(y.relu(), weight.t(), group, strategy=strategy)
        return y + matmul_all_reduce(x, weight @ weight.t() @ weight, group, method="low_latency").sum()  # fmt: skip

    found = []
    for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        given = leaf(x), leaf(weight)
        y = run(*given)
        y.square().sum().backward()
        found.append((y, *(t.grad for t in given)))
    assert world == 1 or launches[f"tensor_parallel/{strategy}_all_gather"] >= 2
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize(
    ("strategy", "reentrant"), [("copy_engine", True), ("fused", False), ("low_latency", True)]
)
def test_checkpointed_training(group, rank_device, strategy: str, reentrant: bool) -> None:
    """What is recomputed has the same bits."""
    x, weight = draw(3, 16, device=rank_device), draw(8, 16, device=rank_device)

    def step(x: Tensor, weight: Tensor) -> Tensor:
        (y,) = all_gather_matmul(x, [weight], group, strategy=strategy)
        y = matmul_reduce_scatter(y.relu(), weight.t(), group, strategy=strategy)
        return matmul_all_reduce(y, weight, group, method="low_latency")

    found = []
    for run in (step, functools.partial(checkpoint, step, use_reentrant=reentrant)):
        given = leaf(x), leaf(weight)
        y = run(*given)
        y.square().sum().backward()
        found.append((y, *(t.grad for t in given)))
    assert all(torch.equal(plain, again) for plain, again in zip(*found, strict=True))


def by_tiles(x: Tensor, weight: Tensor, group_name: str, shots: int) -> Tensor:
    """`low_latency` of however few numbers in the way of very many."""
    of_group = dist.distributed_c10d._resolve_process_group(group_name)
    part = F.linear(x, weight)
    y = torch.empty_like(part)
    tiled_all_reduce.all_reduce(part, y, group_name, of_group.rank(), of_group.size(), shots=shots)
    return y


def by_packets(x: Tensor, weight: Tensor, group_name: str) -> Tensor:
    """`low_latency` of odd numbers."""
    part = F.linear(x, weight)
    y = torch.empty_like(part)
    of_group = dist.distributed_c10d._resolve_process_group(group_name)
    low_latency.ll_all_reduce(part, y, group_name, of_group.size())
    return y


CALLS = {
    **{f"{s} gather": lambda x, w, g, s=s: all_gather_matmul(x, [w], g, strategy=s)[0] for s in STRATEGIES},
    **{f"{s} scatter": lambda x, w, g, s=s: matmul_reduce_scatter(x, w, g, strategy=s) for s in STRATEGIES},
    **{m: lambda x, w, g, m=m: matmul_all_reduce(x, w, g, method=m) for m in METHODS},
    **{f"low_latency by tiles, {n}": lambda x, w, g, n=n: by_tiles(x, w, g, n) for n in (1, 2)},
    "low_latency by packets": by_packets,
}  # fmt: skip


def test_graphs(group, rank_device) -> None:
    """Replays, which copy to where the capture did, mixed with eager calls; ranks that come late."""
    if rank_device.type != "cuda" or dist.get_world_size() == 1:
        pytest.skip("needs a CUDA device")
    rng, world = random.Random(dist.get_rank()), dist.get_world_size()
    weight = draw(256, 512, device=rank_device, dtype=torch.bfloat16)
    for call in CALLS.values():
        x = draw(64 * world, 512, device=rank_device, dtype=torch.bfloat16)
        call(x, weight, group)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = [call(x, weight, group), call(x + 1, weight, group)]
        for _ in range(10):
            x.copy_(draw(*x.shape, device=rank_device, dtype=torch.bfloat16))
            time.sleep(rng.random() * 0.01)
            graph.replay()
            for i, y in enumerate(found):
                assert torch.equal(y, call(x + i, weight, group))
            torch.cuda.synchronize()


def set_epochs(epoch: int) -> None:
    """As if all channels' next calls were this one."""
    group = dist.distributed_c10d._resolve_process_group(dist.group.WORLD.group_name)
    for (purpose, _), channels in _channels.get(group, {}).items():
        if purpose.partition("/")[0] in (*STRATEGIES, *METHODS):
            start_at(epoch, purpose, channels[-1])
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def test_epochs_wrap(group, rank_device) -> None:
    """From two calls before the epoch's 32 bits are full on, with stragglers and shapes that change."""
    rng, world = random.Random(dist.get_rank()), dist.get_world_size()
    for i in range(6):
        if i == 1:
            set_epochs(0xFFFFFFFE)
        time.sleep(rng.random() * 0.02)
        x = draw(2 + i % 2, 16, device=rank_device) + i
        weight = draw(6, 16, device=rank_device)
        one = F.linear(x, weight)
        for strategy in STRATEGIES:
            (y,) = all_gather_matmul(x, [weight], group, strategy=strategy)
            torch.testing.assert_close(y, one.repeat(world, 1))
            y = matmul_reduce_scatter(x.repeat(world, 1), weight, group, strategy=strategy)
            torch.testing.assert_close(y, world * one)
        for method in METHODS:
            torch.testing.assert_close(matmul_all_reduce(x, weight, group, method=method), world * one)  # fmt: skip
        for shots in (1, 2):
            torch.testing.assert_close(by_tiles(x, weight, group, shots), world * one)
        torch.testing.assert_close(by_packets(x, weight, group), world * one)
    set_epochs(1)


@pytest.mark.parametrize("method", ["low_latency", "one_shot", "two_shot", "nccl"])
def test_calls_between_larger_ones(rank_device, method: str) -> None:
    """Symmetric memory grows in between, and the time limit changes."""
    if method.endswith("shot") and rank_device.type == "cpu":
        pytest.skip("torch's symmetric memory: needs a CUDA device")
    group = dist.new_group(range(dist.get_world_size()))
    weight, norm = draw(64, 16, device=rank_device), torch.ones(64, device=rank_device)

    def check(rows: int) -> None:
        x, residual = draw(rows, 16, device=rank_device), draw(rows, 64, device=rank_device)
        right = dist.get_world_size() * F.linear(x, weight)
        given = x, weight, group.group_name
        torch.testing.assert_close(matmul_all_reduce(*given, method=method), right)
        # A program a row, which takes the interpreter long where there are many.
        for eps in (1e-6, 0.5) if rank_device.type == "cuda" or rows == 8 else ():
            normed, added = matmul_all_reduce_rms_norm(*given, residual, norm, eps, method=method)
            torch.testing.assert_close(added, residual + right)
            torch.testing.assert_close(normed, F.rms_norm(added, (64,), norm, eps))
        y = matmul_reduce_scatter(x.repeat(dist.get_world_size(), 1), *given[1:], strategy=way)
        torch.testing.assert_close(y, right)

    way = "low_latency" if method == "low_latency" else "collective"
    repeats = 5 if rank_device.type == "cuda" else 1  # the interpreter launches nothing directly
    try:
        with assume_equal_on_all_ranks():
            for rows in (*[8] * repeats, *[192] * repeats, *[8] * repeats):
                check(rows)
            set_timeout(9.0)
            check(8)
    finally:
        set_timeout(10.0)


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


def test_the_drivers_own_copies(group, rank_device, monkeypatch) -> None:
    """What a GPU's copies are told, done by memmove on the CPU."""
    if rank_device.type == "cuda":
        pytest.skip("of memory that CPU processes share")
    moved = []

    class Driver:
        def cuMemcpyAsync(self, target, source, nbytes, stream):
            moved.append((nbytes, stream))
            ctypes.memmove(target, source, nbytes)
            return 0

    monkeypatch.setattr(Copies, "send", lambda self, *chunk: self._send_by(Driver(), 77, *chunk))
    world, rank = dist.get_world_size(), dist.get_rank()
    rows = [3 + r for r in range(world)]
    x, weight = draw(sum(rows), 16, device=rank_device), draw(6, 16, device=rank_device)
    own = x[sum(rows[:rank]) : sum(rows[: rank + 1])]
    (y,) = all_gather_matmul(own, [weight], group, rows=rows, strategy="copy_engine")
    torch.testing.assert_close(y, F.linear(x, weight))
    y = matmul_reduce_scatter(x, weight, group, rows=rows, strategy="copy_engine")
    torch.testing.assert_close(y, world * F.linear(own, weight))
    size = x.element_size()
    sent = [own.numel() * size, 8] * (world - 1)
    sent += [n for i in range(1, world) for n in (rows[(rank + i) % world] * 6 * size, 8)]
    assert moved == [(n, 77) for n in sent]


def test_wrong_calls(group, rank_device) -> None:
    if dist.get_world_size() == 1:
        pytest.skip("needs 2 ranks")
    x, weight = (draw(2, 6, device=rank_device, dtype=torch.float64) for _ in range(2))
    for strategy in STRATEGIES:
        with pytest.raises(TypeError, match=f"strategy '{strategy}' needs bfloat16, .*float64"):
            all_gather_matmul(x, [weight], group, strategy=strategy)
    with pytest.raises(TypeError, match=r"method 'gemm_all_reduce' needs bfloat16, .*float64"):
        matmul_all_reduce(x, weight, group, method="gemm_all_reduce")
    with pytest.raises(NotImplementedError, match="strategy 'copy_engine' gathers or scatters"):
        matmul_all_reduce(x, weight, group, strategy="copy_engine")


def test_a_rank_that_does_not_come(group, rank_device) -> None:
    """NaN in time, then the exception; calls that were queued before it send nothing."""
    world, rank = dist.get_world_size(), dist.get_rank()
    if world == 1:
        pytest.skip("needs 2 ranks")
    lost = 1
    new, rest = dist.new_group(), dist.new_group([i for i in range(world) if i != lost])
    x, weight = draw(2 * world, 16, device=rank_device), draw(6, 16, device=rank_device)
    for call in CALLS.values():
        for _ in range(2):
            assert call(x, weight, new.group_name).isfinite().all()
    dist.barrier()
    set_timeout(1 if world > 2 else 0.3)  # of two, nobody else can be late
    for name, call in CALLS.items() if rank != lost else ():
        dist.barrier(rest)  # or the one that is late would be the one reported
        y = call(x, weight, new.group_name)
        assert y.isnan().all(), name
        with pytest.raises(PeerTimeout, match=f"waited for rank {lost} .*epoch 3") as error:
            call(x, weight, new.group_name)
        assert error.value.strategy == name.split()[0]
        # What would follow in a queue; the others are not told a word of it.
        _forget(new.group_name)
        again = call(x, weight, new.group_name)
        assert again.isnan().all(), name
        _forget(new.group_name)
    set_timeout(10)
    dist.barrier()
    dist.destroy_process_group(new)
    if rank != lost:
        dist.destroy_process_group(rest)


def _forget(group_name: str) -> None:
    """As if the host had not yet seen what the device knows."""
    group = dist.distributed_c10d._resolve_process_group(group_name)
    for channels in _channels.get(group, {}).values():
        channels[-1].fault.tensor.zero_()


def test_auto_is_collective_where_nothing_was_measured(group, rank_device) -> None:
    before = launches.total()
    x, weight = draw(2, 6, device=rank_device), draw(4, 6, device=rank_device)
    all_gather_matmul(x, [weight], group)
    matmul_all_reduce(x, weight, group)
    assert launches.total() == before


@torch.no_grad()
def test_every_call_and_a_graph_take_the_same_choice(group, rank_device, measured) -> None:
    """No memory of first calls: the table alone decides."""
    if dist.get_world_size() == 1:
        pytest.skip("needs 2 ranks")
    measured((ALL_REDUCE, 6, 8, [[4, "low_latency"], [64, "nccl"]]))
    weight = draw(6, 8, device=rank_device)
    for rows, ours in ((4, True), (5, True), (40, False)):
        x = draw(rows, 8, device=rank_device)
        for _ in range(4):
            before = launches["tensor_parallel/low_latency"]
            y = matmul_all_reduce(x, weight, group)
            torch.testing.assert_close(y, dist.get_world_size() * F.linear(x, weight), atol=1e-5, rtol=1e-5)  # fmt: skip
            assert (launches["tensor_parallel/low_latency"] > before) == ours
    if rank_device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        x = draw(4, 8, device=rank_device)
        before = launches["tensor_parallel/low_latency"]
        with torch.cuda.graph(graph):
            y = matmul_all_reduce(x, weight, group)
        assert launches["tensor_parallel/low_latency"] == before + 1
        graph.replay()
        torch.testing.assert_close(y, dist.get_world_size() * F.linear(x, weight), atol=1e-5, rtol=1e-5)  # fmt: skip


@torch.no_grad()
def test_a_norm_behind_it_takes_the_same_choice(group, rank_device, measured) -> None:
    if dist.get_world_size() == 1:
        pytest.skip("needs 2 ranks")
    measured((ALL_REDUCE, 6, 8, [[4, "low_latency"], [64, "nccl"]]))
    x, weight = draw(4, 8, device=rank_device), draw(6, 8, device=rank_device)
    residual, norm = draw(4, 6, device=rank_device), draw(6, device=rank_device)
    for _ in range(3):
        before = launches["tensor_parallel/row_norm"]
        matmul_all_reduce_rms_norm(x, weight, group, residual, norm, 1e-6)
        assert launches["tensor_parallel/row_norm"] == before + 1


@torch.no_grad()
def test_layers_choose_alike_where_shares_differ(group, rank_device, measured) -> None:
    """By the first rank's sizes, of those measured the nearest."""
    world = dist.get_world_size()
    if world == 1:
        pytest.skip("needs 2 ranks")
    dense = randomise(MLP(config(inner=10 * world + 1))).to(rank_device)
    measured(
        (GATHER, 30, HIDDEN, [[4 * world, "collective"], [8 * world, "copy_engine"]]),
        (SCATTER, HIDDEN, 14, [[8 * world, "copy_engine"]]),
        (ALL_REDUCE, HIDDEN, 14, [[2, "low_latency"], [64, "nccl"]]),
    )
    for strategy, rows, launched in (
        ("ag_rs", 4 * world, ["copy_engine_reduce_scatter"]),
        ("ag_rs", 7 * world, ["copy_engine_all_gather", "copy_engine_reduce_scatter"]),
        ("all_reduce", 3, ["low_latency"]),
        ("all_reduce", 60, []),
    ):
        layer = TPMLP.from_module(dense, group, strategy)
        x = draw(rows, HIDDEN, device=rank_device)
        own = of_rank(rows // world) if strategy == "ag_rs" else slice(None)
        before = launches.copy()
        torch.testing.assert_close(layer(x[own]), dense(x)[own], atol=1e-4, rtol=1e-4)
        ours = {
            name[len("tensor_parallel/") :]
            for name in launches - before
            if "tensor_parallel" in name
        }
        assert ours == set(launched), (strategy, rows)


@torch.no_grad()
@pytest.mark.parametrize("linear_strategy", STRATEGIES)
def test_layers_that_take_either_form(group, rank_device, linear_strategy: str) -> None:
    """`copy_engine`, which all-reduces nothing, is for sharded rows; replicated ones take what is measured."""
    world = dist.get_world_size()
    dense, tokens = randomise(MLP(config(inner=9))).to(rank_device), TokenRows()
    layer = TPMLP.from_module(dense, group, "auto", tokens=tokens, linear_strategy=linear_strategy)
    x = draw(2 * world, HIDDEN, device=rank_device)
    torch.testing.assert_close(layer(x), dense(x), atol=1e-4, rtol=1e-4)
    tokens.rows = [2] * world
    own = of_rank(2)
    names = (f"{linear_strategy}_all_gather", f"{linear_strategy}_reduce_scatter")
    with expect_launch(*names):
        torch.testing.assert_close(layer(x[own]), dense(x)[own], atol=1e-4, rtol=1e-4)
