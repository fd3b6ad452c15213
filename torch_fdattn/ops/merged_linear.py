"""Linear layers of one input merged into one: q, k and v, or gate and up, as one product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torch_fdattn.ops.inference_linear import inference_linear


class MergedLinear(nn.Module):
    """Several linear layers of one input as one product; made by `merge_linears`.

    forward(x (…, K)) returns the layers' results, (…, N_i) each, as views of one tensor (…, ΣN).

    Attributes:
        weight: (ΣN, K), the layers' weights one below the other.
        bias: (ΣN,), or None.
        sizes: (N_1, N_2, …).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> None:
        super().__init__()
        self.weight = frozen_parameter(weight)
        self.bias = None if bias is None else frozen_parameter(bias)
        self.sizes = tuple(sizes)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return inference_linear(x, self.weight, self.bias).split_with_sizes(self.sizes, -1)

    def linears(self) -> list[nn.Linear]:
        """The layers again, each over its rows of the merged weight."""
        biases = [None] * len(self.sizes) if self.bias is None else self.bias.split(self.sizes)
        weights = self.weight.split(self.sizes)
        return [
            linear_of(frozen_parameter(weight), None if bias is None else frozen_parameter(bias))
            for weight, bias in zip(weights, biases, strict=True)
        ]

    def extra_repr(self) -> str:
        return (
            f"in_features={self.weight.shape[1]}, sizes={self.sizes}, bias={self.bias is not None}"
        )


def can_merge(linears: Sequence[nn.Module], equal_sizes: bool = False) -> bool:
    """Whether `merge_linears` takes these layers: plain `nn.Linear` of one input size, device and dtype, all with a
    bias or none. Not DTensors (FSDP), parametrizations, meta tensors, or CPU memory that processes share.

    equal_sizes: whether they also have as many outputs each.
    """
    if not all(type(linear) is nn.Linear for linear in linears):
        return False
    if equal_sizes and len({len(linear.weight) for linear in linears}) > 1:
        return False
    for name in ("weight", "bias"):
        parameters = [getattr(linear, name) for linear in linears]
        if name == "bias" and all(x is None for x in parameters):
            continue
        if any(type(x) is not nn.Parameter or x.is_meta for x in parameters):
            return False
        if len({(x.dtype, x.device, x.shape[1:]) for x in parameters}) > 1:
            return False
        if any(x.device.type == "cpu" and x.is_shared() for x in parameters):
            return False
    return True


def merge_linears(*linears: nn.Linear) -> MergedLinear:
    """One layer that computes what all the given ones do, over the same memory.

    The layers' parameters become views of the merged weight and bias: the same objects with the same values, at another
    place. What is written into them in place, the merged layer sees. Layers that are merged already are not moved again.

    Args:
        linears: layers of one input (…, K) that `can_merge` accepts.

    Returns:
        A `MergedLinear` whose parameters take no gradients.

    Raises:
        ValueError: layers that `can_merge` refuses.

    Examples:
        >>> q, k = torch.nn.Linear(8, 4), torch.nn.Linear(8, 2)
        >>> merged = merge_linears(q, k)
        >>> [tuple(y.shape) for y in merged(torch.ones(3, 8))]
        [(3, 4), (3, 2)]
    """
    if not can_merge(linears):
        names = ", ".join(type(linear).__name__ for linear in linears)
        raise ValueError(
            "linears must be plain nn.Linear of one input size, device and dtype, all with a bias or none, and not in "
            f"memory that processes share, got {names}"
        )
    weight = _merged([linear.weight for linear in linears])
    bias = None if linears[0].bias is None else _merged([linear.bias for linear in linears])
    return MergedLinear(weight, bias, [linear.out_features for linear in linears])


def _merged(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One tensor of all rows, of which the parameters are views afterwards."""
    adjacent = _adjacent(parameters)
    if adjacent is not None:
        return adjacent
    # Tensors that are made in inference mode could not be trained any more.
    with torch.inference_mode(all(x.is_inference() for x in parameters)):
        merged = torch.cat([x.detach() for x in parameters])
        parts = merged.split([len(x) for x in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part
    return merged


def _adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """One tensor over all parts, where they follow each other in one storage; else None."""
    first, rows = parts[0], 0
    storage, at = first.untyped_storage().data_ptr(), first.storage_offset()
    for part in parts:
        here = part.untyped_storage().data_ptr() == storage and part.storage_offset() == at
        if not here or not part.is_contiguous():
            return None
        at, rows = at + part.numel(), rows + len(part)
    if not first.numel():
        return None
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def linear_of(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    """A linear layer of these parameters."""
    # Made as 1 x 1: torch would initialise the full size first, and warn where that is zero.
    linear = nn.Linear(1, 1, bias=bias is not None, device="meta")
    linear.out_features, linear.in_features = weight.shape
    linear.weight = weight
    if bias is not None:
        linear.bias = bias
    return linear


def frozen_parameter(x: Tensor) -> nn.Parameter:
    """A parameter over the same memory that takes no gradients."""
    return nn.Parameter(x.detach(), requires_grad=False)


def frozen_copy(module: nn.Module, kind: type[nn.Module] | None = None) -> nn.Module:
    """A module of the same type and attributes, without its hooks, whose parameters are frozen and over the same memory.

    A module with submodules is returned itself. kind: a type with the attributes of the module's, to have in its place."""
    if module._modules:
        return module
    kind = kind or type(module)
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    own = {name: value for name, value in vars(module).items() if name not in vars(made)}
    vars(made).update(own, training=module.training)
    for name, parameter in module._parameters.items():
        made.register_parameter(name, None if parameter is None else frozen_parameter(parameter))
    for name, buffer in module._buffers.items():
        made.register_buffer(name, buffer, name not in module._non_persistent_buffers_set)
    return made


def refuse_gradients(module: nn.Module, *inputs: Tensor) -> None:
    """Raises where a fused inference module would have to be differentiated."""
    if not torch.is_grad_enabled():
        return
    if any(x.requires_grad for x in inputs) or any(x.requires_grad for x in module.parameters()):
        raise RuntimeError(
            f"{type(module).__name__} is for inference and has no gradients: call it under torch.no_grad() or "
            "torch.inference_mode(), or train the module that it was made of"
        )
