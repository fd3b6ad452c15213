"""Tensor maps, which a kernel is handed in the place of a tensor descriptor, made without the way through Triton.

A map holds its tensor's address; sizes, strides and blocks are those of the descriptor that the kernel was compiled
for. (cuTensorMapEncodeTiled, CUDA driver API 12.0; PTX ISA, tensors.)
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from triton.tools.tensor_descriptor import TensorDescriptor

from torch_fdattn.launch.driver import INVALID_CONTEXT, bind_context

BYTES = 128
#: Where a map lies.
ALIGNMENT = 64
#: CUtensorMapDataType of what the compiler calls a tensor's elements, where that is another number.
_TYPES = {8: 10, 9: 8, 10: 9}
_TF32 = 11
_NOT_INTERLEAVED = 0
#: Bytes that the L2 takes from memory at least, CUtensorMapL2promotion. One H100, 128 rows by blocks of 128 bytes a row, the
#: products of an MLP: 0.97 to 0.98 of the time with 256, which the next block reads; blocks of 256 bytes: as long, or 0.7 %
#: longer.
_PROMOTED_TO_128, _PROMOTED_TO_256 = 2, 3
_NANS_OUTSIDE = 1
#: Drivers up to this one read small tensors wrongly unless a bit of the map is cleared (CUTLASS, b7ecaa6).
_LAST_WRONG_DRIVER, _SMALL, _WRONG_BIT = 13010, 128 * 1024, 1 << 21
#: Addresses whose maps are kept.
_MOST = 512


def aligned_buffer() -> tuple[ctypes.Array, int]:
    """(what owns the memory, the address where a map may lie in it)."""
    owner = (ctypes.c_char * (BYTES + ALIGNMENT))()
    return owner, -(-ctypes.addressof(owner) // ALIGNMENT) * ALIGNMENT


class TensorMaps:
    """The maps of tensors that differ from a descriptor's in nothing but their addresses."""

    def __init__(
        self, like: TensorDescriptor, meta: Mapping[str, object], driver, device_index: int = 0
    ) -> None:
        """meta: of the compiled kernel, `tensordesc_meta`."""
        rank = len(like.shape)
        self._sizes = (ctypes.c_uint64 * rank)(*reversed(like.shape))
        strides = [meta["elem_size"] * stride for stride in reversed(like.strides)][1:]
        self._strides = (ctypes.c_uint64 * rank)(*strides, 0)
        self._block = (ctypes.c_uint32 * rank)(*reversed(meta["block_size"]))
        self._steps = (ctypes.c_uint32 * rank)(*[1] * rank)
        kind = meta["elem_type"]
        if getattr(like, "round_f32_to_tf32", False):
            kind = _TF32
        self._kind, self._rank, self._swizzle = _TYPES.get(kind, kind), rank, meta["swizzle"]
        narrow = like.block_shape[-1] * meta["elem_size"] <= 128
        self._promoted = _PROMOTED_TO_256 if narrow else _PROMOTED_TO_128
        self._fill = _NANS_OUTSIDE if like.padding == "nan" else 0
        last = sum((n - 1) * stride for n, stride in zip(reversed(like.shape), [meta["elem_size"], *strides], strict=True))  # fmt: skip
        self._small = last + 1 < _SMALL
        self._driver, self._device_index = driver, device_index
        self._made: dict[int, bytes] = {}

    def __getitem__(self, address: int) -> bytes:
        """The map of the tensor at an address."""
        made = self._made.get(address)
        if made is None:
            if len(self._made) >= _MOST:
                self._made.clear()
            made = self._made[address] = self._make(address)
        return made

    def _make(self, address: int) -> bytes:
        _owner, at = aligned_buffer()
        given = (
            ctypes.c_void_p(at), self._kind, self._rank, ctypes.c_void_p(address), self._sizes, self._strides, self._block,
            self._steps, _NOT_INTERLEAVED, self._swizzle, self._promoted, self._fill,
        )  # fmt: skip
        failure = self._driver.cuTensorMapEncodeTiled(*given)
        if failure == INVALID_CONTEXT:
            bind_context(self._driver, self._device_index)
            failure = self._driver.cuTensorMapEncodeTiled(*given)
        if failure:
            raise RuntimeError(f"cuTensorMapEncodeTiled failed with CUDA error {failure}")
        if self._small:
            version = ctypes.c_int()
            self._driver.cuDriverGetVersion(ctypes.byref(version))
            if version.value <= _LAST_WRONG_DRIVER:
                ctypes.c_uint64.from_address(at + 8).value &= ~_WRONG_BIT
        return ctypes.string_at(at, BYTES)
