"""The all-reduce with a residual and RMSNorm: against its three parts, kernels on CPUs with TRITON_INTERPRET=1."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.dist.one_sided_matmuls import check_sum, draw, of_rank
from tests.dist.test_tp_linear import leaf
from torch_fdattn.dist import PeerTimeout, matmul_all_reduce_rms_norm, set_timeout
from torch_fdattn.dist.symm.channel import _channels
from torch_fdattn.dist.tensor_parallel import one_sided
from torch_fdattn.ops.library import INTERPRET, launches

EPS = 1e-5


@pytest.fixture
def kernels(rank_device: torch.device) -> None:
    if rank_device.type == "cpu" and not INTERPRET:
        pytest.skip("tests a kernel: needs a CUDA device or TRITON_INTERPRET=1")
    if dist.get_world_size() == 1:
        pytest.skip("needs 2 ranks")


def case(rows: int, columns: int, device, dtype=torch.float32, biased: bool = False) -> tuple:
    """(all ranks' x, weight), (residual, norm's weight), bias; the same on all ranks."""
    features = 24 * dist.get_world_size()
    x = draw(rows, features, device=device, dtype=dtype)
    weight = draw(columns, features, device=device, dtype=dtype)
    residual, norm = (draw(*shape, device=device, dtype=dtype) for shape in ((rows, columns), (columns,)))  # fmt: skip
    bias = draw(columns, device=device, dtype=dtype) if biased else None
    return x, weight, residual, norm, bias


def own(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    mine = of_rank(24)
    return x[:, mine], weight[:, mine]


def exact(x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(normed, added) by torch, in the dtype of what is given."""
    added = residual + F.linear(x, weight, bias)
    return F.rms_norm(added, added.shape[-1:], norm, EPS), added


