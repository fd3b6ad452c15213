"""Symmetric memory, which every rank of a group maps, and all-reduces on workspaces in it.

    allocate     bytes with every rank's address of them: torch's symmetric memory on CUDA, shared memory between
                 CPU processes. What kernels of ours that reach into other ranks' memory are given.
    workspace    the same for torch's own symmetric-memory kernels, by (group, purpose, dtype). CUDA only.

Both are exchanged at the first need, a collective step that every rank reaches with the same sizes, and are
of one host; no NVLink multicast (multimem) anywhere.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from torch_fdattn.ops import library

METHODS = ("one_shot", "two_shot")
#: What torch's symmetric-memory all-reduce kernels are compiled for.
DTYPES = (torch.bfloat16, torch.float32)

_ALIGNMENT = 16  # bytes: the widest loads of those kernels


class PeerMemory(NamedTuple):
    """Bytes of this rank, and where in this process's address space every rank's begin."""

    local: Tensor  # uint8 (bytes,)
    addresses: Tensor  # int64 (world size,), on the device
    keep: object  # what must live as long as the mappings
    peers: tuple[Tensor, ...] = ()  # every rank's bytes as tensors of this process, for copies


def allocate(group_name: str, nbytes: int, device: torch.device) -> PeerMemory:
    """Zeroed bytes that every rank of the group maps; all ranks call it, with the same size.

    Raises:
        RuntimeError: a CUDA graph is being captured, or the ranks cannot share symmetric memory.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "memory shared between ranks cannot be exchanged while a CUDA graph is captured: "
            "run the step once beforehand"
        )
    group = distributed_c10d._resolve_process_group(group_name)
    sizes: list[int] = [0] * group.size()
    dist.all_gather_object(sizes, nbytes, group=group)
    if len(set(sizes)) > 1:
        raise ValueError(f"nbytes must be the same on all ranks, got {sizes}")
    with torch.inference_mode(False):  # or else it could be written in inference mode alone
        if device.type == "cuda":
            return _symmetric(group, group_name, nbytes, device)
        return _mapped(group, nbytes)


def _symmetric(group, group_name: str, nbytes: int, device: torch.device) -> PeerMemory:
    import torch.distributed._symmetric_memory as symmetric  # not at import: most callers have no need

    local = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(local, group_name)
    local.zero_()
    torch.cuda.synchronize(device)  # before the exchange below, after which others may write
    # A tensor may lie anywhere in its allocation, whose address is what the handle knows.
    offsets: list[int] = [0] * group.size()
    dist.all_gather_object(
        offsets, local.data_ptr() - handle.buffer_ptrs[group.rank()], group=group
    )
    addresses = [p + offset for p, offset in zip(handle.buffer_ptrs, offsets, strict=True)]
    peers = tuple(_peer_bytes(handle, r, address, nbytes) for r, address in enumerate(addresses))
    return PeerMemory(local, torch.tensor(addresses, device=device), handle, peers)


def _peer_bytes(handle, rank: int, address: int, nbytes: int) -> Tensor:
    """A rank's bytes as a tensor; versions of torch differ in where a handle's buffers begin."""
    found = handle.get_buffer(rank, (nbytes,), torch.uint8)
    if offset := address - found.data_ptr():
        found = handle.get_buffer(rank, (nbytes,), torch.uint8, storage_offset=offset)
    return found


def _mapped(group, nbytes: int) -> PeerMemory:
    """Through files in shared memory, which have no names any more once all ranks have mapped them."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    mine = os.path.join(folder, f"fdattn-{uuid.uuid4().hex}")
    names: list[str] = [""] * group.size()
    try:
        local = torch.from_file(mine, shared=True, size=nbytes, dtype=torch.uint8).zero_()
        dist.all_gather_object(names, mine, group=group)
        others = [
            local if name == mine else torch.from_file(name, True, nbytes, dtype=torch.uint8)
            for name in names
        ]
        dist.barrier(group)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(mine)
    return PeerMemory(local, torch.tensor([x.data_ptr() for x in others]), others, tuple(others))


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
    buffers = _buffers(group_name, purpose, dtype)
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
    # Torch zeroes the memory and its signals on the device. Done later than a peer's first signal it would delete that one,
    # and this rank would wait for it without end.
    torch.cuda.synchronize(device)
    symmetric.rendezvous(buffer, group_name)
    buffers.append(buffer)
    return buffer


def _buffers(group_name: str, purpose: str, dtype: torch.dtype) -> list[Tensor]:
    """What the workspace was and, last, is."""
    group = distributed_c10d._resolve_process_group(group_name)
    return _workspaces.setdefault(group, {}).setdefault((purpose, dtype), [])


def _all_reduce(x: Tensor, group_name: str, method: str) -> Tensor:
    """The sum of x over the ranks through a workspace: bfloat16 or float32 on CUDA, any shape."""
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    buffer = _summed_later(x, x.numel(), group_name)
    buffer[: x.numel()].copy_(x.reshape(-1))
    return _sum(buffer, group_name, method)[: x.numel()].view(x.shape)


def matmul_all_reduce(x: Tensor, weight: Tensor, group_name: str, method: str) -> Tensor:
    """The sum over ranks of x (M, K) @ weight (N, K).T, a product that BLAS writes into the workspace; not traced."""
    rows, columns = x.shape[0], weight.shape[0]
    count = rows * columns
    if not count:
        return x.new_empty(rows, columns)
    buffer = _summed_later(x, count, group_name)
    part = (buffer if buffer.numel() == count else buffer[:count]).view(rows, columns)
    torch.mm(x, weight.t(), out=part)
    total = _sum(buffer, group_name, method)
    return (total if total.numel() == count else total[:count]).view(rows, columns)


def _summed_later(like: Tensor, count: int, group_name: str) -> Tensor:
    """Symmetric memory of so many elements and some more: two_shot gives every rank an aligned share."""
    world_size = distributed_c10d._resolve_process_group(group_name).size()
    unit = _ALIGNMENT // like.element_size() * world_size
    padded = -(-count // unit) * unit
    return workspace(group_name, "all_reduce", padded, like.dtype, like.device)[:padded]


def _sum(buffer: Tensor, group_name: str, method: str) -> Tensor:
    """Both kernels end with a barrier: no rank reads this buffer once its own kernel is over."""
    out = torch.empty_like(buffer)
    if method == "one_shot":
        return torch.ops.symm_mem.one_shot_all_reduce_out(buffer, "sum", group_name, out)
    return torch.ops.symm_mem.two_shot_all_reduce_out(buffer, "sum", group_name, out)


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
