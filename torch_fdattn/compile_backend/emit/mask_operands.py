"""From expressions back to nodes: lengths, starts, slopes, and what of a mask stays a tensor.

They are computed where the mask was: what it was made from (a static cache's counter) may be written to before
attention runs. Whoever asks for nodes asks `is_expressible` first.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from torch_fdattn.compile_backend.graph.adder import Adder
from torch_fdattn.compile_backend.graph.nodes import statically_true, value
from torch_fdattn.compile_backend.masks.expressions import (
    AtLeastZero,
    Axis,
    Both,
    Condition,
    Either,
    Holds,
    IsZero,
    Lookup,
    Magnitude,
    Not,
    Poly,
    Quotient,
    Select,
)
from torch_fdattn.compile_backend.masks.structure import Sizes
from torch_fdattn.ops.positions import FAR

AXES = ("b", "h", "q", "k")


def is_expressible(expression: Poly | Condition, sizes: Sizes) -> bool:
    """Whether nodes can be made of it: no symbolic numbers, and lookups that are views."""
    return _expressible(expression, dict(zip(AXES, sizes, strict=True)))


def _expressible(x: object, size: dict) -> bool:
    if isinstance(x, Poly):
        return all(
            isinstance(c, (int, float)) and all(_expressible(atom, size) for atom, _ in m)
            for m, c in x.terms
        )
    if isinstance(x, (Both, Either)):
        return all(_expressible(part, size) for part in x.parts)
    if isinstance(x, Axis):
        return isinstance(size[x.name], int)
    if isinstance(x, Lookup):
        return _view(x, size) is not None
    if isinstance(x, Select):
        return all(_expressible(part, size) for part in (x.condition, x.yes, x.no))
    return _expressible(x.of, size)


def _view(lookup: Lookup, size: dict) -> tuple[tuple, list[str]] | None:
    """(how the tensor is to be indexed, the axes it then has); None where it is not so simple."""
    items, names = [], []
    for length, index in zip(value(lookup.node).shape, lookup.index, strict=True):
        if isinstance(index.constant, int):
            items.append(index.constant)
            continue
        axes = [atom for atom in index.atoms if isinstance(atom, Axis)]
        if len(axes) != 1 or len(index.atoms) != 1 or index.coefficient(axes[0]) != 1:
            return None
        (axis,) = axes
        start, wanted = index.without(axis).constant, size[axis.name]
        if start == 0 and statically_true(length == wanted):
            items.append(slice(None))
        elif isinstance(start, int) and isinstance(wanted, int) and start >= 0:
            items.append(slice(start, start + wanted))
        else:
            return None
        names.append(axis.name)
    return (tuple(items), names) if len({*names}) == len(names) else None


class Operands:
    """Nodes for expressions, with the given axes as their dimensions (of one, where they do not depend on it)."""

    def __init__(self, add: Adder, sizes: Sizes, axes: tuple[str, ...] = AXES) -> None:
        self.add, self.axes = add, axes
        self.size = dict(zip(AXES, sizes, strict=True))
        self.device = value(add.like).device

    def condition(self, x: Condition) -> Node:
        if isinstance(x, (Both, Either)):
            join = operator.and_ if isinstance(x, Both) else operator.or_
            first, *others = sorted(x.parts, key=repr)
            found = self.condition(first)
            for part in others:
                found = self.add.call(join, found, self.condition(part))
            return found
        if isinstance(x, Not) and isinstance(x.of, IsZero):
            return self.add.call(operator.ne, self.number(x.of.of), 0)
        if isinstance(x, Not):
            return self.add.call(torch.logical_not, self.condition(x.of))
        if isinstance(x, Holds):
            return self.lookup(x.of)
        compare = {AtLeastZero: operator.ge, IsZero: operator.eq}[type(x)]
        return self.add.call(compare, self.number(x.of), 0)

    def number(self, x: Poly) -> Node:
        found, constant = None, 0
        for monomial, factor in sorted(x.terms, key=repr):
            term = None
            for atom, power in sorted(monomial, key=repr):
                for _ in range(power):
                    node = self.atom(atom)
                    term = node if term is None else self.add.call(operator.mul, term, node)
            if term is None:
                constant = factor
                continue
            if factor != 1:
                term = self.add.call(operator.mul, term, factor)
            found = term if found is None else self.add.call(operator.add, found, term)
        if found is None:
            shape = (1,) * len(self.axes)
            return self.add.call(torch.full, shape, constant, device=self.device)
        return self.add.call(operator.add, found, constant) if constant else found

    def atom(self, x: object) -> Node:
        if isinstance(x, Lookup):
            return self.lookup(x)
        if isinstance(x, Axis):
            found = self.add.call(torch.arange, self.size[x.name], device=self.device)
            return self._spread(found, [x.name])
        if isinstance(x, Quotient):
            return self.add.call(operator.floordiv, self.number(x.of), x.by)
        if isinstance(x, Magnitude):
            return self.add.call(torch.abs, self.number(x.of))
        return self.add.call(
            torch.where, self.condition(x.condition), self.number(x.yes), self.number(x.no)
        )

    def lookup(self, x: Lookup) -> Node:
        items, names = _view(x, self.size)
        node = x.node
        if value(node).device != self.device:
            node = self.add.call("to", node, self.device)
        if any(item != slice(None) for item in items):
            node = self.add.call(operator.getitem, node, items)
        return self._spread(node, names)

    def _spread(self, node: Node, names: list[str]) -> Node:
        """With dimensions in the order of the axes, and of one for those it lacks."""
        order = sorted(range(len(names)), key=lambda i: self.axes.index(names[i]))
        if order != sorted(order):
            node = self.add.call("permute", node, *order)
        items = tuple(slice(None) if axis in names else None for axis in self.axes)
        return self.add.call(operator.getitem, node, items) if None in items else node

    def positions(self, x: Poly) -> Node:
        """An int32 number of each sequence, or one for all: a copy, that later writes do not reach."""
        found = self.add.call("clamp", self.number(x), -FAR, FAR)
        return self.add.call("to", found, torch.int32)
