"""Rules for views and casts: the same entries under another index."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._functorch import predispatch as vmap
from torch.fx import Node

from torch_fdattn.compile_backend.graph.dims import permutation
from torch_fdattn.compile_backend.graph.nodes import (
    arguments,
    equal_sizes,
    is_tensor,
    statically_true,
    value,
)
from torch_fdattn.compile_backend.masks.entries import (
    INTEGERS,
    Entry,
    Index,
    Rule,
    Unknown,
    axis,
    nonzero,
    plain_operands,
    scalar,
)
from torch_fdattn.compile_backend.masks.expressions import Poly, number

if TYPE_CHECKING:
    from torch_fdattn.compile_backend.masks.reader import Reader


def _cast(reader: Reader, node: Node, index: Index) -> Entry:
    """Copies and casts."""
    source = node.args[0]
    found, dtype = reader.entry(source, index), value(node).dtype
    if dtype == torch.bool:
        return nonzero(found, source) if isinstance(found, Poly) else found
    if value(source).is_floating_point() and not dtype.is_floating_point:
        raise Unknown
    return found


def _expand(reader: Reader, node: Node, index: Index) -> Entry:
    return reader.operand(node.args[0], index)


def _repeat(reader: Reader, node: Node, index: Index) -> Entry:
    """Of dimensions of one, as expand has it."""
    source, *repeats = node.args
    if len(repeats) == 1 and isinstance(repeats[0], (tuple, list)):
        repeats = list(repeats[0])
    shape = value(source).shape
    last = repeats[len(repeats) - len(shape) :]
    if node.kwargs or not all(
        statically_true(n == 1) or times == 1 for n, times in zip(shape, last, strict=True)
    ):
        raise Unknown
    return reader.operand(source, index)


def _unsqueeze(reader: Reader, node: Node, index: Index) -> Entry:
    source, dim = arguments(node, input=None, dim=None)
    dim %= len(index)
    return reader.entry(source, index[:dim] + index[dim + 1 :])


def _reshape(reader: Reader, node: Node, index: Index) -> Entry:
    """Where only dimensions of one come or go, or batch and heads are merged."""
    source = node.args[0]
    if value(source).dtype != value(node).dtype:
        raise Unknown  # a view of the bits
    old, new = value(source).shape, value(node).shape
    if len(old) == len(new) + 1 and equal_sizes(old[2:], new[1:]):
        batch, head = axis("b"), axis("h")
        if index[0] == batch * number(scalar(old[1])) + head:
            return reader.entry(source, (batch, head, *index[1:]))
    kept = [(n, i) for n, i in zip(new, index, strict=True) if not statically_true(n == 1)]
    dims = [d for d, n in enumerate(old) if not statically_true(n == 1)]
    if len(dims) != len(kept) or not all(
        statically_true(old[d] == n) for d, (n, _) in zip(dims, kept, strict=True)
    ):
        raise Unknown
    found = dict(zip(dims, (i for _, i in kept), strict=True))
    return reader.entry(source, tuple(found.get(d, number(0)) for d in range(len(old))))


def _permute(reader: Reader, node: Node, index: Index) -> Entry:
    order = permutation(node)
    if order is None:
        raise Unknown
    moved = dict(zip(order, index, strict=True))
    return reader.entry(node.args[0], tuple(moved[dim] for dim in range(len(index))))


def _getitem(reader: Reader, node: Node, index: Index) -> Entry:
    source, indices = node.args
    if not is_tensor(source):
        raise Unknown
    indices = list(indices) if isinstance(indices, tuple) else [indices]
    shape = value(source).shape
    taken = sum(x is not None and x is not Ellipsis for x in indices)
    dots = [i for i, x in enumerate(indices) if x is Ellipsis]
    at = dots[0] if dots else len(indices)
    indices[at : at + 1] = [slice(None)] * (len(shape) - taken)
    tensors = [i for i, x in enumerate(indices) if is_tensor(x)]
    if tensors:
        return _gathered(reader, source, indices, tensors, index)
    remaining, found = iter(index), []
    for item in indices:
        if item is None:
            next(remaining)
            continue
        size = shape[len(found)]
        if isinstance(item, slice):
            found.append(_sliced(item, size, next(remaining)))
        else:
            found.append(number(_from_front(item, size)))
    return reader.entry(source, tuple(found))


def _index(reader: Reader, node: Node, index: Index) -> Entry:
    """aten's, of a list of indices."""
    source, indices = plain_operands(node, 2)
    return _gathered(reader, source, list(indices), list(range(len(indices))), index)


def _sliced(item: slice, size: object, index: Poly) -> Poly:
    step = 1 if item.step is None else item.step
    if not isinstance(step, int) or step < 1:
        raise Unknown
    start = 0 if item.start is None else _from_front(item.start, size)
    return index * number(step) + number(start)


def _from_front(item: object, size: object):
    if isinstance(item, bool):
        raise Unknown
    given = value(item) if isinstance(item, Node) else item
    if statically_true(given >= 0):
        if not statically_true(given <= size):
            raise Unknown
        return scalar(item)
    if statically_true(given < 0) and statically_true(given + size >= 0):
        return scalar(item) + scalar(size)
    raise Unknown


def _gathered(
    reader: Reader, source: Node, indices: list, tensors: list[int], index: Index
) -> Entry:
    """x[batch_indices, key_indices]: an index in each dimension of the source."""
    if len(tensors) != len(indices) or any(value(x).dtype not in INTEGERS for x in indices):
        raise Unknown
    found = []
    for item in indices:
        at = reader.numeric(item, index)
        # A negative index counts from the end.
        if not at.is_made_of_indices or not all(c >= 0 for _, c in at.terms):
            raise Unknown
        found.append(at)
    return reader.entry(source, tuple(found))


def _remove_batch_dim(reader: Reader, node: Node, index: Index) -> Entry:
    """The result of vmap: what each of its calls gave, stacked."""
    source, level, _size, dim = node.args
    outside = dict(reader.levels)
    reader.levels[level] = index[dim]
    try:
        return reader.entry(source, index[:dim] + index[dim + 1 :])
    finally:
        reader.levels = outside


def _add_batch_dim(reader: Reader, node: Node, index: Index) -> Entry:
    """The argument of one call: the tensor at that call's index."""
    source, dim, level = node.args
    return reader.entry(source, (*index[:dim], reader.levels[level], *index[dim:]))


VMAP_RULES: dict[object, Rule] = {
    vmap._add_batch_dim: _add_batch_dim,
    vmap._remove_batch_dim: _remove_batch_dim,
}
RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "bool",
         "contiguous", "clone", "detach"), _cast),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    **dict.fromkeys(("reshape", "view", "flatten", "unflatten", "squeeze"), _reshape),
    **dict.fromkeys(("permute", "transpose", "mT", "T"), _permute),
    "unsqueeze": _unsqueeze, "repeat": _repeat, "getitem": _getitem, "index": _index,
}  # fmt: skip
