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
    return add.call("flatten", add.call("transpose", x, 1, 2), 0, 1)


def unpacked(add: Adder, out: Node, q: Node) -> Node:
    """(B·S, H, DV) as (B, H, S, DV), by the sizes of q (B, H, S, D)."""
    sizes = _size(add, q, 0), _size(add, q, 2)
    return add.call("transpose", add.call("unflatten", out, 0, sizes), 1, 2)


def documents(add: Adder, q: Node, chunk: int) -> Node:
    """int32 cu_seqlens: where each chunk of each sequence begins, and where the last one ends.

    Without a broadcast, which would ask whether a symbolic number of chunks is one.
    """
    batch, length = _size(add, q, 0), _size(add, q, 2)
    chunks = _of(add, operator.floordiv, _of(add, operator.add, length, chunk - 1), chunk)
    count = _of(add, operator.add, _of(add, operator.mul, batch, chunks), 1)
    i = add.call(torch.arange, count, dtype=torch.int32, device=value(q).device)
    sequence = add.call(operator.mul, add.call(operator.floordiv, i, chunks), length)
    return add.call(
        operator.add, sequence, add.call(operator.mul, add.call(operator.mod, i, chunks), chunk)
    )


def _size(add: Adder, x: Node, dim: int) -> int | Node:
    size = value(x).shape[dim]
    return size if isinstance(size, int) else add.call("size", x, dim)


def _of(add: Adder, function: Callable, a: int | Node, b: int | Node) -> int | Node:
    numbers = isinstance(a, int) and isinstance(b, int)
    return function(a, b) if numbers else add.call(function, a, b)
