"""Launches of a compiled kernel through the CUDA driver, its arguments laid out once.

Triton's launcher binds and converts every argument at every call. Between calls of equal metadata only the
tensors' addresses change, so here the other arguments lie ready, and a launch writes addresses, or tensor maps in the
place of descriptors, and asks the driver (cuLaunchKernelEx, CUDA driver API 11.8 and later; the PDL attribute from 12.0).

Triton adds parameters of its own behind a kernel's, and another version may add others. The compiled kernel's PTX lists
all of them: where these are not the ones that are laid out here, Triton's launcher makes the launch.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import re
import threading
from collections.abc import Iterator, Sequence

import torch
import triton

from torch_fdattn.launch.driver import INVALID_CONTEXT, bind_context, loaded
from torch_fdattn.launch.tensor_map import BYTES, TensorMaps, aligned_buffer

_WIDTHS = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64,
    "u1": ctypes.c_uint8, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float, "fp64": ctypes.c_double,
}  # fmt: skip
#: What Triton 3.6 and 3.7 add: pointers to scratch memory, global and the profiler's.
_HIDDEN = (ctypes.c_uint64, ctypes.c_uint64)
#: The parameters of a kernel in PTX, and one of them: the width of its elements in bits, and how many an array has.
_ENTRY = re.compile(r"\.entry\s[^(]*\(([^)]*)\)")
_PARAMETER = re.compile(r"\.param\b.*?\.[busf](8|16|32|64)\s[^\[]*(?:\[(\d+)\])?", re.DOTALL)
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
#: Bytes of shared memory that a program takes beside its own (CUDA C++ programming guide, 16.6 to 16.8).
_RESERVED_SHARED = 1024


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (
        ("id", ctypes.c_uint),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class DriverLaunch:
    """One compiled kernel, its grid, and its arguments: called with a stream and the tensors' addresses."""

    def __init__(
        self, compiled, grid: tuple[int, int, int], arguments: Sequence, driver, device_index: int = 0,
        shared: int = 0,
    ) -> None:  # fmt: skip
        """arguments: those of the launch that compiled it, in the order of the kernel's parameters; shared:
        bytes of shared memory a program at least."""
        metadata = compiled.metadata
        kinds = [pair for pair in flat(compiled.src.signature.values(), arguments)]
        count = sum(is_tensor(kind) for kind, _ in kinds)
        self._addresses = (ctypes.c_uint64 * count)()
        self.layout: list[type] = []
        self._numbers: list = []  # what the driver reads from must stay where it is
        #: (which of the addresses, the maps of a descriptor, where the driver reads one)
        self._maps: list[tuple[int, TensorMaps, int]] = []
        places: list[int] = []
        described = iter(getattr(metadata, "tensordesc_meta", None) or ())

        def add(kind: type, value: object) -> None:
            self._numbers.append(kind(value))
            self.layout.append(kind)
            places.append(ctypes.addressof(self._numbers[-1]))

        index = 0
        for kind, value in kinds:
            if kind.startswith("*"):
                self.layout.append(ctypes.c_uint64)
                places.append(ctypes.addressof(self._addresses) + 8 * index)
            elif is_tensor(kind):
                owner, at = aligned_buffer()
                self._numbers.append(owner)
                self._maps.append(
                    (index, TensorMaps(value, next(described), driver, device_index), at)
                )
                self.layout.append(ctypes.c_char * BYTES)
                places.append(at)
                for size in value.shape:
                    add(ctypes.c_int32, size)
                for stride in value.strides:
                    add(ctypes.c_int64, stride)
            else:
                add(_WIDTHS[kind], value)
            index += is_tensor(kind)
        self._mapped = [0] * len(self._maps)  # the addresses whose maps lie there
        for kind in _HIDDEN:  # of a kernel without scratch memory
            add(kind, 0)
        self._parameters = (ctypes.c_void_p * len(places))(*places)

        self._attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        self._config = _Config(
            (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(32 * metadata.num_warps, 1, 1),
            max(shared, metadata.shared), None, ctypes.pointer(self._attribute), int(metadata.launch_pdl),
        )  # fmt: skip
        self._config_at = ctypes.pointer(self._config)
        self._compiled = compiled  # which owns the function
        self._function = ctypes.c_void_p(compiled.function)
        self._driver, self.device_index = driver, device_index
        self._launch = driver.cuLaunchKernelEx
        # Between threads: writing the addresses and handing them over.
        self._lock = threading.Lock()

    def matches(self, ptx: str) -> bool:
        """Whether the compiled kernel has the parameters that are laid out, and no others."""
        return parameter_sizes(ptx) == [ctypes.sizeof(kind) for kind in self.layout]

    def takes(self, addresses: Sequence[int]) -> bool:
        """Whether it is right for these addresses on the current device, and no profiler wants to see it."""
        here = torch._C._cuda_getDevice() == self.device_index
        return here and aligned(addresses) and not somebody_watches()

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        """Launches on `stream` with the tensors at these addresses; those that are None are left out."""
        with self._lock:
            self._addresses[:] = addresses
            for i, (index, maps, at) in enumerate(self._maps):
                if self._mapped[i] != addresses[index]:
                    ctypes.memmove(at, maps[addresses[index]], BYTES)
                    self._mapped[i] = addresses[index]
            self._config.stream = stream
            given = self._config_at, self._function, self._parameters, None
            failure = self._launch(*given)
            if failure == INVALID_CONTEXT:
                bind_context(self._driver, self.device_index)
                failure = self._launch(*given)
        if failure:
            raise RuntimeError(f"cuLaunchKernelEx failed with CUDA error {failure}")


def driver_launch(
    compiled, grid: tuple[int, int, int], arguments: Sequence, device: torch.device, max_ctas_per_sm: int | None = None
) -> DriverLaunch | None:  # fmt: skip
    """The kernel's launch, or None where only Triton knows how: another driver, clusters, scratch memory, parameters.

    max_ctas_per_sm: how many programs an SM may run at a time. The hardware knows no such limit, so each
    program takes so much shared memory that no more fit.
    """
    metadata = compiled.metadata
    plain = metadata.num_ctas == 1 and not metadata.launch_cooperative_grid
    scratch = metadata.global_scratch_size or metadata.profile_scratch_size
    driver = loaded()
    if driver is None or not plain or scratch:
        return None
    kinds = [kind for kind, _ in flat(compiled.src.signature.values(), arguments)]
    descriptors = sum(is_descriptor(kind) for kind in kinds)
    if descriptors != len(getattr(metadata, "tensordesc_meta", None) or ()):
        return None  # loaded by pointers
    if descriptors and not hasattr(driver, "cuTensorMapEncodeTiled"):
        return None
    shared = 0
    if max_ctas_per_sm is not None:
        properties = torch.cuda.get_device_properties(device)
        most = properties.shared_memory_per_block_optin
        shared = min(
            most, shared_to_limit(max_ctas_per_sm, properties.shared_memory_per_multiprocessor)
        )
        if shared > metadata.shared:
            # As much as there can be, whatever this launch needs: other launches of the function need other sizes.
            function = ctypes.c_void_p(compiled.function)
            if driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, most):
                shared = 0
    made = DriverLaunch(compiled, grid, arguments, driver, device.index, shared)
    return made if made.matches(compiled.asm["ptx"]) else None


