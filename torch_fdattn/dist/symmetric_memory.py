"""Workspaces in torch's symmetric memory, by (group, purpose, dtype), and the all-reduces on them.

A workspace is memory that every rank of a group maps. It is allocated and exchanged at the first need,
a collective step that every rank reaches with the same sizes, and grows by powers of two. CUDA only,
one host; no NVLink multicast (multimem) anywhere.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from torch_fdattn.ops import library

METHODS = ("one_shot", "two_shot")
#: What torch's symmetric-memory all-reduce kernels are compiled for.
DTYPES = (torch.bfloat16, torch.float32)

_ALIGNMENT = 16  # bytes: the widest loads of those kernels

# Weak: a group's workspaces go with it, and its name may come again.
_workspaces: weakref.WeakKeyDictionary[object, dict[tuple[str, torch.dtype], list[Tensor]]] = (
    weakref.WeakKeyDictionary()
)


def workspace(
    group_name: str, purpose: str, numel: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A flat tensor of at least `numel` elements that all ranks of the group map.

    The same memory at every call with the same group, purpose and dtype, until it must grow. Memory that was
    grown out of stays until the group goes (in all at most as much again): captured graphs hold its
    address. One stream at a time may use a workspace.

    Raises:
        RuntimeError: it would have to grow while a CUDA graph is captured.
    """
    group = distributed_c10d._resolve_process_group(group_name)
    workspaces, key = _workspaces.setdefault(group, {}), (purpose, dtype)
    buffers = workspaces.setdefault(key, [])
    if buffers and buffers[-1].numel() >= numel:
        return buffers[-1]
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the symmetric-memory workspace {purpose!r} must grow to {numel} elements of {dtype} "
            "before a CUDA graph is captured: run the step once beforehand"
        )
    import torch.distributed._symmetric_memory as symmetric  # not at import: most callers have no need

    with torch.inference_mode(False):  # or else it could be written in inference mode alone
        size = 1 << max(numel - 1, 1).bit_length()
        buffer = symmetric.empty(size, dtype=dtype, device=device)
    symmetric.rendezvous(buffer, group_name)
    buffers.append(buffer)
    return buffer


def _all_reduce(x: Tensor, group_name: str, method: str) -> Tensor:
    """The sum of x over the ranks through a workspace: bfloat16 or float32 on CUDA, any shape."""
    world_size = distributed_c10d._resolve_process_group(group_name).size()
    # two_shot gives every rank an aligned share of the elements.
    unit = _ALIGNMENT // x.element_size() * world_size
    padded = -(-x.numel() // unit) * unit
    if padded == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    buffer = workspace(group_name, "all_reduce", padded, x.dtype, x.device)[:padded]
    buffer[: x.numel()].copy_(x.reshape(-1))
    # Both kernels end with a barrier: no rank reads this buffer once its own kernel is over.
    if method == "one_shot":
        result = torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", group_name)[: x.numel()]
    else:
        torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", group_name)
        result = buffer[: x.numel()].clone()
    return result.view(x.shape)


def _all_reduce_fake(x: Tensor, group_name: str, method: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def check(method: str, device: torch.device, dtype: torch.dtype) -> None:
    """Refuses what the all-reduces above cannot do, before anything is communicated."""
    if device.type != "cuda":
        raise NotImplementedError(
            f"method {method!r} needs CUDA tensors (torch symmetric memory), got tensors on {device}; "
            "method 'nccl' runs everywhere"
        )
    if dtype not in DTYPES:
        raise TypeError(f"method {method!r} needs bfloat16 or float32, got {dtype}")


library.define_raw(
    "symmetric_all_reduce(Tensor x, str group_name, str method) -> Tensor",
    _all_reduce,
    _all_reduce_fake,
)
