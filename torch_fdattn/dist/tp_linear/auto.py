"""Strategy and method `auto`: by measured crossovers, and `collective` (method `nccl`) where nothing was measured.

`crossovers.json`, which `python -m benchmarks tp_crossover` writes, has for an op, a GPU, a number of ranks, a dtype
and a layer's local sizes (N, K) which strategy or method was the fastest for so many rows M, and the run that says so.
Where it was measured, a choice is the fastest of ours, the group's own collective among them. Between, the nearest
measured sizes speak, and far from all of them nothing does.

Captured graphs and eager calls have choices of their own: few rows take the host longer to launch than the device to
compute. The first eager call of its sizes takes the choice of graphs, so that a capture finds it compiled and
connected; of calls with a norm or SwiGLU the first of these, too.
"""

from __future__ import annotations

import functools
import json
import math
import weakref
from collections.abc import Sequence
from importlib import resources
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from torch_fdattn.dist.decode.one_sided import available
from torch_fdattn.dist.groups import is_traced, unanimous

GATHER, SCATTER, ALL_REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
#: Not an op but a model's layers: "ag_rs" or "all_reduce"; their sizes are those of the MLP's second matmul.
LAYER = "layer"
#: What runs everywhere.
STOCK = {GATHER: "collective", SCATTER: "collective", ALL_REDUCE: "nccl"}
#: What ranks with unequal shards do not have in common.
_OF_RANK = {GATHER: "columns", SCATTER: "features", ALL_REDUCE: "features"}
#: Octaves of rows, columns or features beyond which a measurement says nothing.
FARTHEST = 2.0


class Sizes(NamedTuple):
    """A call's: all rows M, the layer's columns N and features K on this rank, ranks."""

    rows: int
    columns: int
    features: int
    ranks: int


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that F.linear computes in."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


@functools.cache
def table() -> tuple[dict, ...]:
    """The measured entries: op, gpu, ranks, columns, features, dtype, choices of graphs [[rows, name], …], those of
    eager calls (`eager`; the same where there are none), run."""
    file = resources.files(__package__) / "crossovers.json"
    return tuple(json.loads(file.read_text())["entries"])


def lookup(
    entries: Sequence[dict], op: str, gpu: str, dtype: str, sizes: Sizes, alike: bool = False, eager: bool = False
) -> str | None:  # fmt: skip
    """What was the fastest at the nearest measured sizes, by the logarithms of M, N and K; None: none is near.

    alike: whether all ranks ask for the same sizes. Otherwise N of a gather and K of the others, which are a rank's
    own, must be measured as they are. eager: not in a graph.
    """
    best, found = math.inf, None
    own = None if alike else _OF_RANK.get(op)
    for entry in entries:
        if (entry["op"], entry["gpu"], entry["dtype"], entry["ranks"]) != (op, gpu, dtype, sizes.ranks):  # fmt: skip
            continue
        if own is not None and entry[own] != getattr(sizes, own):
            continue
        apart = [_octaves(entry[name], getattr(sizes, name)) for name in ("columns", "features")]
        for rows, name in _choices(entry, eager):
            distances = (*apart, _octaves(rows, sizes.rows))
            distance = sum(x * x for x in distances)
            if max(distances) <= FARTHEST and distance < best:
                best, found = distance, name
    return found


def _choices(entry: dict, eager: bool) -> Sequence[tuple[int, str]]:
    return entry.get("eager", entry["choices"]) if eager else entry["choices"]


def _octaves(measured: int, wanted: int) -> float:
    return abs(math.log2(max(measured, 1) / max(wanted, 1)))


@functools.lru_cache(maxsize=4096)
def _known(
    op: str, gpu: str, dtype: str, sizes: Sizes, alike: bool
) -> tuple[str | None, str | None, bool]:
    """(what `lookup` finds for graphs, what for eager calls, whether any size was measured at all)."""
    about = op, gpu, dtype, sizes.ranks
    measured = any((x["op"], x["gpu"], x["dtype"], x["ranks"]) == about for x in table())
    found = (lookup(table(), op, gpu, dtype, sizes, alike, eager) for eager in (False, True))
    return *found, measured


_gpu_name = functools.cache(torch.cuda.get_device_name)
#: Calls whose choice for graphs has run.
_ready: weakref.WeakKeyDictionary[object, set[tuple]] = weakref.WeakKeyDictionary()


def _for_graphs(group_name: str, device: torch.device, call: tuple) -> bool:
    """Whether such a call, for which graphs have another choice, takes that."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return True
    ready = _ready.setdefault(distributed_c10d._resolve_process_group(group_name), set())
    first = call not in ready
    ready.add(call)
    return first


def choose(
    op: str, group_name: str, x: Tensor, sizes: Sizes, otherwise: str, alike: bool = False,
    fused: str | None = None,
) -> str:  # fmt: skip
    """The strategy or method for a call with x, the same on all ranks; for LAYER the form of a model's layers.

    fused: what may be in the product's or the sum's launch, whose kernel and memory are then its own: "norm", "swiglu".

    Nothing is chosen in traces, nor where sizes are a rank's own (see `lookup`) and ranks find different things.
    """
    if is_traced(x) or not table():
        return otherwise
    gpu = _gpu_name(x.device) if x.is_cuda else x.device.type
    dtype = str(compute_dtype(x)).removeprefix("torch.")
    in_graphs, found, measured = _known(op, gpu, dtype, sizes, alike)
    graphs = False
    if in_graphs != found:
        graphs = _for_graphs(group_name, x.device, (op, dtype, sizes, fused))
        found = in_graphs if graphs else found
    if measured and not alike:
        about = op, dtype, sizes._replace(**{_OF_RANK[op]: 0}), graphs
        found = unanimous(group_name, x, about, sizes, found)
    if found is None or found == otherwise:
        return otherwise
    return found if op == LAYER or available(group_name, x.device) else otherwise


def may_choose(op: str, device: torch.device, dtype: torch.dtype, sizes: Sizes | None) -> bool:
    """Whether `choose` could choose anything but the group's own collective, for a graph that is compiled.

    By what is the same on all ranks, whose graphs must have the same collectives: a rank's own sizes may be any.
    sizes: None where they are dynamic.
    """
    if device.type != "cuda":
        return False
    gpu, name = torch.cuda.get_device_name(device), str(dtype).removeprefix("torch.")
    return any(_offers(entry, op, gpu, name, sizes) for entry in table())


def _offers(entry: dict, op: str, gpu: str, dtype: str, sizes: Sizes | None) -> bool:
    """Whether a measured entry has anything faster than the group's own collective for such calls."""
    if (entry["op"], entry["gpu"], entry["dtype"]) != (op, gpu, dtype):
        return False
    every = [*_choices(entry, False), *_choices(entry, True)]
    faster = [rows for rows, choice in every if choice != STOCK[op]]
    if sizes is None or not faster:
        return bool(faster)
    shared = "features" if _OF_RANK[op] == "columns" else "columns"
    return (
        entry["ranks"] == sizes.ranks
        and _octaves(entry[shared], getattr(sizes, shared)) <= FARTHEST
        and any(_octaves(rows, sizes.rows) <= FARTHEST for rows in faster)
    )
