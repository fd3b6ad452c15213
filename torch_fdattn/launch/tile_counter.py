"""Counters from which the programs of a launch take their tiles; imports no triton."""

from __future__ import annotations

import torch
from torch import Tensor

_counters: dict[tuple[int | None, int], Tensor] = {}


def tile_counter(device: torch.device) -> Tensor:
    """int32 (1,), 0, which no launch counts with that may run at the same time.

    A kernel that counts with it leaves it at 0. So launches of one stream, which run one after the other, share theirs. A
    captured launch has one of its own: its graph may be replayed on any stream, beside whatever else.

    A launch that is aborted half way leaves no count behind that another would find: a fault of a kernel ends the CUDA context,
    and all of its memory.
    """
    if device.type != "cuda":
        return torch.zeros(1, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    if key not in _counters:
        _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return _counters[key]
