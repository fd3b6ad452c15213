"""A kernel's launch, past Triton's binding of its arguments where the same was launched before.

Triton binds and specialises every argument of every launch: 20 to 40 µs of host time for the 50 of an attention
kernel. Two launches of one kernel that differ in nothing but their tensors' addresses, all multiples of 16, run the
same machine code with the same numbers: the first two go through Triton, which compiles, and from the third on the
compiled kernel is handed its addresses directly (`launch/driver_launch.py`). Lengths that never come again pay for the look
alone. Whole calls that are nothing but launches: `repeated_call.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from torch_fdattn.launch.driver_launch import (
    DriverLaunch,
    address_of,
    aligned,
    driver_launch,
    flat,
    is_tensor,
    somebody_watches,
)
from torch_fdattn.ops import repeated_call
from torch_fdattn.ops.library import INTERPRET

#: By what is the same at every call: None once it was launched, False where only Triton knows how.
_known: dict[tuple, DriverLaunch | bool | None] = {}
#: Kernels whose ids are in the keys: no other kernel may get one of them.
_kernels: dict[int, object] = {}
#: Launches that are known at most; then all are forgotten.
MOST = 8192
_NEVER = object()
_NOTHING: dict[str, object] = {}
_NUMBERS = frozenset((int, float, bool, str, type(None)))


def launch(
    kernel, programs: int, *arguments, also: dict[str, object] = _NOTHING, **options
) -> None:
    """``kernel[(programs,)](*arguments, **options, **also)``.

    Args:
        kernel: of `triton.jit`.
        arguments: the first a tensor, its descriptor, or a tuple of them; all are on the current device.
        also: further arguments by name, tensors in the order of the kernel's parameters.
        options: numbers, flags and strings alone.
    """
    first = arguments[0]
    while type(first) is tuple:
        first = first[0]
    first = first.base if type(first) is TensorDescriptor else first
    if not _on_gpu(first):
        kernel[(programs,)](*arguments, **options, **also)
        return
    index = first.device.index
    addresses: list[int] = []
    key: list[object] = [id(kernel), programs, index, *options.values()]
    _sign(arguments, addresses, key)
    _sign(also.values(), addresses, key)
    same = tuple(key)
    found = _known.get(same, _NEVER)
    direct = aligned(addresses) and torch._C._cuda_getDevice() == index and not somebody_watches()
    if direct and type(found) is DriverLaunch:
        found(torch._C._cuda_getCurrentRawStream(index), addresses)
        repeated_call.note(found, addresses)
        return
    repeated_call.note(None, addresses)
    compiled = kernel[(programs,)](*arguments, **options, **also)
    if found is _NEVER:
        if len(_known) >= MOST:
            forget()
        _known[same], _kernels[id(kernel)] = None, kernel
    elif found is None and direct and compiled is not None:
        bound = _bound(kernel, arguments, {**options, **also})
        pairs = list(flat(compiled.src.signature.values(), bound))
        in_order = [address_of(x) for kind, x in pairs if is_tensor(kind)] == addresses
        made = driver_launch(compiled, (programs, 1, 1), bound, first.device) if in_order else None
        _known[same] = made or False


def forget() -> None:
    """Makes the next launches of all kernels go through Triton."""
    repeated_call.forget()
    _known.clear()
    _kernels.clear()


def _sign(values: Iterable, addresses: list[int], key: list[object]) -> None:
    """Appends the tensors' addresses, and what stays the same between calls."""
    for value in values:
        kind = type(value)
        if kind in _NUMBERS:
            key.append(value)
        elif kind is tuple:
            if value and type(value[0]) is int and type(value[-1]) is int:  # strides
                key.append(value)
            else:
                _sign(value, addresses, key)
        elif isinstance(value, Tensor):
            addresses.append(value.data_ptr())
            key.append(value.dtype)
        elif kind is TensorDescriptor:
            addresses.append(value.base.data_ptr())
            about = value.shape, value.strides, value.block_shape
            key += [value.base.dtype, value.padding, *map(tuple, about)]
        else:
            key.append(value)


def _bound(kernel, arguments: tuple, named: dict[str, object]) -> tuple:
    """All arguments in the order of the kernel's parameters; the rest of what is named are Triton's own options."""
    signature = kernel.signature
    own = {name: value for name, value in named.items() if name in signature.parameters}
    bound = signature.bind(*arguments, **own)
    bound.apply_defaults()
    return bound.args


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda and not INTERPRET
