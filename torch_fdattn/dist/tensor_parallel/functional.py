"""The Python entries of the tensor-parallel linear ops."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

from torch_fdattn.checks import expect_tensor
from torch_fdattn.dist.groups import Group, name_of, rank_and_size
from torch_fdattn.dist.tensor_parallel import op as _op  # noqa: F401 (registers the ops)


def _expect_list(name: str, values: object, of: str, kind: type | tuple[type, ...]) -> None:
    """A list or tuple of these: what else comes, pybind would refuse without naming the argument."""
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{name} must be a list of {of}, got {type(values).__name__}")
    for i, value in enumerate(values):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be a list of {of}, got {type(value).__name__} at {i}")


def _expect_rows(rows: object) -> None:
    if rows is not None:
        _expect_list("rows", rows, "integers", (Integral, torch.SymInt))


def _expect_largest(largest: object) -> None:
    if largest is None:
        return
    if not isinstance(largest, (Integral, torch.SymInt)):
        raise TypeError(f"largest must be an int or None, got {type(largest).__name__}")
    if largest < 0:
        raise ValueError(f"largest must not be negative, got {largest}")


def _expect_activation(activation: object) -> None:
    if activation is not None and not isinstance(activation, str):
        raise TypeError(f"activation must be a str or None, got {type(activation).__name__}")


def _expect_linear(x: object, weight: object, bias: object) -> None:
    expect_tensor("x", x)
    expect_tensor("weight", weight)
    if bias is not None:
        expect_tensor("bias", bias)


def all_gather_matmul(
    x_shard: Tensor, weights: Sequence[Tensor], group: Group,
    biases: Sequence[Tensor | None] | None = None, *, rows: Sequence[int] | None = None,
    strategy: str = "auto", weight_scales: Sequence[Tensor | None] | None = None, largest: int | None = None,
    activation: str | None = None,
) -> list[Tensor]:  # fmt: skip
    """``y_i = all_gather(x_shard) @ weights[i].T + biases[i]``: one gather for several column-parallel weights.

    Args:
        x_shard: this rank's rows (m_r, K), bfloat16, float16, float32 or float64.
        weights: this rank's weights (N_i, K), in x_shard's dtype.
        group: the process group: itself, its name, a DeviceMesh of one dimension, or None for the default one.
        biases: (N_i,) or None for each weight; None: no biases.
        rows: how many rows each rank has, the same list on every rank; zero is legal. None: as many as
            this rank on every rank, which only the caller knows to be true.
        strategy: "auto" is what was measured to be the fastest for these sizes on this GPU, and "collective" where
            nothing was, on CPUs, in torch.compile and on one rank. "collective" is BLAS and the group's own
            collective and runs everywhere. For ranks that share symmetric memory (see `docs/tensor-parallelism.md`),
            "copy_engine" and "fused" overlap the two, and "low_latency" is BLAS and one launch, for few rows.
            "fused" is "collective" where `rows` differ. With "auto" all ranks ask each other in the same calls,
            those whose sizes are new to them: where shards are unequal and from one call to the next change on some
            ranks alone, name a strategy.
        weight_scales: for each weight None or, of one in float8_e4m3fn or float8_e5m2, its scales, float32: (N_i,),
            one a row, or (), one for all. ``weights[i] * weight_scales[i]`` is what is multiplied, in x_shard's dtype;
            neither has a gradient (`ops/gemm/float8.py`).
        largest: the most columns, of all weights, that any rank has, where all ranks say so: "auto" then goes by it,
            and asks nobody.
        activation: None, or "swiglu": a weight's first N_i / 2 rows are a gate's, and ``silu(y[:, :N_i / 2]) *
            y[:, N_i / 2:]`` is returned in y_i's place (arXiv:2002.05202). By strategy "copy_engine", in bfloat16 and
            float16, without biases and gradients, for 512 rows and more whose tiles fill the device, in the products
            themselves, which are written nowhere then (`ops/gemm/persistent_swiglu_gemm.py`); else behind them.

    Returns:
        y_i (sum(rows), N_i), with an activation (sum(rows), N_i / 2). Differentiable: ranks may use their results
        differently; the gradient of x_shard is summed over the ranks (in x_shard's dtype), those of weights and biases
        are local.

    Raises:
        ValueError, TypeError: naming the argument, before any communication.
        RuntimeError: torch.distributed is not initialised, or the collective failed.

    Examples:
        >>> world = torch.distributed.get_world_size()
        >>> x_shard = torch.randn(4, 64)  # this rank's rows
        >>> gate, up = torch.randn(2, 32, 64)  # this rank's columns of two layers
        >>> y = torch_fdattn.dist.all_gather_matmul(x_shard, [gate, up], None)
        >>> [tuple(part.shape) for part in y] == [(4 * world, 32)] * 2
        True
    """
    group_name = name_of(group)
    expect_tensor("x_shard", x_shard)
    _expect_list("weights", weights, "tensors", Tensor)
    if biases is not None:
        _expect_list("biases", biases, "tensors or None", (Tensor, type(None)))
    if weight_scales is not None:
        _expect_list("weight_scales", weight_scales, "tensors or None", (Tensor, type(None)))
    _expect_rows(rows)
    _expect_largest(largest)
    _expect_activation(activation)
    rank, world_size = rank_and_size(group_name)
    return torch.ops.fdattn.all_gather_matmul(
        x_shard, weights, group_name, biases, rank=rank, world_size=world_size, rows=rows,
        strategy=strategy, weight_scales=weight_scales, largest=largest, activation=activation,
    )  # fmt: skip


def matmul_reduce_scatter(
    x: Tensor, weight: Tensor, group: Group, bias: Tensor | None = None, *,
    rows: Sequence[int] | None = None, strategy: str = "auto", weight_scale: Tensor | None = None,
    largest: int | None = None,
) -> Tensor:  # fmt: skip
    """This rank's rows of ``sum over ranks (x @ weight.T) + bias``: a row-parallel linear layer.

    Args:
        x: all rows and this rank's features (M, K_r); K_r may differ between ranks, and be zero.
        weight: this rank's columns (N, K_r), in x's dtype.
        bias: (N,), the same on every rank; added once, after the sum.
        rows: how many of the M rows each rank receives, the same list on every rank. None: M / ranks.
        group, strategy: as `all_gather_matmul`.
        weight_scale: of a weight in float8, as `all_gather_matmul`'s.
        largest: the most features K_r that any rank has, as `all_gather_matmul`'s.

    Returns:
        y (rows[rank], N), summed in x's dtype. Differentiable; the gradient of bias is that of this
        rank's rows alone.

    Raises:
        As `all_gather_matmul`.

    Examples:
        >>> world = torch.distributed.get_world_size()
        >>> x = torch.randn(4 * world, 32)  # all rows, this rank's features
        >>> weight = torch.randn(64, 32)
        >>> torch_fdattn.dist.matmul_reduce_scatter(x, weight, None).shape
        torch.Size([4, 64])
    """
    group_name = name_of(group)
    _expect_linear(x, weight, bias)
    _expect_rows(rows)
    _expect_largest(largest)
    rank, world_size = rank_and_size(group_name)
    return torch.ops.fdattn.matmul_reduce_scatter(
        x, weight, group_name, bias, rank=rank, world_size=world_size, rows=rows, strategy=strategy,
        weight_scale=weight_scale, largest=largest,
    )  # fmt: skip


def matmul_all_reduce(
    x: Tensor, weight: Tensor, group: Group, bias: Tensor | None = None, *,
    method: str = "auto", strategy: str = "auto", weight_scale: Tensor | None = None, largest: int | None = None,
) -> Tensor:  # fmt: skip
    """``sum over ranks (x @ weight.T) + bias`` on every rank: a row-parallel linear layer.

    Args:
        x: all rows and this rank's features (M, K_r).
        weight: this rank's columns (N, K_r), in x's dtype.
        bias: (N,), the same on every rank; added once, after the sum.
        method: "auto" is what was measured to be the fastest, and "nccl" where nothing was. "nccl" is the functional
            all-reduce of the group's backend, gloo included; "one_shot" and "two_shot" are torch's
            symmetric-memory kernels (CUDA, one host, bfloat16 or float32). Ours, for the few rows of a decode step
            and ranks that share symmetric memory: "low_latency" is one launch after BLAS; "gemm_all_reduce" one
            that multiplies as well (up to 128 rows and for an even N, or else it is "low_latency").
        strategy: "auto" or "collective"; where no method is given, "fused" is method "gemm_all_reduce"
            and "low_latency" the method of that name.
        group: as `all_gather_matmul`.
        weight_scale: of a weight in float8, as `all_gather_matmul`'s. "gemm_all_reduce" reads the weight as it is; for
            the other methods it is made x's dtype first.
        largest: as `matmul_reduce_scatter`.

    Returns:
        y (M, N), summed in x's dtype, the same on every rank. Differentiable under the convention that
        every rank computes the same loss from y.

    Raises:
        As `all_gather_matmul`; NotImplementedError: a symmetric-memory method on the CPU, or
        "two_shot_multimem", which needs NVLink multicast.

    Examples:
        >>> x, weight = torch.randn(4, 32), torch.randn(64, 32)  # this rank's features
        >>> torch_fdattn.dist.matmul_all_reduce(x, weight, None).shape
        torch.Size([4, 64])
    """
    group_name = name_of(group)
    _expect_linear(x, weight, bias)
    _expect_largest(largest)
    rank, world_size = rank_and_size(group_name)
    return torch.ops.fdattn.matmul_all_reduce(
        x, weight, group_name, bias, rank=rank, world_size=world_size, method=method, strategy=strategy,
        weight_scale=weight_scale, largest=largest,
    )  # fmt: skip


def matmul_all_reduce_rms_norm(
    x: Tensor, weight: Tensor, group: Group, residual: Tensor, norm_weight: Tensor, eps: float,
    bias: Tensor | None = None, *, method: str = "auto", strategy: str = "auto", largest: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A row-parallel linear layer, the residual's addition and the norm behind it: what a transformer's block does
    between attention and its MLP.

    ``added = residual + matmul_all_reduce(x, weight, bias)``, ``normed = rms_norm(added) * norm_weight``.

    Two launches where `method` is, or "auto" chooses, one of our own, without gradients, for up to 2048 rows of up to
    8192 columns and one dtype (`row_norm.py`), on four ranks up to 1 MB of them, on eight 0.3; else the three
    parts.

    Args:
        residual: (M, N), the same on every rank, in x's dtype.
        norm_weight: (N,), in x's dtype.
        eps: what is added to the mean of squares.
        x, weight, group, bias, method, strategy, largest: as `matmul_all_reduce`.

    Returns:
        (normed (M, N), added (M, N)), the same on every rank. Differentiable as `matmul_all_reduce`.

    Raises:
        As `matmul_all_reduce`.

    Examples:
        >>> x, weight = torch.randn(4, 32), torch.randn(64, 32)  # this rank's features
        >>> residual, norm_weight = torch.randn(4, 64), torch.ones(64)
        >>> normed, added = torch_fdattn.dist.matmul_all_reduce_rms_norm(x, weight, None, residual, norm_weight, 1e-6)
        >>> normed.shape, added.shape
        (torch.Size([4, 64]), torch.Size([4, 64]))
    """
    group_name = name_of(group)
    _expect_linear(x, weight, bias)
    expect_tensor("residual", residual)
    expect_tensor("norm_weight", norm_weight)
    _expect_largest(largest)
    rank, world_size = rank_and_size(group_name)
    return torch.ops.fdattn.matmul_all_reduce_rms_norm(
        x, weight, group_name, residual, norm_weight, eps, bias, rank=rank, world_size=world_size, method=method,
        strategy=strategy, largest=largest,
    )  # fmt: skip
