"""Linear layers of one input, whose weights lie one after the other in memory: one product takes them all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn


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
        # Within inference mode else they could not be trained any more.
        with torch.inference_mode(all(x.is_inference() for x in parameters)):
            whole = torch.cat([x.detach() for x in parameters])
            parts = whole.split([len(x) for x in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.data = part


class AsOne:
    """(weights (ΣN, K), biases (ΣN,) or None) of layers that lie side by side, and are looked at again where they moved.

    None where they do not lie so, or require gradients. Keeps their memory until it is called again, or forgets.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        #: (where they lay, what was found there), for threads in one.
        self._kept: tuple[list, tuple[Tensor, Tensor | None] | None] | None = None

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
                self.forget()
                return None
            where.append((x.data_ptr(), x.shape, x.stride(), x.dtype))
        kept = self._kept
        if kept is None or where != kept[0]:
            weights, biases = zip(*pairs, strict=True)
            with torch.inference_mode(False):  # or else it could be used in inference mode alone
                kept = self._kept = where, _joined_layers(weights, biases)
        return kept[1]


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
