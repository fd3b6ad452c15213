"""Entries of masks: what rules read, and what they make of dtypes and of numbers that the graph holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import sympy
import torch
from torch.fx import Node

from torch_fdattn.compile_backend.graph.nodes import is_tensor, statically_true, value
from torch_fdattn.compile_backend.masks.expressions import (
    FALSE,
    TRUE,
    Axis,
    Condition,
    Holds,
    Lookup,
    Poly,
    Quotient,
    Select,
    as_number,
    choice,
    is_zero,
    negation,
    number,
    select,
)

if TYPE_CHECKING:
    from torch_fdattn.compile_backend.masks.reader import Reader
    from torch_fdattn.compile_backend.masks.structure import MaskSizes

Entry = Poly | Condition
Index = tuple[Poly, ...]
Rule = Callable[["Reader", Node, Index], Entry]

INTEGERS = (torch.int32, torch.int64)
_NARROW = (torch.float16, torch.bfloat16)
_WIDE = (torch.float32, torch.float64)


class Unknown(Exception):
    """There is no rule for this: the entry is a lookup."""


def axis(name: str) -> Poly:
    return Poly.atom(Axis(name))


def index_of(
    dims: tuple[str, ...], sizes: MaskSizes, groups: tuple[int, int] | None = None
) -> Index:
    """The index of a score whose dims are these: "bh" holds batch and heads, "g" and "n" are of (groups, heads of one)."""
    found = {name: axis(name) for name in ("b", "h", "q", "k")}
    found["bh"] = found["b"] * sizes.poly("heads") + found["h"]
    if groups is not None:
        found["g"] = Poly.atom(Quotient(found["h"], groups[1]))
        found["n"] = found["h"] - found["g"] * number(groups[1])
    return tuple(found[name] for name in dims)


def scalar(x: object):
    """A number that a graph holds or computes from sizes, as a coefficient."""
    if isinstance(x, Node):
        x = value(x)
    if isinstance(x, torch.SymInt):
        return x.node.expr
    if isinstance(x, (int, float)):
        return x
    raise Unknown


def looked_up(node: Node, index: Index) -> Entry:
    found = Lookup(node, index)
    return Holds(found) if value(node).dtype == torch.bool else Poly.atom(found)


def broadcast_index(node: Node, index: Index) -> Index:
    shape = value(node).shape
    if len(shape) > len(index):
        raise Unknown
    last = index[len(index) - len(shape) :]
    return tuple(
        number(0) if statically_true(n == 1) else i for n, i in zip(shape, last, strict=True)
    )


def in_dtype(entry: Entry, dtype: torch.dtype) -> Entry:
    if dtype == torch.bool:
        if isinstance(entry, Poly):
            raise Unknown
        return entry
    entry = entry if isinstance(entry, Poly) else as_number(entry)
    if dtype in INTEGERS:
        if not all(isinstance(c, sympy.Expr) or float(c).is_integer() for _, c in entry.terms):
            raise Unknown  # torch.full((n,), 2.5, dtype=torch.int64) holds 2
        return entry
    if dtype not in (*_NARROW, *_WIDE):
        raise Unknown
    return _rounded(entry, dtype)


def _rounded(entry: Poly, dtype: torch.dtype) -> Poly:
    constant = entry.constant
    if isinstance(constant, (int, float)):
        constant = torch.tensor(float(constant), dtype=dtype).item()
        if math.isnan(constant):
            raise Unknown
        return number(constant)
    single = entry.single
    if single is not None and isinstance(single[0], Select) and single[2].constant is not None:
        atom, factor, rest = single
        branches = (branch * number(factor) + rest for branch in (atom.yes, atom.no))
        return choice(atom.condition, *(_rounded(branch, dtype) for branch in branches))
    # 1001 is 1000 in bfloat16. A position times a slope is a number like any other, which may be rounded.
    if dtype in _NARROW and not any(isinstance(atom, (Lookup, Select)) for atom in entry.atoms):
        raise Unknown
    return entry


def is_integral(x: object) -> bool:
    if is_tensor(x):
        return value(x).dtype in (*INTEGERS, torch.bool)
    found = scalar(x)
    return not isinstance(found, float) or found.is_integer()


def nonzero(entry: Poly, x: object) -> Condition:
    return negation(is_zero(entry)) if is_integral(x) else decided(entry, lambda c: c != 0)


def decided(entry: Poly, test: Callable[[float], bool]) -> Condition:
    """A test of floats, which are constants each or chosen among them."""
    constant = entry.constant
    if isinstance(constant, (int, float)):
        return TRUE if test(constant) else FALSE
    single = entry.single
    if single is None or not isinstance(single[0], Select):
        raise Unknown
    atom, factor, rest = single
    return select(atom, lambda branch: decided(branch * number(factor) + rest, test))


def plain_operands(node: Node, count: int) -> tuple:
    """The operands of a call with nothing but operands."""
    if len(node.args) != count or node.kwargs:
        raise Unknown
    return node.args
