"""The ops `fdattn::all_gather_matmul`, `matmul_reduce_scatter` and `matmul_all_reduce`.

Composites, so that torch.compile sees matmuls and functional collectives; rank and world size are
arguments for the reason given in `dist/decode/op.py`. Here is what all strategies share: schemas,
checks and the choice of a strategy. x has two dimensions (rows, features): callers flatten.

Under autocast x is cast before it travels, weights and biases as in `torch.nn.functional.linear`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.dist import symmetric_memory
from torch_fdattn.dist.collectives import check_rows
from torch_fdattn.dist.groups import agree, given_rank_and_size, wants_gradients
from torch_fdattn.dist.tp_linear import collective
from torch_fdattn.ops import library

STRATEGIES = ("collective",)
METHODS = ("nccl", *symmetric_memory.METHODS)


def check_method(name: str, method: str) -> None:
    """That a method of all-reduce, the argument `name`, exists."""
    if method == "two_shot_multimem":
        raise NotImplementedError(
            f"{name} 'two_shot_multimem' needs NVLink multicast, which torch_fdattn does not use; "
            f"use one of {METHODS}"
        )
    if method not in METHODS:
        raise ValueError(f"{name} must be one of {METHODS}, got {method!r}")


def check_linear_strategy(name: str, strategy: str) -> None:
    """That a strategy of the linear ops, the argument `name`, exists."""
    if strategy not in STRATEGIES:
        raise ValueError(f"{name} must be one of {STRATEGIES}, got {strategy!r}")


def _check_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, names: tuple[str, str, str]
) -> None:
    """x (M, K), weight (N, K), bias (N,): shapes, dtypes (unless autocast sees to them), devices."""
    x_name, weight_name, bias_name = names
    for name, tensor in ((x_name, x), (weight_name, weight)):
        checks.expect_tensor(name, tensor)
        if tensor.dim() != 2:
            raise ValueError(f"{name} must have 2 dimensions, got shape {tuple(tensor.shape)}")
    if x.dtype not in checks.DTYPES:
        raise TypeError(f"{x_name} must be bfloat16, float16, float32 or float64, got {x.dtype}")
    checks.expect_shape(weight_name, weight, (weight.shape[0], x.shape[1]), f"{x_name}'s features")
    given = [(weight_name, weight)]
    if bias is not None:
        checks.expect_shape(bias_name, bias, (weight.shape[0],), f"{weight_name}'s rows")
        given.append((bias_name, bias))
    autocast = torch.is_autocast_enabled(x.device.type)
    for name, tensor in given:
        checks.expect_device(name, tensor, x.device, x_name)
        if not autocast:
            checks.expect_dtype(name, tensor, x.dtype, x_name)


def _compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that F.linear computes in."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def _all_gather_matmul(
    x_shard, weights, group_name, biases=None, *, rank=None, world_size=None, rows=None,
    strategy="collective",
):  # fmt: skip
    check_linear_strategy("strategy", strategy)
    if not weights:
        raise ValueError("weights must hold at least one weight, got none")
    if biases is None:
        biases = [None] * len(weights)
    if len(biases) != len(weights):
        raise ValueError(f"biases must have {len(weights)} entries like weights, got {len(biases)}")
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        _check_linear(x_shard, weight, bias, ("x_shard", f"weights[{i}]", f"biases[{i}]"))
    rank, world_size = given_rank_and_size(group_name, rank, world_size)
    rows = check_rows(rows, "x_shard", x_shard.shape[0], rank, world_size, own=True)
    agree(
        group_name,
        x_shard,
        {
            "rows": tuple(rows),
            "x_shard's features": x_shard.shape[1],
            "x_shard's dtype": x_shard.dtype,
            **wants_gradients(x_shard, *weights),
        },
    )
    x_shard = x_shard.to(_compute_dtype(x_shard))
    return collective.all_gather_matmul(
        x_shard, weights, biases, group_name, rows, rank, world_size
    )


def _matmul_reduce_scatter(
    x, weight, group_name, bias=None, *, rank=None, world_size=None, rows=None,
    strategy="collective",
):  # fmt: skip
    check_linear_strategy("strategy", strategy)
    _check_linear(x, weight, bias, ("x", "weight", "bias"))
    rank, world_size = given_rank_and_size(group_name, rank, world_size)
    rows = check_rows(rows, "x", x.shape[0], rank, world_size, own=False)
    agree(
        group_name,
        x,
        {
            "rows": tuple(rows),
            "weight's rows": weight.shape[0],
            "x's dtype": x.dtype,
            **wants_gradients(x, weight),
        },
    )
    return collective.matmul_reduce_scatter(x, weight, bias, group_name, rows, rank, world_size)


def _matmul_all_reduce(
    x, weight, group_name, bias=None, *, rank=None, world_size=None, method="nccl",
    strategy="collective",
):  # fmt: skip
    check_linear_strategy("strategy", strategy)
    check_method("method", method)
    _check_linear(x, weight, bias, ("x", "weight", "bias"))
    if method != "nccl":
        symmetric_memory.check(method, x.device, _compute_dtype(x))
    rank, world_size = given_rank_and_size(group_name, rank, world_size)
    shape = (x.shape[0], weight.shape[0])
    agree(group_name, x, {"method": method, "the result's shape": shape, "x's dtype": x.dtype})
    return collective.matmul_all_reduce(x, weight, bias, group_name, method, rank, world_size)


def _define(schema: str, function) -> None:
    # No cast of ours under autocast: F.linear inside has autocast's own.
    library.define_composite(schema, function, autocast_args=0)


_define(
    "all_gather_matmul(Tensor x_shard, Tensor[] weights, str group_name, Tensor?[]? biases=None, *, "
    "int? rank=None, int? world_size=None, SymInt[]? rows=None, str strategy='collective') -> Tensor[]",
    _all_gather_matmul,
)
_define(
    "matmul_reduce_scatter(Tensor x, Tensor weight, str group_name, Tensor? bias=None, *, "
    "int? rank=None, int? world_size=None, SymInt[]? rows=None, str strategy='collective') -> Tensor",
    _matmul_reduce_scatter,
)
_define(
    "matmul_all_reduce(Tensor x, Tensor weight, str group_name, Tensor? bias=None, *, "
    "int? rank=None, int? world_size=None, str method='nccl', str strategy='collective') -> Tensor",
    _matmul_all_reduce,
)
