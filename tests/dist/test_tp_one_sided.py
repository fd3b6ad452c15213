"""The tensor-parallel matmuls through symmetric memory: on CPUs with TRITON_INTERPRET=1, on GPUs over NVLink."""

from __future__ import annotations

import ctypes
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.dist.one_sided_matmuls import (  # noqa: F401
    STRATEGIES,
    WAYS,
    _kernels,
    check_sum,
    draw,
    expect_launch,
    of_rank,
)
from tests.dist.test_tp_linear import leaf
from torch_fdattn.dist import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from torch_fdattn.dist.symm.copies import Copies
from torch_fdattn.ops.library import launches


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


@pytest.mark.parametrize("shares", [(5, 0, 3, 1, 0, 2, 6, 0), (2, 3, 0, 4, 1, 0, 0, 7)])
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

    monkeypatch.setattr(Copies, "send_all", lambda self, *to: self._send_by(Driver(), 77, *to))
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
