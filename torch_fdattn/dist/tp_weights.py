"""What tensor-parallel layers do with parameters: slices of dense weights, and gradients that ranks share.

A rank that holds a whole parameter but computes with a part of the work (its rows of the tokens, its
heads) sees a part of the gradient. A hook on the parameter sums the parts; it is a collective, so the
backward passes of all ranks must reach it in the same order, as those of the same model do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from torch_fdattn.dist.collectives import all_reduce

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
    weight = linear.weight[rows, columns]
    # Made as 1 x 1: torch would initialise the full size first, and warn where that is zero.
    sliced = nn.Linear(1, 1, bias=linear.bias is not None, device="meta")
    sliced.out_features, sliced.in_features = weight.shape
    sliced.weight = _parameter(weight, linear.weight)
    if linear.bias is not None:
        sliced.bias = _parameter(linear.bias[rows], linear.bias)
    return sliced


def weight_and_bias(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """A linear layer's parameters; plain ones past `nn.Module.__getattr__`, which takes the host 1 µs for each."""
    held = linear._parameters
    if torch.compiler.is_compiling() or "weight" not in held or "bias" not in held:
        return linear.weight, linear.bias
    return held["weight"], held["bias"]


def lay_side_by_side(*linears: nn.Linear) -> None:
    """Moves the layers' parameters to where one product of their common input can take all (`AsOne`).

    The parameters stay what they are, with their hooks and names. Those that processes share stay where they are, and
    so does what is no plain parameter: DTensors (FSDP), parametrizations, layers that others took the place of.
    """
    for name in ("weight", "bias"):
        parameters = [getattr(linear, name, None) for linear in linears]
        if any(type(x) is not nn.Parameter for x in parameters):
            continue
        kinds = {(x.dtype, x.device, x.shape[1:]) for x in parameters}
        if len(kinds) > 1 or _joined(parameters) is not None:
            continue
        if parameters[0].is_meta or any(
            x.device.type == "cpu" and x.is_shared() for x in parameters
        ):
            continue
        whole = torch.cat([x.detach() for x in parameters])
        for parameter, part in zip(
            parameters, whole.split([len(x) for x in parameters]), strict=True
        ):
            parameter.data = part


class AsOne:
    """(weights (ΣN, K), biases (ΣN,) or None) of layers that lie side by side, and are looked at again where they moved.

    None where they do not lie so, or have gradients.
    """

    def __init__(self) -> None:
        self._where: list | None = None
        self._found: tuple[Tensor, Tensor | None] | None = None

    def __reduce__(self) -> tuple:
        return AsOne, ()  # copies of layers have parameters of their own

    def __call__(self, linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None] | None:
        if torch.compiler.is_compiling():
            return None
        pairs = [weight_and_bias(x) for x in linears]
        grad, where = torch.is_grad_enabled(), []
        for x in itertools.chain.from_iterable(pairs):
            if x is None:
                where.append(None)
                continue
            kind = type(x)
            if (kind is not nn.Parameter and kind is not Tensor) or (grad and x.requires_grad):
                return None
            where.append((x.data_ptr(), x.shape, x.stride(), x.dtype))
        if where != self._where:
            weights, biases = zip(*pairs, strict=True)
            with torch.inference_mode(False):  # or else it could be used in inference mode alone
                self._found, self._where = _joined_layers(weights, biases), where  # for threads
        return self._found


def _joined_layers(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor | None] | None:
    weight = _joined(weights)
    if weight is None or all(x is None for x in biases):
        return None if weight is None else (weight, None)
    if any(x is None for x in biases):
        return None
    bias = _joined(biases)
    return None if bias is None else (weight, bias)


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    first, rows = parts[0], 0
    if first.is_meta:
        return None
    storage, at = first.untyped_storage().data_ptr(), first.storage_offset()
    for part in parts:
        here = part.untyped_storage().data_ptr() == storage and part.storage_offset() == at
        if not here or not part.is_contiguous() or part.shape[1:] != first.shape[1:]:
            return None
        at, rows = at + part.numel(), rows + len(part)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


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
