"""The tensor-parallel matmuls against F.linear on one process: forward, gradients, compile, wrong calls."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.dist.parts import assert_near
from torch_fdattn.dist import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

ROWS = {"even": [4, 4, 4, 4], "uneven": [3, 5, 1, 2], "with_zero": [5, 0, 3, 0]}
FEATURES = [4, 7, 3, 5]  # K_r of the row-parallel ops
NARROW, WIDE = 6, 9


def per_rank(values: list[int]) -> list[int]:
    return (values * 2)[: dist.get_world_size()]


def draw(*shape: int, device, dtype=torch.float32) -> Tensor:
    """Seeded alike on all ranks (conftest), so drawn alike."""
    return torch.randn(shape).to(device, dtype)


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


@pytest.mark.parametrize(
    ("kind", "biased", "compiled"),
    [*((kind, biased, False) for kind in ROWS for biased in (False, True)), ("uneven", True, True)],
)
def test_all_gather_matmul(group, rank_device, kind: str, biased: bool, compiled: bool) -> None:
    torch._dynamo.reset()
    rank, rows = dist.get_rank(), per_rank(ROWS[kind])
    x = draw(sum(rows), NARROW, device=rank_device)
    sizes = [(WIDE, 5, 2 + r) for r in range(len(rows))]  # three weights a rank, of any size
    weights = [[draw(n, NARROW, device=rank_device) for n in of_rank] for of_rank in sizes]
    biases = [[draw(n, device=rank_device) for n in of_rank] for of_rank in sizes]
    factors = [[draw(sum(rows), n, device=rank_device) for n in of_rank] for of_rank in sizes]

    def loss(ys, of_rank: int) -> Tensor:
        return sum((y.sin() * f).sum() for y, f in zip(ys, factors[of_rank], strict=True))

    def given(of_rank: int) -> list[Tensor | None]:
        # The last weight has no bias.
        return [*one_biases[of_rank][:2], None] if biased else [None] * 3

    one_x = leaf(x)
    one_weights = [[leaf(w) for w in of_rank] for of_rank in weights]
    one_biases = [[leaf(b) for b in of_rank] for of_rank in biases]
    expected = [
        [F.linear(one_x, w, b) for w, b in zip(one_weights[r], given(r), strict=True)]
        for r in range(len(rows))
    ]
    sum(loss(ys, r) for r, ys in enumerate(expected)).backward()

    own = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    ours_x, ours_weights = leaf(x[own]), [leaf(w) for w in weights[rank]]
    ours_biases = [leaf(b) for b in biases[rank][:2]] if biased else []
    arguments = [*ours_biases, None] if biased else None

    def step(x, weights, arguments):
        return all_gather_matmul(x, weights, group, arguments, rows=rows)

    step = torch.compile(step, backend="aot_eager", fullgraph=True) if compiled else step
    ys = step(ours_x, ours_weights, arguments)
    for y, e in zip(ys, expected[rank], strict=True):
        assert_near(y, e)
    loss(ys, rank).backward()
    assert_near(ours_x.grad, one_x.grad[own])
    for ours, one in zip(ours_weights, one_weights[rank], strict=True):
        assert_near(ours.grad, one.grad)
    for ours, one in zip(ours_biases, one_biases[rank][:2], strict=biased):
        assert_near(ours.grad, one.grad)


def row_parallel(device, rows: int, dtype=torch.float32):
    """x (M, K), weight (N, K), bias, a factor for the loss, and this rank's features."""
    features = per_rank(FEATURES)
    rank = dist.get_rank()
    own = slice(sum(features[:rank]), sum(features[: rank + 1]))
    total = sum(features)
    shapes = ((rows, total), (WIDE, total), (WIDE,), (rows, WIDE))
    return [draw(*shape, device=device, dtype=dtype) for shape in shapes], own


@pytest.mark.parametrize(
    ("kind", "biased", "compiled"),
    [
        *((kind, biased, False) for kind in [*ROWS, "not_given"] for biased in (False, True)),
        ("with_zero", True, True),
    ],
)
def test_matmul_reduce_scatter(group, rank_device, kind: str, biased: bool, compiled: bool) -> None:
    torch._dynamo.reset()
    rank, rows = dist.get_rank(), per_rank(ROWS.get(kind, ROWS["even"]))
    (x, weight, bias, factor), features = row_parallel(rank_device, sum(rows))
    own = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    one = [leaf(t) for t in (x, weight, bias)]
    expected = F.linear(one[0], one[1], one[2] if biased else None)
    (expected.sin() * factor).sum().backward()

    ours = [leaf(x[:, features]), leaf(weight[:, features]), leaf(bias)]

    def step(x, weight, bias):
        given = None if kind == "not_given" else rows
        return matmul_reduce_scatter(x, weight, group, bias if biased else None, rows=given)

    step = torch.compile(step, backend="aot_eager", fullgraph=True) if compiled else step
    y = step(*ours)
    assert_near(y, expected[own])
    (y.sin() * factor[own]).sum().backward()
    assert_near(ours[0].grad, one[0].grad[:, features])
    assert_near(ours[1].grad, one[1].grad[:, features])
    if biased:  # of this rank's rows alone
        whole = ours[2].grad.clone()
        dist.all_reduce(whole)
        assert_near(whole, one[2].grad)


