"""Strategy and method `auto`: by measured crossovers, and `collective` (method `nccl`) where nothing was measured.

`crossovers.json` has, for an op, a GPU, a number of ranks and a layer's local sizes (N, K), up to how many rows M which
strategy or method was the fastest, and the run that says so.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn.dist.decode.one_sided import available
from torch_fdattn.dist.groups import is_traced

GATHER, SCATTER, ALL_REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"


class Sizes(NamedTuple):
    """A call's: all rows M, the layer's columns N and features K on this rank, ranks."""

    rows: int
    columns: int
    features: int
    ranks: int


@functools.cache
def table() -> tuple[dict, ...]:
    """The measured entries: op, gpu, ranks, columns, features, dtype, choices [[rows, name], …] ascending in rows."""
    file = resources.files(__package__) / "crossovers.json"
    return tuple(json.loads(file.read_text())["entries"])


def lookup(entries: tuple[dict, ...], op: str, gpu: str, dtype: str, sizes: Sizes) -> str | None:
    """What was measured the fastest; None: nothing was measured."""
    wanted = dict(
        op=op, gpu=gpu, dtype=dtype, ranks=sizes.ranks, columns=sizes.columns, features=sizes.features
    )  # fmt: skip
    for entry in entries:
        if all(entry[name] == value for name, value in wanted.items()):
            return next((name for rows, name in entry["choices"] if sizes.rows <= rows), None)
    return None


def choose(op: str, group_name: str, x: Tensor, sizes: Sizes, otherwise: str) -> str:
    """The strategy or method for a call with x.

    Sizes are looked up as they are, so ranks with shards of one size choose alike; those of different sizes are not
    in the table. (The ops compare what was chosen, `groups.agree`.) Nothing is chosen in traces.
    """
    if x.device.type != "cuda" or is_traced(x) or not table():
        return otherwise
    gpu, dtype = torch.cuda.get_device_name(x.device), str(x.dtype).removeprefix("torch.")
    found = lookup(table(), op, gpu, dtype, sizes)
    return found if found and available(group_name, x.device) else otherwise
