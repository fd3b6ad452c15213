"""Sharded decode from stock parts: what a PyTorch user can have without us, in its fastest form.

Each rank attends to its shard with cuDNN (which gives the lse), packs fp32 (out, lse) into one buffer,
exchanges it with one all-gather, and combines all parts; packing and combining are compiled. How the
buffer travels is what tells the baselines apart: NCCL, NCCL's symmetric kernels, MPI through the host.
On a CPU the attention is plain torch, the exchange gloo's, and nothing is compiled.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..distributed.mpi import HostStaged
from ..ranks import Ranks, all_gather
from ..distributed.shards import Shard

Result = tuple[Tensor, Tensor]
Exchange = Callable[[], object]
#: The buffer that each rank sends, that of all ranks' parts, and what fills the one from the other.
Connection = tuple[Tensor, Tensor, Exchange]


def calls(
    shards: Sequence[Shard], ranks: Ranks, by: str, stack: contextlib.ExitStack
) -> list[Callable[[], Result]]:
    """One call for each shard; all of them exchange through the same buffers, in order.

    `by` is of CONNECTIONS; `stack` undoes the connection when the case is over.
    """
    if not shards[0].is_full(ranks.size):
        raise NotImplementedError("has no form for shards that are not full: SDPA knows no lengths")
    q = shards[0].q
    on_gpu = q.is_cuda
    compiled = _compiled if on_gpu else lambda function: function
    pack, combine = compiled(_pack), compiled(_combine)
    attend = _cudnn if on_gpu else _plain
    allocate = functools.partial(_buffers, (*q.shape[:3], q.shape[3] + 1), ranks)
    send, received, exchange = CONNECTIONS[by](allocate, ranks, stack)

    def call(shard: Shard) -> Result:
        pack(*attend(shard.q, shard.k, shard.v), send)
        exchange()
        return combine(received, shard.q.dtype)

    return [functools.partial(call, shard) for shard in shards]


@functools.cache
def _compiled(function: Callable) -> Callable:
    # Every case is a new shape of the same code, and one run has more of them than torch allows.
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(function, dynamic=False, fullgraph=True)


def _cudnn(q: Tensor, k: Tensor, v: Tensor) -> Result:
    # What scaled_dot_product_attention(enable_gqa=True) calls, with the lse that it would throw away.
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
    return out, lse.reshape(q.shape[:3])


def _plain(q: Tensor, k: Tensor, v: Tensor) -> Result:
    grouped = q.unflatten(1, (k.shape[1], -1)).squeeze(-2)  # (B, H_kv, group, D)
    scores = (grouped @ k.mT).float() * q.shape[-1] ** -0.5
    out = scores.softmax(-1).to(v.dtype) @ v
    return out.reshape(q.shape), scores.logsumexp(-1).reshape(q.shape[:3])


def _pack(out: Tensor, lse: Tensor, send: Tensor) -> None:
    send.copy_(torch.cat([out.float(), lse[..., None]], -1))


def _combine(received: Tensor, dtype: torch.dtype) -> Result:
    outs, lses = received[..., :-1], received[..., -1]
    largest = lses.amax(0)
    weights = (lses - largest).exp()
    total = weights.sum(0)
    out = (weights[..., None] * outs).sum(0) / total[..., None]
    return out.to(dtype), largest + total.log()


def _buffers(shape: tuple[int, ...], ranks: Ranks) -> tuple[Tensor, Tensor]:
    options = dict(dtype=torch.float32, device=ranks.device)
    return torch.empty(shape, **options), torch.empty((ranks.size, *shape), **options)


def _collective(allocate: Callable, ranks: Ranks, _: contextlib.ExitStack) -> Connection:
    """NCCL's all-gather, or gloo's."""
    return _all_gather(*allocate(), ranks)


def _symmetric(allocate: Callable, ranks: Ranks, stack: contextlib.ExitStack) -> Connection:
    """The same all-gather over buffers that all ranks registered, which NCCL's symmetric kernels need.

    A pool of NCCL's own allocator, and not symmetric_memory.set_backend("NCCL"), which would take the
    whole process's symmetric memory away from our strategies.
    """
    if ranks.device.type != "cuda":
        raise NotImplementedError("needs CUDA tensors: NCCL's symmetric kernels")
    backend = ranks.group._get_backend(ranks.device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        send, received = allocate()
    backend.register_mem_pool(pool, symm=True)
    stack.callback(backend.deregister_mem_pool, pool)
    send, received, exchange = _all_gather(send.zero_(), received, ranks)
    _check_kernel(exchange)
    return send, received, exchange


def _check_kernel(exchange: Exchange) -> None:
    """Raises where NCCL chose another kernel, so that a figure is what its name says."""
    exchange()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as watched:
        exchange()
        torch.cuda.synchronize()
    kernels = [event.key for event in watched.key_averages() if "nccl" in event.key.lower()]
    if kernels and not any("ncclSymk" in kernel for kernel in kernels):
        raise RuntimeError(f"NCCL chose no symmetric kernel but {kernels[0]}")


def _host_staged(allocate: Callable, ranks: Ranks, _: contextlib.ExitStack) -> Connection:
    send, received = allocate()
    return send, received, HostStaged(send, received)


def _all_gather(send: Tensor, received: Tensor, ranks: Ranks) -> Connection:
    return send, received, lambda: all_gather(received, send, ranks)


CONNECTIONS = {"collective": _collective, "symmetric": _symmetric, "host": _host_staged}
