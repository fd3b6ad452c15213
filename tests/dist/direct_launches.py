"""Direct launches without a driver: the interpreter runs a kernel on the memory at the addresses that it is given."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from torch_fdattn.ops import repeated_call


class StandIn:
    """In the place of a `DriverLaunch` on a CPU, of a kernel that was launched with these arguments."""

    device_index = 0

    def __init__(self, kernel, programs: int, arguments: tuple, options: dict) -> None:
        self._kernel, self._programs, self._options = kernel, programs, options
        self._arguments = arguments
        self._given = list(tensors_of(arguments))

    def takes(self, addresses: Sequence[int]) -> bool:
        return all(address % 16 == 0 for address in addresses)

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        there = iter([at(*pair) for pair in zip(addresses, self._given, strict=True)])
        arguments = [_with(x, there) for x in self._arguments]
        self._kernel[(self._programs,)](*arguments, **self._options)


def launch(kernel, programs: int, *arguments, **options) -> None:
    """`repeated_launch.launch`, where every launch is known."""
    kernel[(programs,)](*arguments, **options)
    made = StandIn(kernel, programs, arguments, options)
    repeated_call.note(made, [x.data_ptr() for x in tensors_of(arguments)])


def tensors_of(arguments: Sequence) -> Iterator[Tensor]:
    """Descriptors' among them."""
    for x in arguments:
        if isinstance(x, TensorDescriptor):
            yield x.base
        elif isinstance(x, Tensor):
            yield x


def _with(argument, tensors: Iterator[Tensor]):
    """The argument, of the next tensor where it is one or describes one."""
    if isinstance(argument, TensorDescriptor):
        return dataclasses.replace(argument, base=next(tensors))
    return next(tensors) if isinstance(argument, Tensor) else argument


def at(address: int, like: Tensor) -> Tensor:
    """The memory there as a tensor of the other's shape, strides and dtype."""
    if not like.numel():
        return like
    steps = zip(like.shape, like.stride(), strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in steps)
    memory = (ctypes.c_uint8 * (count * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())
