"""Chunks of sequences as packed sequences: `varlen_attention` on the tokens of a batch, one behind the other."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from torch_fdattn.compile_backend.adder import Adder
from torch_fdattn.compile_backend.nodes import value


def packed(add: Adder, x: Node) -> Node:
    """(B, H, S, D) as (B·S, H, D): a view of what a projection made, else a copy."""
    return add.call("flatten", add.call("transpose", x, 1, 2), 0, 1)


def unpacked(add: Adder, out: Node, q: Node) -> Node:
    """(B·S, H, DV) as (B, H, S, DV), by the sizes of q (B, H, S, D)."""
    sizes = _size(add, q, 0), _size(add, q, 2)
    return add.call("transpose", add.call("unflatten", out, 0, sizes), 1, 2)


def documents(add: Adder, q: Node, chunk: int) -> Node:
    """int32 cu_seqlens: where each chunk of each sequence begins, and where the last one ends."""
    batch, length = _size(add, q, 0), _size(add, q, 2)
    like = {"dtype": torch.int32, "device": value(q).device}
    begins = add.call(operator.mul, add.call(torch.arange, batch, **like), length)
    chunks = add.call(torch.arange, 0, length, chunk, **like)
    begins = add.call(operator.add, add.call("unsqueeze", begins, 1), chunks)
    end = _product(add, batch, length)
    return add.call(torch.cat, [add.call("flatten", begins), add.call(torch.full, (1,), end, **like)])


def _size(add: Adder, x: Node, dim: int) -> int | Node:
    size = value(x).shape[dim]
    return size if isinstance(size, int) else add.call("size", x, dim)


def _product(add: Adder, a: int | Node, b: int | Node) -> int | Node:
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    return add.call(operator.mul, a, b)
