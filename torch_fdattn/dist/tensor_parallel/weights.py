"""What tensor-parallel layers do with parameters: slices of dense weights, and gradients that ranks share.

A rank that holds a whole parameter but computes with a part of the work (its rows of the tokens, its
heads) sees a part of the gradient. A hook on the parameter sums the parts; it is a collective, so the
backward passes of all ranks must reach it in the same order, as those of the same model do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from torch_fdattn.dist.collectives import all_reduce
from torch_fdattn.ops.merged_linear import linear_of

_ALL = slice(None)


def expect_linear(module: nn.Module, *names: str) -> None:
    """That the module has plain linear layers of these names."""
    for name in names:
        linear = getattr(module, name, None)
        if not isinstance(linear, nn.Linear):
            raise TypeError(
                f"module must have an nn.Linear {name!r}, got {type(linear).__name__} in "
                f"{type(module).__name__}"
            )


def sliced_linear(linear: nn.Linear, rows: slice = _ALL, columns: slice = _ALL) -> nn.Linear:
    """A linear layer of the given output (rows) and input features (columns), copied."""
    weight = _parameter(linear.weight[rows, columns], linear.weight)
    bias = None if linear.bias is None else _parameter(linear.bias[rows], linear.bias)
    return linear_of(weight, bias)


def _parameter(part: Tensor, whole: nn.Parameter) -> nn.Parameter:
    # clone, since a view would keep the whole weight alive
    copied = part.detach().clone(memory_format=torch.contiguous_format)
    return nn.Parameter(copied, requires_grad=whole.requires_grad)


def sum_gradient(parameter: nn.Parameter | None, group_name: str) -> None:
    """From now on the parameter's gradient is the sum of all ranks'."""
    if parameter is not None:
        _hook(parameter, lambda gradient: all_reduce(gradient, group_name))


def sum_kv_gradient(
    parameter: nn.Parameter | None, kv_head: int, kv_heads: int, group_name: str
) -> None:
    """As `sum_gradient`, over the ranks that hold the same one of `kv_heads` KV heads."""

    def total(gradient: Tensor) -> Tensor:
        # One sum for all heads: the ranks of one head are no process group of their own.
        every_head = gradient.new_zeros(kv_heads, *gradient.shape)
        every_head[kv_head] = gradient
        return all_reduce(every_head, group_name)[kv_head]

    if parameter is not None:
        _hook(parameter, total)


def _hook(parameter: nn.Parameter, function: Callable[[Tensor], Tensor]) -> None:
    def hook(gradient: Tensor) -> Tensor:
        with torch.no_grad():
            return function(gradient)

    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)  # only then does it take a hook; it may be unfrozen later
    parameter.register_hook(hook)
    parameter.requires_grad_(not frozen)
