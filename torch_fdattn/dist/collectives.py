"""Differentiable functional collectives over the rows (dim 0) of a tensor.

Three pairs; in each, the backward of one is the forward of the other:

| forward | backward | used where |
| --- | --- | --- |
| `gather_rows`: all-gather | reduce-scatter (sum) | ranks use the gathered rows differently |
| `reduce_scatter_rows`: reduce-scatter (sum) | all-gather | each rank goes on with its rows of a sum |
| `all_reduce`: sum over the ranks | identity | every rank goes on alike with the sum |
| `spread`: identity | all-reduce (sum) | ranks use one replicated tensor differently |
| `replicate_rows`: all-gather | own rows | every rank goes on alike with the gathered rows |
| `own_rows`: own rows | all-gather | each rank goes on with its rows of a replicated tensor |

"Alike" is the convention of a replicated loss: every rank computes the same loss from the same tensor,
so the gradient that it sees is already the whole one.

Where nobody traces or differentiates, tensors of a GPU go through the group's own collectives, in the current stream:
functional ones run in a stream of the backend's, 5 µs of the device's time and 20 of the host's. They are called
without `torch.distributed`'s wrappers, which cost the host as much as a launch. Gathers do so on CPUs as well (`all_gather`).

Sums are taken in the tensor's dtype, as NCCL users expect. `rows` lists how many rows each rank has;
None means as many on every rank. Only where the numbers differ are rows padded to the largest, or, where
that would double what is scattered, summed by everyone. Zero rows are legal. Everything else is built on
`torch.ops._c10d_functional`, which NCCL and gloo both serve and torch.compile traces; rank and world size
are arguments of the ops for the reason given in `dist/decode/op.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.nn import Parameter

from torch_fdattn import checks
from torch_fdattn.dist.consensus import check_equal_on_all_ranks, wants_gradients
from torch_fdattn.dist.groups import given_rank_and_size, rank_and_size
from torch_fdattn.ops import library

_C10D = torch.ops._c10d_functional
#: From how many times as many rows on, where ranks' shares are padded to the largest, all rows are summed by everyone
#: instead: an all-reduce sends no more then, and needs no padding.
_PADDED_ROWS = 2


def split_evenly(total: int, parts: int) -> list[int]:
    """`total` in `parts` as even as possible, the remainder on the first."""
    # Without branches: a symbolic total stays symbolic.
    return [(total + parts - 1 - part) // parts for part in range(parts)]


class _Ranks(NamedTuple):
    """How many rows each rank has (meaningless to `all_reduce` and `spread`), and which rank this is."""

    rows: Sequence[int]
    rank: int
    world_size: int
    group_name: str


def _gather(x: Tensor, ranks: _Ranks) -> Tensor:
    most = max(ranks.rows)
    if most == 0:  # the same on all ranks, so all of them skip the collective
        return x.new_zeros(x.shape)
    gathered = all_gather(_pad(x, most), ranks.world_size, ranks.group_name)
    if all(rows == most for rows in ranks.rows):
        return gathered
    return torch.cat([gathered[i * most : i * most + rows] for i, rows in enumerate(ranks.rows)])


def all_gather(x: Tensor, world_size: int, group_name: str) -> Tensor:
    """The rows of all ranks, each of which has as many: (rows, …) -> (world_size · rows, …). Nothing is checked, and nothing
    differentiable.
    """
    x = x.contiguous()
    if library.ops_are_watched() or type(x) not in (Tensor, Parameter) or x.is_neg():
        gathered = _C10D.all_gather_into_tensor(x, world_size, group_name)
        return _C10D.wait_tensor(gathered)
    # On CPUs too: gloo's threads write the name of what they have done last into one string, without a lock (torch 2.11 to
    # 2.13). A functional all-gather's is too long to lie in the string itself, and the next name may be written into memory
    # that another thread has freed by then.
    gathered = x.new_empty(world_size * x.shape[0], *x.shape[1:])
    _finish(_group(group_name)._allgather_base(gathered, x, _GATHER))
    return gathered


def _reduce_scatter(x: Tensor, ranks: _Ranks, add_up: Callable | None = None) -> Tensor:
    most = max(ranks.rows)
    if most == 0:
        return x.new_zeros(x.shape)
    if not all(rows == most for rows in ranks.rows):
        if most * ranks.world_size >= _PADDED_ROWS * x.shape[0]:
            start = sum(ranks.rows[: ranks.rank])
            return (add_up or _sum)(x, ranks)[start : start + ranks.rows[ranks.rank]]
        x = torch.cat([_pad(part, most) for part in x.split(list(ranks.rows))])
    x = x.contiguous()
    if _runs_now(x):
        scattered = x.new_empty(most, *x.shape[1:])
        _finish(_group(ranks.group_name)._reduce_scatter_base(scattered, x, _REDUCE_SCATTER))
    else:
        scattered = _C10D.reduce_scatter_tensor(x, "sum", ranks.world_size, ranks.group_name)
        scattered = _C10D.wait_tensor(scattered)
    rows = ranks.rows[ranks.rank]
    return scattered if rows == most else scattered[:rows]


def _runs_now(x: Tensor) -> bool:
    return x.is_cuda and library.can_call_kernel(x)


def _group(group_name: str) -> dist.ProcessGroup:
    return distributed_c10d._resolve_process_group(group_name)


def _in_current_stream(options):
    options.asyncOp = False
    return options


_GATHER, _REDUCE_SCATTER, _ALL_REDUCE = map(
    _in_current_stream,
    (distributed_c10d.AllgatherOptions(), distributed_c10d.ReduceScatterOptions(), dist.AllreduceOptions()),
)  # fmt: skip


def _finish(work: dist.Work | None) -> None:
    if work is not None:  # of backends that know no current stream
        work.wait()


def _pad(x: Tensor, rows: int) -> Tensor:
    if x.shape[0] == rows:
        return x
    return torch.nn.functional.pad(x, [0, 0] * (x.dim() - 1) + [0, rows - x.shape[0]])


def _slice(x: Tensor, ranks: _Ranks) -> Tensor:
    start = sum(ranks.rows[: ranks.rank])
    return x[start : start + ranks.rows[ranks.rank]].clone()


def _sum(x: Tensor, ranks: _Ranks) -> Tensor:
    if _runs_now(x):
        return _sum_into(x.clone(memory_format=torch.contiguous_format), ranks)
    return _C10D.wait_tensor(_C10D.all_reduce(x.contiguous(), "sum", ranks.group_name))


def _sum_into(x: Tensor, ranks: _Ranks) -> Tensor:
    """Of what nobody else reads, and without gradients: it may be overwritten."""
    if not (_runs_now(x) and x.is_contiguous()):
        return _sum(x, ranks)
    _finish(_group(ranks.group_name).allreduce([x], _ALL_REDUCE))
    return x


def _reduce_scatter_into(x: Tensor, ranks: _Ranks) -> Tensor:
    """As `_sum_into`."""
    return _reduce_scatter(x, ranks, _sum_into)


def _one_shot(x: Tensor, ranks: _Ranks) -> Tensor:
    return torch.ops.fdattn.symmetric_all_reduce(x, ranks.group_name, "one_shot")


def _two_shot(x: Tensor, ranks: _Ranks) -> Tensor:
    return torch.ops.fdattn.symmetric_all_reduce(x, ranks.group_name, "two_shot")


def _same(x: Tensor, ranks: _Ranks) -> Tensor:
    return x.view_as(x)


# Name: (forward, backward, whether x holds the rank's own rows rather than all ranks').
_COLLECTIVES = {
    "gather_rows": (_gather, _reduce_scatter, True),
    "reduce_scatter_rows": (_reduce_scatter, _gather, False),
    "reduce_scatter_rows_": (_reduce_scatter_into, _gather, False),
    "all_reduce": (_sum, _same, True),
    "all_reduce_": (_sum_into, _same, True),
    "one_shot_all_reduce": (_one_shot, _same, True),
    "two_shot_all_reduce": (_two_shot, _same, True),
    "spread": (_same, _sum, True),
    "replicate_rows": (_gather, _slice, True),
    "own_rows": (_slice, _gather, False),
}


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name, ranks):
        ctx.name, ctx.ranks = name, ranks
        y = _COLLECTIVES[name][0](x, ranks)
        # Autograd takes a slice for a view of x, and refuses to have it changed in place.
        sliced = name == "reduce_scatter_rows" and any(n != ranks.rows[0] for n in ranks.rows)
        return y.clone() if sliced else y

    @staticmethod
    def backward(ctx, gradient):
        library.refuse_double_backward(ctx.name)
        return _COLLECTIVES[ctx.name][1](gradient, ctx.ranks), None, None


def collective(
    name: str, x: Tensor, group_name: str, rows: Sequence[int], rank: int, world_size: int
) -> Tensor:  # fmt: skip
    """The collective `name` of the table above, for the ops: arguments are checked already."""
    ranks = _Ranks(rows, rank, world_size, group_name)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Collective.apply(x, name.removesuffix("_"), ranks)
    return _COLLECTIVES[name][0](x, ranks)


def check_rows(
    rows: Sequence[int] | None, x_name: str, size: int, rank: int, world_size: int, *, own: bool
) -> list[int]:
    """The rows of every rank; `size` is x's: this rank's rows if `own`, or else those of all ranks."""
    if rows is None:
        if own:
            return [size] * world_size
        if size % world_size:
            raise ValueError(
                f"rows must be given where {x_name}'s rows do not divide by the {world_size} ranks, "
                f"got {size} rows and rows=None"
            )
        return [size // world_size] * world_size
    rows = list(rows)
    if len(rows) != world_size:
        raise ValueError(
            f"rows must list the rows of each of the {world_size} ranks, got {len(rows)} numbers"
        )
    if any(count < 0 for count in rows):
        raise ValueError(f"rows must be 0 or more on every rank, got {rows}")
    expected = rows[rank] if own else sum(rows)
    if size != expected:
        which = f"rows[{rank}]" if own else "the sum of rows"
        raise ValueError(f"{x_name} must have {expected} rows like {which}, got {size}")
    return rows


def _define(name: str) -> None:
    own = _COLLECTIVES[name][2]
    by_rows = name not in ("all_reduce", "spread")
    communicates = name not in ("spread", "own_rows")  # in the forward pass

    def function(x, group_name, *, rank=None, world_size=None, rows=None):
        checks.expect_tensor("x", x)
        if by_rows and x.dim() == 0:
            raise ValueError("x must have rows (dimension 0), got a tensor of no dimensions")
        rank, world_size = given_rank_and_size(group_name, rank, world_size)
        same = {"x's dtype": x.dtype, **wants_gradients(x)}
        if by_rows:
            rows = check_rows(rows, "x", x.shape[0], rank, world_size, own=own)
            same |= {"rows": tuple(rows), "x's shape after its rows": tuple(x.shape[1:])}
        else:
            same |= {"x's shape": tuple(x.shape)}
        if communicates:
            check_equal_on_all_ranks(group_name, x, same)
        return collective(name, x, group_name, rows, rank, world_size)

    options = "*, int? rank=None, int? world_size=None"
    rows = ", SymInt[]? rows=None" if by_rows else ""
    library.define_composite(
        f"{name}(Tensor x, str group_name, {options}{rows}) -> Tensor", function, autocast_args=0
    )


for _name in _COLLECTIVES:
    if "shot" not in _name and not _name.endswith("_"):  # those are reached through matmuls
        _define(_name)


def _entry(name: str, x: Tensor, group_name: str, **options) -> Tensor:
    rank, world_size = rank_and_size(group_name, "group_name")
    return getattr(torch.ops.fdattn, name)(
        x, group_name, rank=rank, world_size=world_size, **options
    )


def gather_rows(x: Tensor, group_name: str, rows: Sequence[int] | None = None) -> Tensor:
    """The rows of all ranks: x (rows[rank], …) -> (sum(rows), …). Backward: reduce-scatter."""
    return _entry("gather_rows", x, group_name, rows=rows)


def reduce_scatter_rows(x: Tensor, group_name: str, rows: Sequence[int] | None = None) -> Tensor:
    """This rank's rows of the sum over ranks: x (sum(rows), …) -> (rows[rank], …). Backward: all-gather."""
    return _entry("reduce_scatter_rows", x, group_name, rows=rows)


def all_reduce(x: Tensor, group_name: str) -> Tensor:
    """The sum of x over the ranks. Backward: identity, every rank computes the same loss."""
    return _entry("all_reduce", x, group_name)


def spread(x: Tensor, group_name: str) -> Tensor:
    """x itself, replicated and used differently by each rank. Backward: the sum over the ranks."""
    return _entry("spread", x, group_name)


def replicate_rows(x: Tensor, group_name: str, rows: Sequence[int] | None = None) -> Tensor:
    """As `gather_rows`, where every rank goes on alike. Backward: own rows."""
    return _entry("replicate_rows", x, group_name, rows=rows)


def own_rows(x: Tensor, group_name: str, rows: Sequence[int] | None = None) -> Tensor:
    """This rank's rows of a replicated x: (sum(rows), …) -> (rows[rank], …). Backward: all-gather."""
    return _entry("own_rows", x, group_name, rows=rows)
