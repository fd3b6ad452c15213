"""Flash decoding in six steps, each a short file of its own, and a command that runs them in a real model.

Every step has one function, `attend(q, k, v, scale=None) -> out`: causal attention of the last T of N
tokens, q and out (B, H, T, D), k and v (B, H_kv, N, D) with any strides over a unit last one. The files
import torch and triton alone, so that each can be read, and taken away, by itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

#: The rungs from the bottom up, and what each is in a line.
RUNGS = {
    "reference": "plain PyTorch: the whole score matrix in memory",
    "minimal": "tiles and the online softmax, every tile masked",
    "v1": "the head dim shared out over programs",
    "minimal-v2": "only the tiles up to the diagonal, only border tiles masked, exp2",
    "v2": "software-pipelined: the next tiles are loaded while these are computed",
    "fdm": "flash-decode: the keys shared out over programs, the query heads of a group in one tile",
}


def attend_of(rung: str) -> Callable:
    """The `attend` of a rung; set TRITON_INTERPRET before the first call to interpret its kernels."""
    return importlib.import_module(f".{rung.replace('-', '_')}", __package__).attend
