"""The ops `fdattn::all_gather_matmul`, `matmul_reduce_scatter` and `matmul_all_reduce`.

Composites, so that torch.compile sees matmuls and functional collectives; rank and world size are
arguments for the reason given in `dist/decode/op.py`. Here is what all strategies share: schemas,
checks and the choice of a strategy. Ranks compare what must be the same before they choose, which may be a collective
that all of them must come to. x has two dimensions (rows, features): callers flatten.

Under autocast x is cast before it travels, weights and biases as in `torch.nn.functional.linear`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.dist.collectives import check_rows
from torch_fdattn.dist.consensus import check_equal_on_all_ranks, wants_gradients
from torch_fdattn.dist.groups import given_rank_and_size
from torch_fdattn.dist.symm import symmetric_memory
from torch_fdattn.dist.tensor_parallel import auto, collective, one_sided
from torch_fdattn.dist.tensor_parallel.auto import LinearSizes, compute_dtype
from torch_fdattn.ops import library
from torch_fdattn.ops.gemm import float8
from torch_fdattn.ops.swiglu import silu_mul

STRATEGIES = ("auto", "collective", *one_sided.STRATEGIES)
METHODS = ("auto", "nccl", *symmetric_memory.METHODS, *one_sided.METHODS)
#: Rows up to which `gemm_all_reduce` runs; beyond, its weights would be read more than once.
GEMM_ALL_REDUCE_ROWS = 128


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


def chosen(
    op: str, strategy: str, group_name: str, x: Tensor, sizes: LinearSizes, rows: Sequence[int], equal_sizes: bool = False
) -> str:  # fmt: skip
    """The strategy that runs.

    `fused` cuts every rank's rows into the same tiles, and is `collective` where ranks have different numbers of them (if
    `auto` chose it, `copy_engine`, which takes any), as `low_latency` is for odd numbers of 16 bits, and everything on
    one rank.
    """
    if sizes.ranks == 1:
        return "collective"
    if strategy == "auto":
        strategy = auto.choose(op, group_name, x, sizes, "collective", equal_sizes)
        if strategy == "fused" and any(count != rows[0] for count in rows):
            strategy = "copy_engine"
    if strategy in one_sided.STRATEGIES:
        one_sided.check(f"strategy {strategy!r}", group_name, x, compute_dtype(x))
    if strategy == "fused" and any(count != rows[0] for count in rows):
        return "collective"
    travels = sizes.features if op == auto.GATHER else sizes.columns
    if strategy == "low_latency" and travels * compute_dtype(x).itemsize % 4:
        return "collective"
    return strategy


def chosen_method(
    method: str,
    strategy: str,
    group_name: str,
    x: Tensor,
    sizes: LinearSizes,
    equal_sizes: bool = False,
) -> str:
    """The method of all-reduce that runs; `gemm_all_reduce` is `low_latency` for what its kernel is not made for."""
    if strategy == "copy_engine":
        raise NotImplementedError(
            "strategy 'copy_engine' gathers or scatters rows and reduces nothing on all ranks; "
            f"matmul_all_reduce has methods instead, one of {METHODS}"
        )
    if method == "auto":
        method = {"fused": "gemm_all_reduce", "low_latency": "low_latency"}.get(strategy, method)
    if sizes.ranks == 1:
        return "nccl"
    if method == "auto":
        method = auto.choose(auto.ALL_REDUCE, group_name, x, sizes, "nccl", equal_sizes)
        # The table was measured in bfloat16, for which torch's kernels are compiled; float16 takes it too.
        if method in symmetric_memory.METHODS and compute_dtype(x) not in symmetric_memory.DTYPES:
            method = "low_latency"
    if method in one_sided.METHODS:
        one_sided.check(f"method {method!r}", group_name, x, compute_dtype(x))
    if method == "gemm_all_reduce" and (sizes.rows > GEMM_ALL_REDUCE_ROWS or sizes.columns % 2):
        return "low_latency"
    return method


def _check_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None,
    names: tuple[str, str, str, str] = ("x", "weight", "bias", "weight_scale"),
) -> None:  # fmt: skip
    """x (M, K), weight (N, K), bias (N,), scale: shapes, dtypes (unless autocast sees to them), devices."""
    x_name, weight_name, bias_name, scale_name = names
    for name, tensor in ((x_name, x), (weight_name, weight)):
        checks.expect_tensor(name, tensor)
        if tensor.dim() != 2:
            raise ValueError(f"{name} must have 2 dimensions, got shape {tuple(tensor.shape)}")
    if x.dtype not in checks.DTYPES:
        raise TypeError(f"{x_name} must be bfloat16, float16, float32 or float64, got {x.dtype}")
    checks.expect_shape(weight_name, weight, (weight.shape[0], x.shape[1]), f"{x_name}'s features")
    float8.check(weight_name, weight, scale_name, scale)
    given = [(weight_name, weight)] if scale is None else []
    checks.expect_device(weight_name, weight, x.device, x_name)
    if bias is not None:
        checks.expect_shape(bias_name, bias, (weight.shape[0],), f"{weight_name}'s rows")
        given.append((bias_name, bias))
    autocast = torch.is_autocast_enabled(x.device.type)
    for name, tensor in given:
        checks.expect_device(name, tensor, x.device, x_name)
        if not autocast:
            checks.expect_dtype(name, tensor, x.dtype, x_name)


def _all_gather_matmul(
    x_shard, weights, group_name, biases=None, *, rank=None, world_size=None, rows=None,
    strategy="auto", weight_scales=None, largest=None, activation=None,
):  # fmt: skip
    check_linear_strategy("strategy", strategy)
    if not weights:
        raise ValueError("weights must hold at least one weight, got none")
    if activation not in (None, "swiglu"):
        raise ValueError(f"activation must be None or 'swiglu', got {activation!r}")
    if biases is None:
        biases = [None] * len(weights)
    if len(biases) != len(weights):
        raise ValueError(f"biases must have {len(weights)} entries like weights, got {len(biases)}")
    scales = weight_scales or [None] * len(weights)
    if len(scales) != len(weights):
        raise ValueError(
            f"weight_scales must have {len(weights)} entries like weights, got {len(scales)}"
        )
    for i, parts in enumerate(zip(weights, biases, scales, strict=True)):
        names = ("weights", "biases", "weight_scales")
        _check_linear(x_shard, *parts, ("x_shard", *(f"{name}[{i}]" for name in names)))
        if activation is not None and len(parts[0]) % 2:
            raise ValueError(
                f"weights[{i}] must have an even number of rows, gate's and up's, for activation {activation!r}, got "
                f"{len(parts[0])}"
            )
    rank, world_size = given_rank_and_size(group_name, rank, world_size)
    rows = check_rows(rows, "x_shard", x_shard.shape[0], rank, world_size, own=True)
    columns = largest or sum(weight.shape[0] for weight in weights)
    sizes = LinearSizes(sum(rows), columns, x_shard.shape[1], world_size)
    check_equal_on_all_ranks(
        group_name,
        x_shard,
        {
            "strategy": strategy,
            "largest": largest,
            "rows": tuple(rows),
            "x_shard's features": x_shard.shape[1],
            "x_shard's dtype": compute_dtype(x_shard),
            **wants_gradients(x_shard),  # those of the weights need no other rank
        },
        once=strategy in one_sided.STRATEGIES,
    )
    equal_sizes = largest is not None
    strategy = chosen(auto.GATHER, strategy, group_name, x_shard, sizes, rows, equal_sizes)
    x = x_shard.to(compute_dtype(x_shard))
    if weight_scales:
        pairs = zip(weights, weight_scales, strict=True)
        weights = [float8.dequantised(weight, scale, x.dtype) for weight, scale in pairs]
    gated = activation is not None
    if gated and one_sided.takes_swiglu(strategy, x, weights, biases, rows):
        return one_sided.all_gather_swiglu(x, weights, group_name, strategy, rows)
    if strategy != "collective":
        ys = one_sided.all_gather_matmul(x, weights, biases, group_name, strategy, rows, rank)
    else:
        ys = collective.all_gather_matmul(x, weights, biases, group_name, rows, rank, world_size)  # fmt: skip
    return [silu_mul(*y.chunk(2, -1)) for y in ys] if gated else ys


def _matmul_reduce_scatter(
    x, weight, group_name, bias=None, *, rank=None, world_size=None, rows=None,
    strategy="auto", weight_scale=None, largest=None,
):  # fmt: skip
    check_linear_strategy("strategy", strategy)
    _check_linear(x, weight, bias, weight_scale)
    rank, world_size = given_rank_and_size(group_name, rank, world_size)
    rows = check_rows(rows, "x", x.shape[0], rank, world_size, own=False)
    sizes = LinearSizes(sum(rows), weight.shape[0], largest or x.shape[1], world_size)
    check_equal_on_all_ranks(
        group_name,
        x,
        {
            "strategy": strategy,
            "largest": largest,
            "rows": tuple(rows),
            "weight's rows": weight.shape[0],
            "x's dtype": compute_dtype(x),
            **wants_gradients(x, weight),
        },
        once=strategy in one_sided.STRATEGIES,
    )
    strategy = chosen(auto.SCATTER, strategy, group_name, x, sizes, rows, largest is not None)
    if weight_scale is not None:
        weight = float8.dequantised(weight, weight_scale, compute_dtype(x))
    if strategy != "collective":
        x = x.to(compute_dtype(x))
        return one_sided.matmul_reduce_scatter(x, weight, bias, group_name, strategy, rows, rank)
    return collective.matmul_reduce_scatter(x, weight, bias, group_name, rows, rank, world_size)  # fmt: skip


def _matmul_all_reduce(
    x, weight, group_name, bias=None, *, rank=None, world_size=None, method="auto",
    strategy="auto", weight_scale=None, largest=None,
):  # fmt: skip
    rank, world_size = given_rank_and_size(group_name, rank, world_size)
    method = _checked_method(
        x, weight, group_name, bias, world_size, method, strategy, largest, weight_scale
    )
    return _reduced(x, weight, bias, group_name, method, rank, world_size, weight_scale)


def _checked_method(
    x, weight, group_name, bias, world_size, method, strategy, largest, scale=None
) -> str:
    """The method of all-reduce that runs, of a call that is right and equal on all ranks."""
    check_linear_strategy("strategy", strategy)
    check_method("method", method)
    _check_linear(x, weight, bias, scale)
    if method in symmetric_memory.METHODS:
        symmetric_memory.check(method, x.device, compute_dtype(x))
    values = {
        "method": method,
        "strategy": strategy,
        "largest": largest,
        "the result's shape": (x.shape[0], weight.shape[0]),
        "x's dtype": compute_dtype(x),
    }
    ours = method in one_sided.METHODS or strategy in one_sided.STRATEGIES
    check_equal_on_all_ranks(group_name, x, values, once=ours)
    sizes = LinearSizes(x.shape[0], weight.shape[0], largest or x.shape[1], world_size)
    return chosen_method(method, strategy, group_name, x, sizes, largest is not None)


def _reduced(x, weight, bias, group_name, method, rank, world_size, scale=None) -> Tensor:
    if method in one_sided.METHODS:
        x = x.to(compute_dtype(x))
        return one_sided.matmul_all_reduce(x, weight, bias, group_name, method, scale)
    if scale is not None:
        weight = float8.dequantised(weight, scale, compute_dtype(x))
    return collective.matmul_all_reduce(x, weight, bias, group_name, method, rank, world_size)


def _matmul_all_reduce_rms_norm(
    x, weight, group_name, residual, norm_weight, eps, bias=None, *, rank=None, world_size=None, method="auto",
    strategy="auto", largest=None,
):  # fmt: skip
    rank, world_size = given_rank_and_size(group_name, rank, world_size)
    method = _checked_method(x, weight, group_name, bias, world_size, method, strategy, largest)
    _expect_normed(residual, norm_weight, x.shape[0], weight.shape[0], x)
    if (
        compute_dtype(x) == x.dtype
        and one_sided.may_take_norm(x, weight, residual, norm_weight, bias)
        and one_sided.takes_norm(method, world_size, x, weight)
    ):
        return one_sided.matmul_all_reduce_rms_norm(
            x, weight, bias, group_name, method, residual, norm_weight, eps
        )
    added = residual + _reduced(x, weight, bias, group_name, method, rank, world_size)
    return torch.nn.functional.rms_norm(added, added.shape[-1:], norm_weight, eps), added


def _expect_normed(
    residual: Tensor, norm_weight: Tensor, rows: int, columns: int, x: Tensor
) -> None:
    given = (("residual", residual, (rows, columns)), ("norm_weight", norm_weight, (columns,)))
    for name, tensor, shape in given:
        checks.expect_shape(name, tensor, shape, "x's rows and weight's")
        checks.expect_device(name, tensor, x.device, "x")
        if not torch.is_autocast_enabled(x.device.type):
            checks.expect_dtype(name, tensor, x.dtype, "x")


def _define(schema: str, function) -> None:
    # No cast of ours under autocast: F.linear inside has autocast's own.
    library.define_composite(schema, function, autocast_args=0)


_define(
    "all_gather_matmul(Tensor x_shard, Tensor[] weights, str group_name, Tensor?[]? biases=None, *, "
    "int? rank=None, int? world_size=None, SymInt[]? rows=None, str strategy='auto', "
    "Tensor?[]? weight_scales=None, int? largest=None, str? activation=None) -> Tensor[]",
    _all_gather_matmul,
)
_define(
    "matmul_reduce_scatter(Tensor x, Tensor weight, str group_name, Tensor? bias=None, *, "
    "int? rank=None, int? world_size=None, SymInt[]? rows=None, str strategy='auto', "
    "Tensor? weight_scale=None, int? largest=None) -> Tensor",
    _matmul_reduce_scatter,
)
_define(
    "matmul_all_reduce(Tensor x, Tensor weight, str group_name, Tensor? bias=None, *, "
    "int? rank=None, int? world_size=None, str method='auto', str strategy='auto', "
    "Tensor? weight_scale=None, int? largest=None) -> Tensor",
    _matmul_all_reduce,
)
_define(
    "matmul_all_reduce_rms_norm(Tensor x, Tensor weight, str group_name, Tensor residual, Tensor norm_weight, "
    "float eps, Tensor? bias=None, *, int? rank=None, int? world_size=None, str method='auto', "
    "str strategy='auto', int? largest=None) -> (Tensor, Tensor)",
    _matmul_all_reduce_rms_norm,
)
