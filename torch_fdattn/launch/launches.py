"""A kernel's launch: through Triton, or by the driver where its like was launched before.

Triton binds and specialises every argument of every launch: 20 to 40 µs of host time for the 50 of an attention kernel.
Two launches of one kernel that differ in nothing but their tensors' addresses, all multiples of 16, run the same machine
code with the same numbers (`prepared.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from torch_fdattn.environment import INTERPRET
from torch_fdattn.launch import prepared
from torch_fdattn.launch.device import on_device
from torch_fdattn.launch.driver_launch import (
    DriverLaunch,
    aligned,
    driver_launch,
    flat,
    is_tensor,
    somebody_watches,
)

_NOTHING: dict[str, object] = {}
_NUMBERS = frozenset((int, float, bool, str, type(None)))


class Launch:
    """``kernel[grid](*arguments, **options, **also)``, not made yet."""

    __slots__ = ("also", "arguments", "grid", "kernel", "max_ctas_per_sm", "options")

    def __init__(
        self, kernel, grid: int | tuple[int, int, int], *arguments, also: dict[str, object] = _NOTHING,
        max_ctas_per_sm: int | None = None, **options,
    ) -> None:  # fmt: skip
        """
        Args:
            kernel: of `triton.jit`.
            arguments: the first a tensor, its descriptor, or a tuple of them; all on one device.
            also: further arguments by name, tensors in the order of the kernel's parameters.
            max_ctas_per_sm: programs that a SM may run at a time, where the driver launches.
            options: numbers, flags and strings alone.
        """
        self.kernel, self.arguments, self.also, self.options = kernel, arguments, also, options
        self.grid = (grid, 1, 1) if isinstance(grid, int) else grid
        self.max_ctas_per_sm = max_ctas_per_sm

    @property
    def device(self) -> torch.device:
        first = self.arguments[0]
        while type(first) is tuple:
            first = first[0]
        return _base(first).device

    def through_triton(self) -> object | None:
        """Launches, and returns the compiled kernel, if there is one."""
        with on_device(self.device):
            grid = self.grid if self.grid[1:] != (1, 1) else self.grid[:1]
            return self.kernel[grid](*self.arguments, **self.options, **self.also)

    def tensors(self) -> list[Tensor]:
        """In the order of the kernel's parameters; a descriptor's is its base."""
        return self.signed()[1]

    def signed(self) -> tuple[tuple, list[Tensor]]:
        """(a key of all but the tensors' addresses, `tensors`)."""
        key: list[object] = [
            id(self.kernel),
            self.grid,
            self.max_ctas_per_sm,
            *self.options.items(),
        ]
        tensors: list[Tensor] = []
        _sign(self.arguments, key, tensors)
        for name, value in self.also.items():
            key.append(name)
            _sign((value,), key, tensors)
        key.append(tensors[0].device)
        return tuple(key), tensors

    def by_driver(self, compiled) -> DriverLaunch | None:
        """The same launch through the driver; None where only Triton knows how, or something speaks against it now."""
        device, addresses = self.device, [x.data_ptr() for x in self.tensors()]
        here = on_gpu(device) and torch._C._cuda_getDevice() == device.index
        if compiled is None or not here or not aligned(addresses) or somebody_watches():
            return None
        bound = self._bound()
        pairs = flat(compiled.src.signature.values(), bound)
        if [_base(x).data_ptr() for kind, x in pairs if is_tensor(kind)] != addresses:
            return None
        return driver_launch(compiled, self.grid, bound, device, self.max_ctas_per_sm)

    def _bound(self) -> tuple:
        """All arguments in the order of the kernel's parameters; the rest of the options are Triton's own."""
        signature = self.kernel.signature
        named = {**self.options, **self.also}
        own = {name: value for name, value in named.items() if name in signature.parameters}
        bound = signature.bind(*self.arguments, **own)
        bound.apply_defaults()
        return bound.args


def launch(
    kernel, grid: int | tuple[int, int, int], *arguments, also: dict[str, object] = _NOTHING,
    **options,
) -> None:  # fmt: skip
    """Makes one `Launch`."""
    run((Launch(kernel, grid, *arguments, also=also, **options),))


def run(launches: Iterable[Launch]) -> None:
    """Makes launches in their order, each by the driver if its like was made before."""
    for each in launches:
        if not on_gpu(each.device):
            each.through_triton()
            continue
        key, tensors = each.signed()
        call = prepared.find(key) or prepared.prepare(key, each.kernel)
        with on_device(each.device):
            if not call.by_driver(tensors):
                call.run(tensors, (each,))


def on_gpu(device: torch.device) -> bool:
    return device.type == "cuda" and not INTERPRET


def _is_descriptor(value: object) -> bool:
    """Of Triton's or of Gluon's, which says how blocks lie in shared memory, too."""
    return hasattr(value, "block_shape")


def _base(value) -> Tensor:
    return value if isinstance(value, Tensor) else value.base


def _sign(values: Iterable, key: list[object], tensors: list[Tensor]) -> None:
    """Appends what stays the same between calls to the key, and the tensors to theirs."""
    for value in values:
        kind = type(value)
        if kind in _NUMBERS:
            key.append(value)
        elif isinstance(value, Tensor):
            key.append(value.dtype)
            tensors.append(value)
        elif kind is tuple:
            if value and type(value[0]) is int and type(value[-1]) is int:  # strides: no tensors
                key.append(value)
            else:
                key += kind, len(value)
                _sign(value, key, tensors)
        elif _is_descriptor(value):
            about = value.shape, value.strides, value.block_shape
            key += [value.base.dtype, value.padding, *map(tuple, about)]
            key += [getattr(value, name, None) for name in ("layout", "round_f32_to_tf32")]
            tensors.append(value.base)
        else:
            key.append(value)
