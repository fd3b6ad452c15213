"""Chunks of sequences as packed sequences: `varlen_attention` on the tokens of a batch, one behind the other."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch.fx import Node

from torch_fdattn.compile_backend.graph.adder import Adder
from torch_fdattn.compile_backend.graph.nodes import value


def packed(add: Adder, x: Node) -> Node:
    """(B, H, S, D) as (B·S, H, D): a view of what a projection made, else a copy."""
    return add("flatten", add("transpose", x, 1, 2), 0, 1)


def unpacked(add: Adder, out: Node, q: Node) -> Node:
    """(B·S, H, DV) as (B, H, S, DV), by the sizes of q (B, H, S, D)."""
    sizes = add.size(q, 0), add.size(q, 2)
    return add("transpose", add("unflatten", out, 0, sizes), 1, 2)


def chunk_starts(add: Adder, q: Node, chunk: int) -> Node:
    """int32 cu_seqlens: where each chunk of each sequence begins, and where the last one ends.

    Without a broadcast, which would ask whether a symbolic number of chunks is one.
    """

    def of(function: Callable, a: int | Node, b: int | Node) -> int | Node:
        numbers = isinstance(a, int) and isinstance(b, int)
        return function(a, b) if numbers else add(function, a, b)

    batch, length = add.size(q, 0), add.size(q, 2)
    chunks = of(operator.floordiv, of(operator.add, length, chunk - 1), chunk)
    count = of(operator.add, of(operator.mul, batch, chunks), 1)
    i = add(torch.arange, count, dtype=torch.int32, device=value(q).device)
    sequence = add(operator.mul, add(operator.floordiv, i, chunks), length)
    within = add(operator.mul, add(operator.mod, i, chunks), chunk)
    return add(operator.add, sequence, within)
