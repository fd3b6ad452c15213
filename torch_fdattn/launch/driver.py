"""CUDA's driver, called without the way through PyTorch or Triton, whose host time is what short work waits for."""

from __future__ import annotations

import ctypes
import functools

import torch

INVALID_CONTEXT = 201


@functools.cache
def loaded() -> ctypes.CDLL | None:
    """libcuda, called without the GIL: a call waits where the queue is full. None: not there, too old, or AMD's."""
    if torch.version.hip is not None:
        return None
    try:
        found = ctypes.CDLL("libcuda.so.1")
        found.cuLaunchKernelEx, found.cuFuncSetAttribute  # noqa: B018 (whether they are there)
        found.cuMemcpyAsync.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)  # fmt: skip
        return found
    except (OSError, AttributeError):
        return None


def bind_context(driver, device_index: int) -> None:
    """Makes the device's primary context this thread's: a new thread has none before its first runtime call."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    failure = (
        driver.cuDeviceGet(ctypes.byref(device), device_index)
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        or driver.cuCtxSetCurrent(context)
    )
    if failure:
        raise RuntimeError(f"no CUDA context for device {device_index}: CUDA error {failure}")


def copy_async(
    driver, target: int, source: int, nbytes: int, stream: int, device_index: int
) -> None:
    """Copies device memory between addresses, of any device that this one maps, in stream order."""
    failure = driver.cuMemcpyAsync(target, source, nbytes, stream)
    if failure == INVALID_CONTEXT:
        bind_context(driver, device_index)
        failure = driver.cuMemcpyAsync(target, source, nbytes, stream)
    if failure:
        raise RuntimeError(f"cuMemcpyAsync failed with CUDA error {failure}")