@pytest.mark.parametrize(("biased", "compiled"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("method", ["nccl", "one_shot", "two_shot"])
def test_matmul_all_reduce(group, rank_device, method: str, biased: bool, compiled: bool) -> None:
    if method != "nccl" and rank_device.type != "cuda":
        pytest.skip("needs a CUDA device")
    torch._dynamo.reset()
    (x, weight, bias, factor), features = row_parallel(rank_device, 11)
    one = [leaf(t) for t in (x, weight, bias)]
    expected = F.linear(one[0], one[1], one[2] if biased else None)
    (expected.sin() * factor).sum().backward()
    ours = [leaf(x[:, features]), leaf(weight[:, features]), leaf(bias)]

    def step(x, weight, bias):
        return matmul_all_reduce(x, weight, group, bias if biased else None, method=method)

    step = torch.compile(step, backend="aot_eager", fullgraph=True) if compiled else step
    for _ in range(2):  # a workspace is used again
        y = step(*ours)
        assert_near(y, expected)
    (y.sin() * factor).sum().backward()
    assert_near(ours[0].grad, one[0].grad[:, features])
    assert_near(ours[1].grad, one[1].grad[:, features])
    if biased:
        assert_near(ours[2].grad, one[2].grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(group, rank_device, dtype) -> None:
    """Each partial product and each sum is rounded to the dtype once."""
    (x, weight, bias, _), features = row_parallel(rank_device, 12, dtype)
    exact = F.linear(x.double(), weight.double(), bias.double())
    y = matmul_all_reduce(x[:, features], weight[:, features], group, bias)
    assert y.dtype == dtype
    assert_near(y, exact, (2 + dist.get_world_size()) * torch.finfo(dtype).eps)


def test_autocast(group, rank_device) -> None:
    """As F.linear: bfloat16 out, gradients in the parameters' dtypes."""
    rows = per_rank(ROWS["uneven"])
    x = leaf(draw(rows[dist.get_rank()], NARROW, device=rank_device))
    weight, bias = (
        leaf(draw(WIDE, NARROW, device=rank_device)),
        leaf(draw(WIDE, device=rank_device)),
    )
    with torch.autocast(rank_device.type, torch.bfloat16):
        (y,) = all_gather_matmul(x, [weight], group, [bias], rows=rows)
        z = matmul_reduce_scatter(y, weight.t(), group, rows=rows)
        total = matmul_all_reduce(y, weight.t(), group)
    assert y.dtype == z.dtype == total.dtype == torch.bfloat16
    (z.sum() + total.sum()).backward()
    assert x.grad.dtype == weight.grad.dtype == bias.grad.dtype == torch.float32


def test_rows_of_ranks_that_differ(group, rank_device) -> None:
    if dist.get_world_size() == 1:
        pytest.skip("needs 2 ranks")
    x = draw(20 + dist.get_rank(), NARROW, device=rank_device)  # sizes that no rank has seen
    with pytest.raises(ValueError, match="rows must be the same on all ranks, got"):
        all_gather_matmul(x, [draw(WIDE, NARROW, device=rank_device)], group)
    with pytest.raises(ValueError, match="the result's shape must be the same on all ranks, got"):
        matmul_all_reduce(x, draw(WIDE, NARROW, device=rank_device), group)


class TestBadInput:
    """Every wrong call raises on every rank, before any collective."""

    @pytest.mark.parametrize(
        ("wrong", "error", "message"),
        [
            (dict(strategy="ring"), ValueError, r"strategy must be one of \('auto', 'collective', .*\), got 'ring'"),
            (dict(group="nosuch"), ValueError, "group must name a process group"),
            (dict(group=7), TypeError, "group must be a process group, its name or .* got int"),
            (dict(x_shard=[1.0]), TypeError, "x_shard must be a torch.Tensor, got list"),
            (dict(weights=torch.ones(4, 6)), TypeError, "weights must be a list of tensors, got Tensor"),
            (dict(weights=[None]), TypeError, "weights must be a list of tensors, got NoneType at 0"),
            (dict(biases=torch.ones(4)), TypeError, "biases must be a list of tensors or None, got Tensor"),
            (dict(biases=[3]), TypeError, "biases must be a list of tensors or None, got int at 0"),
            (dict(rows=torch.tensor([2])), TypeError, "rows must be a list of integers, got Tensor"),
            (dict(rows=[2.0]), TypeError, "rows must be a list of integers, got float at 0"),
            (dict(weights=[]), ValueError, "weights must hold at least one weight, got none"),
            (dict(weights=[torch.ones(4, 5)]), ValueError, r"weights\[0\] must have shape \(4, 6\) like x_shard's features, got \(4, 5\)"),
            (dict(weights=[torch.ones(4)]), ValueError, r"weights\[0\] must have 2 dimensions, got shape \(4,\)"),
            (dict(weights=[torch.ones(4, 6).half()]), TypeError, r"weights\[0\] must have dtype torch.float32 like x_shard, got torch.float16"),
            (dict(x_shard=torch.ones(2, 3, 6)), ValueError, r"x_shard must have 2 dimensions, got shape \(2, 3, 6\)"),
            (dict(x_shard=torch.ones(2, 6).long()), TypeError, "x_shard must be bfloat16, .* got torch.int64"),
            (dict(biases=[None, None]), ValueError, "biases must have 1 entries like weights, got 2"),
            (dict(biases=[torch.ones(5)]), ValueError, r"biases\[0\] must have shape \(4,\) like weights\[0\]'s rows, got \(5,\)"),
            (dict(rows=[2]), ValueError, "rows must list the rows of each of the . ranks, got 1"),
            (dict(rows=[3, 3, 3, 3]), ValueError, "rows must list the rows|x_shard must have 3 rows"),
            (dict(weights=[torch.ones(4, 6, device="meta")]), ValueError, r"weights\[0\] must be on .* like x_shard, got meta"),
        ],
    )  # fmt: skip
    def test_all_gather_matmul(self, group, rank_device, wrong, error, message) -> None:
        if wrong.get("rows") == [2] and dist.get_world_size() == 1:
            pytest.skip("needs 2 ranks: right on one")

        def here(x):
            return x.to(rank_device) if isinstance(x, Tensor) and x.device.type == "cpu" else x

        arguments = dict(x_shard=torch.ones(2, 6), weights=[torch.ones(4, 6)], group=group)
        for name, value in {**arguments, **wrong}.items():
            arguments[name] = [here(x) for x in value] if isinstance(value, list) else here(value)
        with pytest.raises(error, match=message):
            all_gather_matmul(**arguments)

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            (dict(method="three_shot"), ValueError, "method must be one of .*two_shot.* got 'three_shot'"),
            (dict(method="two_shot_multimem"), NotImplementedError, "needs NVLink multicast"),
            (dict(strategy="none"), ValueError, "strategy must be one of"),
            (dict(largest="6"), TypeError, "largest must be an int or None, got str"),
            (dict(largest=6.0), TypeError, "largest must be an int or None, got float"),
            (dict(largest=-6), ValueError, "largest must not be negative, got -6"),
            (dict(weight=[torch.ones(4, 6)]), TypeError, "weight must be a torch.Tensor, got list"),
            (dict(bias=[None]), TypeError, "bias must be a torch.Tensor, got list"),
            (dict(bias=torch.ones(3)), ValueError, r"bias must have shape \(4,\) like weight's rows"),
        ],
    )  # fmt: skip
    def test_matmul_all_reduce(self, group, rank_device, options, error, message) -> None:
        x, weight = torch.ones(2, 6, device=rank_device), torch.ones(4, 6, device=rank_device)
        with pytest.raises(error, match=message):
            matmul_all_reduce(**{"x": x, "weight": weight, "group": group, **options})

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (dict(x=None), "x must be a torch.Tensor, got NoneType"),
            (dict(weight=[torch.ones(4, 6)]), "weight must be a torch.Tensor, got list"),
            (dict(rows=torch.tensor([1, 1])), "rows must be a list of integers, got Tensor"),
            (dict(largest=[6]), "largest must be an int or None, got list"),
        ],
    )
    def test_matmul_reduce_scatter(self, group, options, message) -> None:
        arguments = dict(x=torch.ones(2, 6), weight=torch.ones(4, 6), group=group)
        with pytest.raises(TypeError, match=message):
            matmul_reduce_scatter(**{**arguments, **options})

    @pytest.mark.parametrize("method", ["one_shot", "two_shot"])
    def test_symmetric_memory(self, group, rank_device, method: str) -> None:
        x, weight = torch.ones(2, 6), torch.ones(4, 6)
        with pytest.raises(
            NotImplementedError, match=f"{method}' needs CUDA tensors .* got .* cpu"
        ):
            matmul_all_reduce(x, weight, group, method=method)
        if rank_device.type == "cuda":
            x, weight = x.to(rank_device).half(), weight.to(rank_device).half()
            with pytest.raises(TypeError, match="needs bfloat16 or float32"):
                matmul_all_reduce(x, weight, group, method=method)

    def test_rows_that_do_not_divide(self, group, rank_device) -> None:
        world = dist.get_world_size()
        if world == 1:
            pytest.skip("needs 2 ranks: everything divides by one")
        x, weight = torch.ones(world + 1, 6), torch.ones(4, 6)
        with pytest.raises(ValueError, match="rows must be given where x's rows do not divide"):
            matmul_reduce_scatter(x.to(rank_device), weight.to(rank_device), group)
