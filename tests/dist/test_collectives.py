"""The differentiable collectives against sums and concatenations of all ranks' tensors on one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_fdattn
from torch_fdattn.dist import collectives
from torch_fdattn.dist.collectives import split_evenly

ROWS = {
    "even": [3, 3, 3, 3],
    "uneven": [2, 5, 1, 4],
    "with_zero": [4, 0, 3, 0],
    "one_has_all": [0, 6, 0, 0],
    "none": [0, 0, 0, 0],
}
# How many rows x, and the result, have: those of this rank, or those of all ranks.
SHAPES = {
    "gather_rows": ("own", "all"),
    "reduce_scatter_rows": ("all", "own"),
    "all_reduce": ("all", "all"),
    "spread": ("all", "all"),
    "replicate_rows": ("own", "all"),
    "own_rows": ("all", "own"),
}


@pytest.fixture(params=ROWS)
def rows(request, group: str) -> list[int]:
    world = dist.get_world_size()
    return (ROWS[request.param] * 2)[:world]


def every_rank(shape: str, rows: list[int], seed: int, device, dtype=torch.float32) -> list[Tensor]:
    """A tensor for each rank, known to all of them."""
    generator = torch.Generator().manual_seed(seed)
    counts = rows if shape == "own" else [sum(rows)] * len(rows)
    tensors = [torch.randn(count, 3, 2, generator=generator) for count in counts]
    return [x.to(device, dtype) for x in tensors]


def apply(name: str, x: Tensor, group: str, rows: list[int]) -> Tensor:
    function = getattr(collectives, name)
    return function(x, group) if name in ("all_reduce", "spread") else function(x, group, rows)


def expected_result(name: str, xs: list[Tensor], rows: list[int]) -> Tensor:
    rank = dist.get_rank()
    if name in ("gather_rows", "replicate_rows"):
        return torch.cat(xs)
    if name == "reduce_scatter_rows":
        return sum(xs).split(rows)[rank]
    if name == "all_reduce":
        return sum(xs)
    return xs[rank].split(rows)[rank] if name == "own_rows" else xs[rank]


BACKWARD = {
    "gather_rows": "reduce_scatter_rows",
    "reduce_scatter_rows": "gather_rows",
    "all_reduce": "spread",
    "spread": "all_reduce",
    "replicate_rows": "own_rows",
    "own_rows": "replicate_rows",
}


@pytest.mark.parametrize("name", SHAPES)
def test_forward_and_backward(group, rank_device, rows, name: str) -> None:
    rank, (x_shape, y_shape) = dist.get_rank(), SHAPES[name]
    xs = every_rank(x_shape, rows, 0, rank_device)
    gradients = every_rank(y_shape, rows, 1, rank_device)
    x = xs[rank].clone().requires_grad_()
    y = apply(name, x, group, rows)
    torch.testing.assert_close(y, expected_result(name, xs, rows))
    y.backward(gradients[rank])
    torch.testing.assert_close(x.grad, expected_result(BACKWARD[name], gradients, rows))


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "spread"])
def test_results_may_be_changed_in_place(group, rank_device, rows, name: str) -> None:
    xs = every_rank(SHAPES[name][0], rows, 0, rank_device)
    y = apply(name, xs[dist.get_rank()].clone().requires_grad_(), group, rows).mul_(2)
    torch.testing.assert_close(y, 2 * expected_result(name, xs, rows))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["gather_rows", "reduce_scatter_rows", "all_reduce"])
def test_sums_are_taken_in_the_dtype(group, rank_device, name: str, dtype) -> None:
    rows = (ROWS["uneven"] * 2)[: dist.get_world_size()]
    xs = every_rank(SHAPES[name][0], rows, 0, rank_device, dtype)
    y = apply(name, xs[dist.get_rank()], group, rows)
    assert y.dtype == dtype
    exact = expected_result(name, [x.double() for x in xs], rows)
    rounding = torch.finfo(dtype).eps * len(rows)
    torch.testing.assert_close(y.double(), exact, atol=8 * rounding, rtol=rounding)


@pytest.mark.parametrize("kind", ["even", "with_zero"])
def test_compiles_whole(group, rank_device, kind: str) -> None:
    torch._dynamo.reset()
    rows = (ROWS[kind] * 2)[: dist.get_world_size()]

    def step(x: Tensor) -> Tensor:
        y = collectives.gather_rows(x.sin(), group, rows).cos()
        y = collectives.reduce_scatter_rows(y, group, rows)
        y = collectives.replicate_rows(y, group, rows)
        y = collectives.spread(collectives.all_reduce(y, group), group).sin()
        return collectives.own_rows(y, group, rows).cos()

    x = every_rank("own", rows, 0, rank_device)[dist.get_rank()]
    eager, compiled = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = step(eager)
    y = torch.compile(step, backend="aot_eager", fullgraph=True)(compiled)
    torch.testing.assert_close(y, expected)
    y.sin().sum().backward()
    expected.sin().sum().backward()
    torch.testing.assert_close(compiled.grad, eager.grad)


@pytest.mark.parametrize("name", SHAPES)
def test_double_backward_is_refused(group, rank_device, name: str) -> None:
    rows = [2] * dist.get_world_size()
    x = every_rank(SHAPES[name][0], rows, 0, rank_device)[dist.get_rank()].requires_grad_()
    y = apply(name, x, group, rows)
    with pytest.raises(NotImplementedError, match=f"{name} has no second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_split_evenly() -> None:
    assert split_evenly(10, 4) == [3, 3, 2, 2]
    assert split_evenly(3, 3) == [1, 1, 1]
    assert split_evenly(2, 4) == [1, 1, 0, 0]
    assert split_evenly(0, 2) == [0, 0]


class TestBadInput:
    """Every wrong call raises on every rank, before any collective."""

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            (
                lambda world: [2] * (world + 1),
                "rows must list the rows of each of the . ranks, got",
            ),
            (lambda world: [-1] * world, "rows must be 0 or more on every rank, got"),
            (lambda world: [3] * world, r"x must have 3 rows like rows\[.\], got 2"),
        ],
    )
    def test_rows(self, group, rank_device, rows, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            collectives.gather_rows(
                torch.ones(2, 3, device=rank_device), group, rows(dist.get_world_size())
            )

    def test_rows_that_do_not_divide(self, group, rank_device) -> None:
        world = dist.get_world_size()
        if world == 1:
            pytest.skip("needs 2 ranks: everything divides by one")
        x = torch.ones(world + 1, 3, device=rank_device)
        with pytest.raises(
            ValueError, match=f"rows must be given where x's rows do not divide by the {world}"
        ):
            collectives.reduce_scatter_rows(x, group)

    def test_no_rows(self, group, rank_device) -> None:
        with pytest.raises(ValueError, match="x must have rows"):
            collectives.gather_rows(torch.ones((), device=rank_device), group)

    def test_ranks_that_differ(self, group, rank_device) -> None:
        if dist.get_world_size() == 1:
            pytest.skip("needs 2 ranks")
        x = torch.ones(20 + dist.get_rank(), 3, device=rank_device)  # sizes that no rank has seen
        with pytest.raises(
            ValueError, match=r"rows must be the same on all ranks, got .* on rank 0"
        ):
            collectives.gather_rows(x, group)
        with pytest.raises(ValueError, match="x's shape must be the same on all ranks"):
            collectives.all_reduce(x, group)

    def test_unknown_group(self, group, rank_device) -> None:
        with pytest.raises(ValueError, match="group_name must name a process group"):
            collectives.spread(torch.ones(2, device=rank_device), "nosuch")

    def test_op_without_rank_refuses_to_be_compiled(self, group, rank_device) -> None:
        torch._dynamo.reset()
        x = torch.ones(2, 3, device=rank_device)
        op = torch.ops.fdattn.gather_rows
        torch.testing.assert_close(op(x, group), collectives.gather_rows(x, group))
        with pytest.raises(Exception, match="rank and world_size must be given"):
            torch.compile(lambda: op(x, group), backend="aot_eager", fullgraph=True)()


def _gathered_by_ops(group: str, x: Tensor) -> None:
    apply("gather_rows", x, group, None)


def _decoded(group: str, x: Tensor) -> None:
    q = torch.zeros(1, 2, 1, 16, device=x.device)
    k = torch.zeros(1, 2, 4, 16, device=x.device)
    lens = torch.tensor([4 * dist.get_world_size()], dtype=torch.int32, device=x.device)
    torch_fdattn.dist.decode(q, k, k, lens, group=group, strategy="all_gather")


def _attended(group: str, x: Tensor) -> None:
    q = torch.zeros(1, 2, 4, 16, device=x.device)
    torch_fdattn.dist.ring_attention(q, q, q, group=group, strategy="all_gather")


def _trained(group: str, x: Tensor) -> None:
    """The backward gathers inside a mode that sees torch's functions."""
    shards = torch_fdattn.dist.SequenceShards.contiguous(
        4 * dist.get_world_size(), dist.get_world_size()
    )
    q = torch.ones(1, 2, 4, 16, device=x.device, requires_grad=True)
    with torch_fdattn.dist.context_parallel(group, shards=shards, strategy="all_gather"):
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()


@pytest.mark.parametrize("gather", [_gathered_by_ops, _decoded, _attended, _trained])
def test_no_functional_gathers_outside_of_graphs(group, rank_device, gather) -> None:
    """Over gloo they corrupt memory now and then (`collectives.all_gather`)."""
    x = torch.ones(3, 2, device=rank_device)
    with torch.profiler.profile() as profile:
        gather(group, x)
    names = {event.name for event in profile.events()}
    assert "c10d::_allgather_base_" in names
    assert not any("all_gather_into_tensor" in name or "coalesced" in name for name in names)
