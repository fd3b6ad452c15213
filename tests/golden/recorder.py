"""Records launches in the place of making them.

The hook is `LOWEST`, Triton's `JITFunction.run`: ``kernel[grid](…)`` of every kernel of the package calls it, unless a
launch goes past Triton through the driver, which happens on CUDA tensors alone and never here. A launch layer that
launches by other means is recorded by changing that one line to its own lowest function (and `_launch`, which reads
kernel, grid and arguments from that function's parameters). Nothing else here knows how kernels are launched.

`limits_of` is for the one part of a launch that never passes Triton: how many programs of it a multiprocessor may run at
once, which only the driver's launches of `decode` keep to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

LOWEST = JITFunction, "run"

PACKAGE = "torch_fdattn."
#: Names of the options that are no parameters of a kernel stand before its parameters.
LIMIT = "max_programs_per_multiprocessor"


class Launch(NamedTuple):
    """One launch in words: the kernel, and values by name, in the order of the kernel's parameters."""

    kernel: str
    values: dict[str, str]


class _Raw(NamedTuple):
    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, object]
    options: dict[str, object]


_seen: list[_Raw] = []
_limit: list[int | None] = [None]


def install() -> None:
    """From here on this process launches nothing."""
    owner, name = LOWEST
    setattr(owner, name, _launch)


def limits_of(kernel_class: type, method: str, attribute: str) -> None:
    """Lets launches inside of a method be limited by an attribute of its object, where that is not None."""
    original = getattr(kernel_class, method)

    def limited(self, *args, **kwargs):
        _limit[0] = getattr(self, attribute)
        try:
            return original(self, *args, **kwargs)
        finally:
            _limit[0] = None

    setattr(kernel_class, method, limited)


def _launch(kernel: JITFunction, *args, grid, warmup, **kwargs) -> None:
    signature = kernel.signature
    own = {name: value for name, value in kwargs.items() if name in signature.parameters}
    bound = signature.bind(*args, **own)
    bound.apply_defaults()
    options = {name: value for name, value in kwargs.items() if name not in own}
    if _limit[0] is not None:
        options[LIMIT] = _limit[0]
    grid = grid(bound.arguments) if callable(grid) else grid
    _seen.append(_Raw(kernel, tuple(grid), dict(bound.arguments), options))


def take() -> list[_Raw]:
    """The launches since the last time."""
    taken = list(_seen)
    _seen.clear()
    return taken


class Names:
    """Tensors by the memory that they lie in. Memory that is named must live as long as this."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._keep: list[object] = []
        self._new = 0

    def add(self, named: Mapping[str, object]) -> None:
        """Tensors of arguments or results; memory that has a name keeps it."""
        for name, tensor in _tensors(named):
            self._names.setdefault(_memory(tensor), name)
            self._keep.append(tensor)

    def __getitem__(self, tensor: Tensor) -> str:
        """NAME+OFFSET:DTYPE, the offset in elements; of memory that is neither given nor returned also its sizes."""
        memory, sizes = _memory(tensor), ""
        name = self._names.get(memory)
        if name is None:
            self._new += 1
            self._names[memory] = name = f"new{self._new}"
            self._keep.append(tensor)
        if name.startswith("new"):
            sizes = f"[{','.join(map(str, tensor.shape))}]"
            if not tensor.is_contiguous():
                sizes += f"by[{','.join(map(str, tensor.stride()))}]"
        offset = f"+{tensor.storage_offset()}" if tensor.storage_offset() else ""
        return f"{name}{offset}:{_dtype(tensor.dtype)}{sizes}"


def described(raw: _Raw, names: Names) -> Launch:
    module = raw.kernel.fn.__module__.removeprefix(PACKAGE)
    values = {"grid": _text(raw.grid, names)}
    values |= {name: _text(raw.options[name], names) for name in sorted(raw.options)}
    values |= {name: _text(value, names) for name, value in raw.arguments.items()}
    return Launch(f"{module}.{raw.kernel.__name__}", values)


def _text(value: object, names: Names) -> str:
    """A value without spaces."""
    if isinstance(value, tl.constexpr):
        value = value.value
    if isinstance(value, Tensor):
        return names[value]
    if hasattr(value, "block_shape"):  # a descriptor of Triton's or of Gluon's
        about = (tuple(value.shape), tuple(value.strides), tuple(value.block_shape))
        return f"descriptor({names[value.base]},{','.join(_text(x, names) for x in about)},{value.padding})"
    if isinstance(value, tuple):
        return f"({','.join(_text(x, names) for x in value)})"
    if isinstance(value, float):
        # As many digits as tell float32 numbers apart, and no more than libraries agree on.
        return f"{value:.9g}" if not value.is_integer() else f"{value:.1f}"
    if value is None or isinstance(value, (bool, int)):
        return str(value)
    if isinstance(value, str):
        return f"'{value}'"
    if isinstance(value, torch.dtype):
        return _dtype(value)
    if isinstance(value, tl.dtype):
        return f"tl.{value}"
    raise TypeError(f"a launch was given {value!r}, of a type that has no words here")


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(named: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    for name, value in named.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (tuple, list)):
            yield from _tensors({f"{name}{i}": x for i, x in enumerate(value)})
