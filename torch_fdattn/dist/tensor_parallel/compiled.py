"""What the compile pass puts into graphs (`compile_backend/tensor_parallel`): raw ops that choose when they run.

A graph is made once, before anything runs, and its caches may be shared: so neither the rank nor what is the fastest
here goes into it. Every rank has the same number of rows. The bias of a reduction is this rank's own, and part of
its product: all ranks' biases are summed. Nothing is differentiable: the pass sees backward graphs of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fdattn.dist.collectives import collective
from torch_fdattn.dist.groups import rank_and_size
from torch_fdattn.dist.tensor_parallel import auto, one_sided
from torch_fdattn.dist.tensor_parallel.auto import LinearSizes
from torch_fdattn.dist.tensor_parallel.op import chosen, chosen_method
from torch_fdattn.ops import library


def _gather(
    x: Tensor, weights: Sequence[Tensor], group_name: str, world_size: int, strategy: str, keep: bool
) -> list[Tensor]:  # fmt: skip
    """x (m, K), weights (N_i, K) -> [y_i (W m, N_i)], and then, to `keep`, the gathered x (W m, K)."""
    rows = [x.shape[0]] * world_size
    columns = sum(weight.shape[0] for weight in weights)
    sizes = LinearSizes(sum(rows), columns, x.shape[1], world_size)
    strategy = chosen(auto.GATHER, strategy, group_name, x, sizes, rows)
    if strategy != "collective":
        return one_sided.gather(x, weights, group_name, strategy, rows, keep)
    gathered = collective("gather_rows", x, group_name, rows, 0, world_size)
    return [*(F.linear(gathered, weight) for weight in weights), *([gathered] if keep else [])]


def _scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None, group_name: str, world_size: int, strategy: str
) -> Tensor:  # fmt: skip
    """x (M, K), weight (N, K), bias (N,) -> this rank's M / W rows of the sum over ranks of x @ weight.T + bias."""
    rows = [x.shape[0] // world_size] * world_size
    sizes = LinearSizes(x.shape[0], weight.shape[0], x.shape[1], world_size)
    strategy = chosen(auto.SCATTER, strategy, group_name, x, sizes, rows)
    if strategy != "collective":
        rank, _ = rank_and_size(group_name)
        return one_sided.scatter(x, weight, group_name, strategy, rows, rank, bias)
    part = F.linear(x, weight, bias)
    return collective("reduce_scatter_rows", part, group_name, rows, 0, world_size)


def _all_reduce(
    x: Tensor, weight: Tensor, bias: Tensor | None, group_name: str, world_size: int, strategy: str
) -> Tensor:  # fmt: skip
    """x (M, K), weight (N, K), bias (N,) -> the sum (M, N) over ranks of x @ weight.T + bias."""
    sizes = LinearSizes(x.shape[0], weight.shape[0], x.shape[1], world_size)
    method = "nccl" if strategy == "collective" else "auto"
    method = chosen_method(method, strategy, group_name, x, sizes)
    if method in one_sided.METHODS:
        return one_sided.all_reduce(x, weight, group_name, method, bias)
    name = "all_reduce_" if method == "nccl" else f"{method}_all_reduce"
    return collective(name, F.linear(x, weight, bias), group_name, (), 0, world_size)


def _gather_fake(x, weights, group_name, world_size, strategy, keep):
    total = x.shape[0] * world_size
    ys = [x.new_empty(total, weight.shape[0]) for weight in weights]
    return [*ys, *([x.new_empty(total, x.shape[1])] if keep else [])]


def _scatter_fake(x, weight, bias, group_name, world_size, strategy):
    return x.new_empty(x.shape[0] // world_size, weight.shape[0])


def _all_reduce_fake(x, weight, bias, group_name, world_size, strategy):
    return x.new_empty(x.shape[0], weight.shape[0])


def _defined(schema: str, function, fake):
    def run(*args):
        with torch.no_grad():  # which graphs run without, and gradients are none of ours
            return function(*args)

    library.define_raw(schema, run, fake)
    return getattr(torch.ops.fdattn, schema[: schema.index("(")]).default


_REDUCTION = "(Tensor x, Tensor weight, Tensor? bias, str group_name, int world_size, str strategy) -> Tensor"  # fmt: skip
GATHER = _defined(
    "compiled_all_gather_matmul(Tensor x, Tensor[] weights, str group_name, int world_size, str strategy, bool keep) "
    "-> Tensor[]",
    _gather,
    _gather_fake,
)
SCATTER = _defined(f"compiled_matmul_reduce_scatter{_REDUCTION}", _scatter, _scatter_fake)
ALL_REDUCE = _defined(f"compiled_matmul_all_reduce{_REDUCTION}", _all_reduce, _all_reduce_fake)
