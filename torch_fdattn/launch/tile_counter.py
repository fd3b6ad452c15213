"""Counters from which the programs of a launch take their tiles; imports no triton."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_counters: dict[tuple[int | None, int], Tensor] = {}


def tile_counter(device: torch.device) -> Tensor:
    """int32 (1,), 0, which no launch counts with that may run at the same time.

    A kernel that counts with it leaves it at 0. So launches of one stream, which run one after the other, share theirs. A
    captured launch has one of its own: its graph may be replayed on any stream, beside whatever else.

    One that stays is made by a thread of its own: where CUDA graphs are warmed up, Inductor has what the calling thread
    allocates put into the graphs' memory, in which nothing may stay.

    A launch that is aborted half way leaves no count behind that another would find: a fault of a kernel ends the CUDA context,
    and all of its memory.
    """
    if device.type != "cuda":
        return torch.zeros(1, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    if key not in _counters:
        stream = torch.cuda.current_stream(device)
        with ThreadPoolExecutor(1) as thread:
            _counters[key] = thread.submit(_zero_on, stream).result()
    return _counters[key]


def _zero_on(stream: torch.cuda.Stream) -> Tensor:
    with torch.cuda.stream(stream):
        return torch.zeros(1, dtype=torch.int32, device=stream.device)
