"""Strategy and method `auto`: the fastest of ours by device time, looked up in a table of measurements.

`crossovers.json`, which `python -m benchmarks tp_crossover` writes, holds for an op, a GPU, a number of ranks, a dtype
and a layer's local sizes (N, K) which strategy or method was the fastest in CUDA graphs at so many rows M, the group's
own collective among them, and the run that says so. Eager calls take the same choice: what their host time costs beside
that is for the caller to weigh, who may name a strategy.

What `fdattn tune` has measured on this machine stands before it, where all ranks of the group have the same
(`dist/tuned.py`); it replaces the entries of the same op, GPU, ranks and dtype. Compiled graphs are chosen for by the
shipped table alone.

The table that is asked is the nearest one: of GPUs of the same architecture, those measured with the nearest number of
ranks (by ratio; the larger of two as near), and among these this very GPU's before another's. In it the nearest sizes
speak, by the sum of squared logarithms of M, N and K. An architecture, or a dtype of another size, that was never
measured takes the group's own collective.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from importlib import resources
from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn import tables
from torch_fdattn.dist.consensus import consensus
from torch_fdattn.dist.groups import is_traced
from torch_fdattn.dist.symm.availability import available
from torch_fdattn.dist.tuned import entries_on_all_ranks
from torch_fdattn.tables import Device

GATHER, SCATTER, ALL_REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
#: Not an op but a model's layers: "ag_rs" or "all_reduce"; their sizes are those of the MLP's second matmul.
LAYER = "layer"
#: Of the tuned table.
SECTION = "tensor_parallel"
#: What runs everywhere.
STOCK = {GATHER: "collective", SCATTER: "collective", ALL_REDUCE: "nccl"}
#: What ranks with unequal shards do not have in common.
_OF_RANK = {GATHER: "columns", SCATTER: "features", ALL_REDUCE: "features"}
#: Dtypes that take as long as another one, which was measured.
_TIMED_AS = {"float16": "bfloat16"}
_LAYER_SIZES = ("columns", "features")


class LinearSizes(NamedTuple):
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
    """The measured entries: op, gpu, architecture, ranks, columns, features, dtype, choices [[rows, name], …], run."""
    file = resources.files(__package__) / "crossovers.json"
    return tuple(json.loads(file.read_text())["entries"])


def nearest_entries(
    entries: Sequence[dict], op: str, device: Device, dtype: str, ranks: int
) -> list[dict]:
    """The entries that speak for such a device and number of ranks (the module says by which rule)."""
    found = [
        entry
        for entry in entries
        if entry["op"] == op
        and entry["architecture"] == device.architecture
        and entry["dtype"] in (dtype, _TIMED_AS.get(dtype))
    ]

    def distance(entry: dict) -> tuple:
        count = entry["ranks"]
        return _octaves(count, ranks), -count, entry["gpu"] != device.gpu, entry["gpu"]

    nearest = min(map(distance, found), default=None)
    return [entry for entry in found if distance(entry) == nearest]


def lookup(
    entries: Sequence[dict], op: str, device: Device, dtype: str, sizes: LinearSizes
) -> str | None:
    """What was the fastest at the nearest measured sizes; None: nothing was measured on such devices."""
    best, found = math.inf, None
    for entry in nearest_entries(entries, op, device, dtype, sizes.ranks):
        layer = sum(_octaves(entry[name], getattr(sizes, name)) ** 2 for name in _LAYER_SIZES)
        for rows, name in entry["choices"]:
            distance = layer + _octaves(rows, sizes.rows) ** 2
            if distance < best:
                best, found = distance, name
    return found


def _octaves(measured: int, given: int) -> float:
    return abs(math.log2(max(measured, 1) / max(given, 1)))


@functools.lru_cache(maxsize=4096)
def _cached_lookup(
    op: str, device: Device, dtype: str, sizes: LinearSizes, tuned: bool
) -> str | None:
    entries = with_tuned_entries(table(), device) if tuned else table()
    return lookup(entries, op, device, dtype, sizes)


def with_tuned_entries(shipped: Sequence[dict], device: Device) -> tuple[dict, ...]:
    """This machine's entries of the tuned table, and of those that are shipped what they do not replace: those of the same
    op, GPU, ranks and dtype.
    """

    def key(entry: dict) -> tuple:
        return entry["op"], entry["gpu"], entry["ranks"], entry["dtype"]

    own = [entry | device._asdict() for entry in tables.entries(SECTION, device)]
    replaced = {key(entry) for entry in own}
    return (*own, *(entry for entry in shipped if key(entry) not in replaced))


def choose(
    op: str,
    group_name: str,
    x: Tensor,
    sizes: LinearSizes,
    otherwise: str,
    equal_sizes: bool = False,
) -> str:
    """The strategy or method for a call with x, the same on all ranks; for LAYER the form of a model's layers.

    equal_sizes: whether all ranks ask for the same sizes. Otherwise they compare what they found, in a small collective the
    first time, and take `otherwise` where they differ. Nothing is chosen in traces.
    """
    if is_traced(x):
        return otherwise
    dtype = str(compute_dtype(x)).removeprefix("torch.")
    tuned = bool(entries_on_all_ranks(SECTION, group_name, x))
    found = _cached_lookup(op, Device.of(x.device), dtype, sizes, tuned)
    if (
        found is None
    ):  # on all ranks: it depends on the op, the architecture, the dtype and the tables alone
        return otherwise
    if not equal_sizes:
        about = op, dtype, sizes._replace(**{_OF_RANK[op]: 0})
        found = consensus(group_name, x, about, sizes, found)
    if found is None or found == otherwise:
        return otherwise
    return found if op == LAYER or available(group_name, x.device) else otherwise


def may_choose(
    op: str, device: torch.device, dtype: torch.dtype, sizes: LinearSizes | None
) -> bool:
    """Whether `choose` could choose anything but the group's own collective, for a graph that is compiled.

    By what is the same on all ranks, whose graphs must have the same collectives: a rank's own sizes may be any.
    sizes: None where they are dynamic.
    """
    if device.type != "cuda":
        return False
    about = op, Device.of(device), str(dtype).removeprefix("torch.")
    if sizes is None:
        counts = {entry["ranks"] for entry in table()}
        return any(
            _offers(entry, None) for n in counts for entry in nearest_entries(table(), *about, n)
        )
    return any(
        _offers(entry, sizes.rows) for entry in nearest_entries(table(), *about, sizes.ranks)
    )


def _offers(entry: dict, rows: int | None) -> bool:
    """Whether a measured entry has anything faster than the group's own collective for so many rows (None: for any)."""
    choices = entry["choices"]
    if rows is not None:
        choices = [min(choices, key=lambda choice: _octaves(choice[0], rows))]
    return any(name != STOCK[entry["op"]] for _, name in choices)
