"""Scratch memory of the decode kernel: partial results, and arrival counters that must be zero.

The kernel leaves every counter at zero, so that it never has to be cleared; two calls that can run at the
same time need counters of their own. Therefore

    eager calls     share one workspace a stream, which grows as needed; a launch that fails drops it
    captured calls  share counters with their graph's other calls on the same stream, taken once and for all
                    from an arena zeroed before any capture: a graph may be replayed on any stream, next to any
                    other graph. Partial results come from the graph's memory pool
    callers         may bring a workspace (`decode_workspace`), and then see to it themselves
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

#: Counters for captured calls, 4 MiB a device: a call with 64 sequences and 8 KV heads takes 512.
ARENA = 1 << 20


class Workspace(NamedTuple):
    arrivals: Tensor  # int32, zero
    parts: Tensor  # fp32, anything


_by_stream: dict[tuple[torch.device, int], Workspace] = {}
_arenas: dict[torch.device, list[Tensor]] = {}  # one tensor: what is left of the arena
_by_graph: weakref.WeakKeyDictionary[object, dict[int, Tensor]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def workspace_for(device: torch.device, arrivals: int, floats: int) -> Workspace:
    """At least so many counters and floats, for one launch on the current stream."""
    stream = 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return _captured(device, arrivals, floats)
        stream = torch._C._cuda_getCurrentRawStream(device.index)
    found = _by_stream.get((device, stream))
    if found is None or found.arrivals.numel() < arrivals or found.parts.numel() < floats:
        found = _by_stream[device, stream] = _grown(device, found, arrivals, floats)
    return found


def forget(device: torch.device) -> None:
    """Drops the eager workspaces of a device: after a failed launch their counters are anyone's guess."""
    for key in [key for key in _by_stream if key[0] == device]:
        del _by_stream[key]


def elements(arrivals: int, floats: int) -> int:
    """The size of a caller's workspace: a sixteenth for the counters, whatever call it serves."""
    return max(16 * arrivals, -(-floats // 480) * 512)


def split(workspace: Tensor) -> Workspace:
    """A caller's flat int32 workspace: its counters stand where no call's partial results come."""
    rows = workspace.numel() // 512
    return Workspace(
        workspace[rows * 480 : rows * 512], workspace[: rows * 480].view(torch.float32)
    )


def _grown(device: torch.device, found: Workspace | None, arrivals: int, floats: int) -> Workspace:
    if found is not None:
        arrivals, floats = max(arrivals, found[0].numel()), max(floats, found[1].numel())
    if device.type != "cuda":
        return _fresh(device, arrivals, floats)
    # On a stream of our own, and waited for: the current stream may be one that allocates from a graph's
    # pool (the warm-up of torch.compile's cudagraphs), and what lies there must not outlive the graph.
    torch.cuda.current_stream(device).synchronize()
    with torch.cuda.stream(_own_stream(device)):
        if device not in _arenas:
            _arenas[device] = [torch.zeros(ARENA, dtype=torch.int32, device=device)]
        made = _fresh(device, arrivals, floats)
    _own_stream(device).synchronize()
    return made


def _fresh(device: torch.device, arrivals: int, floats: int) -> Workspace:
    with torch.inference_mode(False):
        return Workspace(
            torch.zeros(1 << (arrivals - 1).bit_length(), dtype=torch.int32, device=device),
            torch.empty(floats, dtype=torch.float32, device=device),
        )


@functools.cache
def _own_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _captured(device: torch.device, arrivals: int, floats: int) -> Workspace:
    parts = torch.empty(floats, dtype=torch.float32, device=device)
    # Where torch does not tell which graph it captures, every call gets counters of its own.
    capturing = getattr(torch.cuda.CUDAGraph, "get_currently_capturing_graph", dict)()
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    with _lock:
        held = _by_graph.setdefault(capturing, {}) if capturing else {}
        counters = held.get(stream)
        if counters is None or counters.numel() < arrivals:
            left = _arenas.get(device)
            if not left or left[0].numel() < arrivals:
                # The graph clears these counters at every replay, which costs it a node.
                counters = torch.zeros(arrivals, dtype=torch.int32, device=device)
                return Workspace(counters, parts)
            counters, left[0] = left[0][:arrivals], left[0][arrivals:]
            held[stream] = counters
    return Workspace(counters, parts)