def by_parts(x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `exact`, of a product whose parts are rounded before they are summed, as they are in any all-reduce of them."""
    shares = map(of_rank, [24] * dist.get_world_size(), range(dist.get_world_size()))
    parts = torch.stack([F.linear(x[:, share], weight[:, share]) for share in shares]).sum(0)
    added = residual + (parts if bias is None else parts + bias)
    return F.rms_norm(added, added.shape[-1:], norm, EPS), added


def double(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.double() for t in tensors]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("rows", "columns", "biased", "dtype"),
    [
        (1, 34, False, torch.float32),
        (5, 33, True, torch.float32),
        (5, 33, True, torch.float16),  # no whole words
        (10, 1, False, torch.float32),
        (2, 2048, True, torch.float16),
    ],
)
def test_one_launch(group, rank_device, rows: int, columns: int, biased: bool, dtype) -> None:
    """Right, and the same bits on all ranks and in all repeats; rows that are no whole words are three launches."""
    given = case(rows, columns, rank_device, dtype, biased)
    x, weight, residual, norm, bias = given
    before = launches["tensor_parallel/row_norm"]
    found = []
    for _ in range(3):
        found.append(
            matmul_all_reduce_rms_norm(
                *own(x, weight), group, residual, norm, EPS, bias, method="low_latency"
            )
        )
    whole = columns * dtype.itemsize % 4 == 0
    assert launches["tensor_parallel/row_norm"] == before + 3 * whole
    for ours, right, at_dtype in zip(
        found[0], exact(*double(*given)), by_parts(*given), strict=True
    ):
        assert ours.dtype == dtype
        check_sum(ours, right, at_dtype)
        everywhere = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, ours)
        assert all(torch.equal(part, ours) for part in everywhere)
    assert all(torch.equal(a, b) for again in found[1:] for a, b in zip(again, found[0], strict=True))  # fmt: skip


@pytest.mark.usefixtures("kernels")
def test_sizes_that_change_and_ranks_that_come_late(group, rank_device) -> None:
    rng = random.Random(dist.get_rank())
    for rows, columns in ((4, 40), (1, 7), (9, 40), (1, 7), (2, 100)):
        given = case(rows, columns, rank_device)
        time.sleep(rng.random() * 0.02)
        found = matmul_all_reduce_rms_norm(*own(*given[:2]), group, *given[2:4], EPS, method="gemm_all_reduce")  # fmt: skip
        for ours, right in zip(found, exact(*given), strict=True):
            torch.testing.assert_close(ours, right, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("kernels")
def test_many_rows_are_three_launches(group, rank_device, monkeypatch) -> None:
    monkeypatch.setattr(one_sided, "NORM_ROWS", 2)
    given = case(3, 8, rank_device)
    before = launches["tensor_parallel/row_norm"]
    found = matmul_all_reduce_rms_norm(*own(*given[:2]), group, *given[2:4], EPS, method="low_latency")  # fmt: skip
    assert launches["tensor_parallel/row_norm"] == before
    for ours, right in zip(found, exact(*given), strict=True):
        torch.testing.assert_close(ours, right, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("kernels")
def test_a_rank_that_does_not_come(group, rank_device) -> None:
    """NaN in time on the others, then the exception."""
    new, world = dist.new_group(), dist.get_world_size()
    given = case(2, 16, rank_device)
    call = lambda: matmul_all_reduce_rms_norm(*own(*given[:2]), new.group_name, *given[2:4], EPS, method="low_latency")  # noqa: E731  # fmt: skip
    call()
    dist.barrier()
    set_timeout(1.5 if world > 2 else 0.3)  # of two, nobody else can be late
    try:
        if dist.get_rank() != world - 1:
            assert all(t.isnan().all() for t in call())
            with pytest.raises(PeerTimeout, match=f"rank {world - 1}"):
                call()
        dist.barrier()
    finally:
        set_timeout(10.0)
        for channels in _channels[new].values():
            channels[-1].fault.tensor.zero_()
    dist.destroy_process_group(new)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients(group, rank_device, compiled: bool) -> None:
    """Those of one process; replicated ones are the same on every rank."""
    torch._dynamo.reset()
    given = case(5, 12, rank_device, biased=True)
    x, weight, residual, norm, bias = given
    ours = [leaf(t) for t in (*own(x, weight), residual, norm, bias)]

    def step(x, weight, residual, norm, bias):
        return matmul_all_reduce_rms_norm(x, weight, group, residual, norm, EPS, bias)

    if compiled:
        step = torch.compile(step, backend="aot_eager", fullgraph=True)
    right = [leaf(t) for t in given]
    factors = [draw(5, 12, device=rank_device) for _ in range(2)]
    for results in (step(*ours), exact(*right)):
        sum((y * f).sum() for y, f in zip(results, factors, strict=True)).backward()
    mine = of_rank(24)
    wanted = [right[0].grad[:, mine], right[1].grad[:, mine], *(t.grad for t in right[2:])]
    for t, want in zip(ours, wanted, strict=True):
        torch.testing.assert_close(t.grad, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(residual=None), TypeError, "residual must be a torch.Tensor, got NoneType"),
        (dict(residual=torch.ones(3, 4)), ValueError, r"residual must have shape \(2, 4\)"),
        (dict(norm_weight=torch.ones(5)), ValueError, r"norm_weight must have shape \(4,\)"),
        (dict(norm_weight=torch.ones(4).half()), TypeError, "norm_weight must .*float32.*float16"),
        (dict(method="other"), ValueError, "method must be one of"),
    ],
)
def test_bad_input(group, rank_device, change: dict, error: type, message: str) -> None:
    given = dict(residual=torch.ones(2, 4), norm_weight=torch.ones(4), eps=EPS) | change
    given = {k: v.to(rank_device) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    x, weight = (torch.ones(*shape, device=rank_device) for shape in ((2, 6), (4, 6)))
    with pytest.raises(error, match=message):
        matmul_all_reduce_rms_norm(x, weight, group, **given)