def parameter_sizes(ptx: str) -> list[int]:
    """Bytes of each parameter of the kernel in `ptx`, in their order."""
    entry = _ENTRY.search(ptx)
    if entry is None:
        return []
    sizes = (_PARAMETER.match(text.strip()) for text in entry[1].split(",") if text.strip())
    return [0 if x is None else int(x[1]) // 8 * int(x[2] or 1) for x in sizes]


def shared_to_limit(max_ctas_per_sm: int, total: int) -> int:
    """Bytes a program of which so many fit into an SM's `total`, and no more."""
    return total // (max_ctas_per_sm + 1) // 128 * 128 + 128 - _RESERVED_SHARED


def flat(kinds, values) -> Iterator[tuple[str, object]]:
    """(kind, value) of the arguments that the compiled kernel takes; others are part of its code."""
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, tuple):
            yield from flat(kind, value)
        elif kind != "constexpr":
            yield kind, value


def is_descriptor(kind: str) -> bool:
    return kind.startswith("tensordesc")


def is_tensor(kind: str) -> bool:
    """Whether an argument has an address, which each launch is given: tensors and their descriptors."""
    return kind.startswith("*") or is_descriptor(kind)


def aligned(addresses: Sequence[int]) -> bool:
    """Whether all are multiples of 16: what is compiled for such addresses is right for them alone."""
    return functools.reduce(operator.or_, addresses, 0) & 15 == 0


def somebody_watches() -> bool:
    """Whether a profiler has hooked into Triton's launches."""
    runtime = triton.knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False
