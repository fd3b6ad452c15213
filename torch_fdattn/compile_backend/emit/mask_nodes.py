"""From expressions back to nodes: lengths, starts, slopes, and what of a mask stays a tensor.

They are computed where the mask was: what it was made from (a static cache's counter) may be written to before
attention runs. Whoever asks for nodes asks `is_expressible` first.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from torch_fdattn.compile_backend.graph.adder import Adder
from torch_fdattn.compile_backend.graph.nodes import value
from torch_fdattn.compile_backend.masks.expressible import AXES, view_of
from torch_fdattn.compile_backend.masks.expressions import (
    Axis,
    Both,
    Condition,
    Either,
    Holds,
    IsZero,
    Lookup,
    Magnitude,
    NonNegative,
    Not,
    Poly,
    Quotient,
    sort_key,
)
from torch_fdattn.compile_backend.masks.structure import MaskSizes
from torch_fdattn.ops.positions import FAR


class MaskNodes:
    """Nodes for expressions, with the given axes as their dimensions (of one, where they do not depend on it)."""

    def __init__(self, add: Adder, sizes: MaskSizes, axes: tuple[str, ...] = AXES) -> None:
        self.add, self.axes = add, axes
        self.size = dict(zip(AXES, sizes, strict=True))
        self.device = value(add.like).device

    def condition(self, x: Condition) -> Node:
        if isinstance(x, (Both, Either)):
            join = operator.and_ if isinstance(x, Both) else operator.or_
            first, *others = sorted(x.parts, key=sort_key)
            found = self.condition(first)
            for part in others:
                found = self.add(join, found, self.condition(part))
            return found
        if isinstance(x, Not) and isinstance(x.of, IsZero):
            return self.add(operator.ne, self.number(x.of.of), 0)
        if isinstance(x, Not):
            return self.add(torch.logical_not, self.condition(x.of))
        if isinstance(x, Holds):
            return self.lookup(x.of)
        compare = {NonNegative: operator.ge, IsZero: operator.eq}[type(x)]
        return self.add(compare, self.number(x.of), 0)

    def number(self, x: Poly) -> Node:
        found, constant = None, 0
        for monomial, factor in sorted(x.terms, key=sort_key):
            term = None
            for atom, power in sorted(monomial, key=sort_key):
                for _ in range(power):
                    node = self.atom(atom)
                    term = node if term is None else self.add(operator.mul, term, node)
            if term is None:
                constant = factor
                continue
            if factor != 1:
                term = self.add(operator.mul, term, factor)
            found = term if found is None else self.add(operator.add, found, term)
        if found is None:
            shape = (1,) * len(self.axes)
            return self.add(torch.full, shape, constant, device=self.device)
        return self.add(operator.add, found, constant) if constant else found

    def atom(self, x: object) -> Node:
        if isinstance(x, Lookup):
            return self.lookup(x)
        if isinstance(x, Axis):
            found = self.add(torch.arange, self.size[x.name], device=self.device)
            return self._spread(found, [x.name])
        if isinstance(x, Quotient):
            return self.add(operator.floordiv, self.number(x.of), x.by)
        if isinstance(x, Magnitude):
            return self.add(torch.abs, self.number(x.of))
        return self.add(
            torch.where, self.condition(x.condition), self.number(x.yes), self.number(x.no)
        )

    def lookup(self, x: Lookup) -> Node:
        indices, names = view_of(x, self.size)
        node = x.node
        if value(node).device != self.device:
            node = self.add("to", node, self.device)
        if any(item != slice(None) for item in indices):
            node = self.add(operator.getitem, node, indices)
        return self._spread(node, names)

    def _spread(self, node: Node, names: list[str]) -> Node:
        """With dimensions in the order of the axes, and of one for those it lacks."""
        order = sorted(range(len(names)), key=lambda i: self.axes.index(names[i]))
        if order != sorted(order):
            node = self.add("permute", node, *order)
        indices = tuple(slice(None) if axis in names else None for axis in self.axes)
        return self.add(operator.getitem, node, indices) if None in indices else node

    def positions(self, x: Poly) -> Node:
        """An int32 number of each sequence, or one for all: a copy, that later writes do not reach."""
        found = self.add("clamp", self.number(x), -FAR, FAR)
        return self.add("to", found, torch.int32)
