"""Rules for tensors from nothing and for arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from torch_fdattn.compile_backend.graph.nodes import arguments, statically_true, value
from torch_fdattn.compile_backend.masks.entries import (
    Entry,
    Index,
    Rule,
    Unknown,
    is_integral,
    plain_operands,
    scalar,
)
from torch_fdattn.compile_backend.masks.expressions import (
    Lookup,
    Magnitude,
    Poly,
    Quotient,
    Select,
    both,
    is_zero,
    negation,
    number,
)

if TYPE_CHECKING:
    from torch_fdattn.compile_backend.masks.reader import Reader


def _arange(reader: Reader, node: Node, index: Index) -> Entry:
    given = [scalar(x) for x in node.args]
    start, step = node.kwargs.get("start", 0), node.kwargs.get("step", 1)
    if len(given) > 1:
        start = given[0]
    if len(given) > 2:
        step = given[2]
    return number(scalar(start)) + number(scalar(step)) * index[0]


def _filled_with(position: int | None, fill: float | None = None) -> Callable:
    def rule(reader: Reader, node: Node, index: Index) -> Entry:
        x = fill
        if position is not None:
            x = node.args[position] if len(node.args) > position else node.kwargs["fill_value"]
        found = reader.numeric(x, ())
        return negation(is_zero(found)) if value(node).dtype == torch.bool else found

    return rule


def _tensor(reader: Reader, node: Node, index: Index) -> Entry:
    if index or isinstance(node.args[0], (list, tuple)):
        raise Unknown
    found = reader.numeric(node.args[0], ())
    return negation(is_zero(found)) if value(node).dtype == torch.bool else found


def _eye(reader: Reader, node: Node, index: Index) -> Entry:
    return is_zero(index[0] - index[1])


def _sum(sign: int) -> Callable:
    def rule(reader: Reader, node: Node, index: Index) -> Entry:
        a, b = (reader.numeric(x, index) for x in plain_operands(node, 2))
        return a + b * number(sign)

    return rule


def _mul(reader: Reader, node: Node, index: Index) -> Entry:
    given = plain_operands(node, 2)
    if value(node).dtype == torch.bool:
        return both(*(reader.condition(x, index) for x in given))
    a, b = (reader.numeric(x, index) for x in given)
    for x, y in ((a, b), (b, a)):
        if isinstance(x.constant, float) and math.isinf(x.constant) and y.constant is None:
            raise Unknown  # 0 · inf is NaN
    return a * b


def _div(reader: Reader, node: Node, index: Index) -> Entry:
    if node.kwargs.get("rounding_mode") == "floor":
        return _quotient(reader, node.args, index)
    a, b = (reader.numeric(x, index) for x in plain_operands(node, 2))
    if not isinstance(b.constant, (int, float)) or not b.constant or math.isinf(b.constant):
        raise Unknown
    return a * number(1 / b.constant)


def _floordiv(reader: Reader, node: Node, index: Index) -> Entry:
    return _quotient(reader, plain_operands(node, 2), index)


def _quotient(reader: Reader, given: tuple, index: Index) -> Entry:
    a, b = given
    by = scalar(b)
    if not is_integral(a) or not isinstance(by, int) or by < 1:
        raise Unknown
    of = reader.numeric(a, index)
    if isinstance(of.constant, int):
        return number(of.constant // by)
    return of if by == 1 else Poly.atom(Quotient(of, by))


def _neg(reader: Reader, node: Node, index: Index) -> Entry:
    return reader.numeric(node.args[0], index) * number(-1)


def _abs(reader: Reader, node: Node, index: Index) -> Entry:
    found = reader.numeric(node.args[0], index)
    if isinstance(found.constant, (int, float)):
        return number(abs(found.constant))
    if not is_integral(node.args[0]) and any(isinstance(x, (Lookup, Select)) for x in found.atoms):
        raise Unknown
    return Poly.atom(Magnitude(found))


def _diff(reader: Reader, node: Node, index: Index) -> Entry:
    """x[i] - x[i - 1] along the last dimension, where it is the same for all i: that of positions is 1."""
    source, n, dim, prepend, append = arguments(
        node, input=None, n=1, dim=-1, prepend=None, append=None
    )
    if n != 1 or dim not in (-1, len(index) - 1) or append is not None or prepend is None:
        raise Unknown
    if not statically_true(value(prepend).shape[-1] == 1):
        raise Unknown
    *others, last = index
    here, before = (reader.numeric(source, (*others, i)) for i in (last, last - number(1)))
    first = reader.numeric(source, (*others, number(0))) - reader.numeric(prepend, index)
    if here - before != first:
        raise Unknown
    return first


def _cumsum(reader: Reader, node: Node, index: Index) -> Entry:
    """A sum of nothing but zeros."""
    source = node.args[0]
    if reader.numeric(source, index) != number(0):
        raise Unknown
    return number(0)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("ones", "new_ones", "ones_like"), _filled_with(None, 1)),
    **dict.fromkeys(("zeros", "new_zeros", "zeros_like"), _filled_with(None, 0)),
    **dict.fromkeys(("full", "full_like"), _filled_with(1)),
    "new_full": _filled_with(2), "arange": _arange, "tensor": _tensor, "eye": _eye, "add": _sum(1), "sub": _sum(-1),
    "mul": _mul, "div": _div, "floordiv": _floordiv, "neg": _neg, "abs": _abs, "diff": _diff, "cumsum": _cumsum,
}  # fmt: skip
