"""Rules for comparisons, for logic, and for choices by a condition."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from torch_fdattn.compile_backend.graph.nodes import arguments, value, where_arguments
from torch_fdattn.compile_backend.masks.entries import (
    Entry,
    Index,
    Rule,
    Unknown,
    decided,
    in_dtype,
    is_integral,
    plain_operands,
    scalar,
)
from torch_fdattn.compile_backend.masks.expressions import (
    Condition,
    Poly,
    both,
    choice,
    either,
    is_zero,
    negation,
    non_negative,
    number,
)

if TYPE_CHECKING:
    from torch_fdattn.compile_backend.masks.reader import Reader


def _comparison(of_floats: Callable[[float], bool], of_integers: Callable) -> Callable:
    """a ? b by what a - b is."""

    def rule(reader: Reader, node: Node, index: Index) -> Entry:
        given = plain_operands(node, 2)
        a, b = (reader.numeric(x, index) for x in given)
        if all(is_integral(x) for x in given):
            return of_integers(a - b)
        # Torch compares in one dtype: float32's -1e30 is another number than Python's, and equals it.
        dtype = torch.result_type(*(value(x) if isinstance(x, Node) else x for x in given))
        a, b = (in_dtype(x, dtype) for x in (a, b))
        if any(isinstance(x.constant, float) and math.isinf(x.constant) for x in (a, b)):
            return _against_infinity(a, b, of_floats)
        return decided(a - b, of_floats)

    return rule


def _against_infinity(a: Poly, b: Poly, test: Callable[[float], bool]) -> Condition:
    """inf - inf is no number, but inf == inf."""
    limit, other, sign = (b.constant, a, 1) if b.constant is not None else (a.constant, b, -1)
    return decided(other, lambda x: test(0.0 if x == limit else sign * (x - limit)))


def _negative(poly: Poly) -> Condition:
    return non_negative(number(-1) - poly)


def _non_positive(poly: Poly) -> Condition:
    return non_negative(poly * number(-1))


def _logical(join: Callable) -> Callable:
    def rule(reader: Reader, node: Node, index: Index) -> Entry:
        given = plain_operands(node, 2)
        if value(node).dtype != torch.bool:
            raise Unknown
        return join(*(reader.condition(x, index) for x in given))

    return rule


def _not(reader: Reader, node: Node, index: Index) -> Entry:
    if value(node).dtype != torch.bool:
        raise Unknown
    return negation(reader.condition(node.args[0], index))


def _exclusive(a: Condition, b: Condition) -> Condition:
    return either(both(a, negation(b)), both(negation(a), b))


def _where(reader: Reader, node: Node, index: Index) -> Entry:
    condition, yes, no = where_arguments(node)
    return _chosen(reader, node, index, reader.condition(condition, index), yes, no)


def _masked_fill(reader: Reader, node: Node, index: Index) -> Entry:
    source, mask, fill = arguments(node, input=None, mask=None, value=None)
    return _chosen(reader, node, index, reader.condition(mask, index), fill, source)


def _chosen(reader, node: Node, index: Index, condition: Condition, yes, no) -> Entry:
    if value(node).dtype == torch.bool:
        yes, no = (reader.condition(x, index) for x in (yes, no))
        return either(both(condition, yes), both(negation(condition), no))
    yes, no = (in_dtype(reader.numeric(x, index), value(node).dtype) for x in (yes, no))
    return choice(condition, yes, no)


def _triangle(upper: bool) -> Callable:
    def rule(reader: Reader, node: Node, index: Index) -> Entry:
        source, diagonal = arguments(node, input=None, diagonal=0)
        offset = index[-2] - index[-1] + number(scalar(diagonal))
        inside = non_negative(offset * number(-1) if upper else offset)
        found = reader.entry(source, index)
        if isinstance(found, Poly):
            return choice(inside, found, number(0))
        return both(inside, found)

    return rule


RULES: dict[str, Rule] = {
    **dict.fromkeys(("bitwise_and", "logical_and"), _logical(both)),
    **dict.fromkeys(("bitwise_or", "logical_or"), _logical(either)),
    **dict.fromkeys(("bitwise_xor", "logical_xor"), _logical(_exclusive)),
    **dict.fromkeys(("bitwise_not", "logical_not"), _not),
    "where": _where, "masked_fill": _masked_fill, "tril": _triangle(False), "triu": _triangle(True),
    "lt": _comparison(lambda d: d < 0, _negative),
    "le": _comparison(lambda d: d <= 0, _non_positive),
    "gt": _comparison(lambda d: d > 0, lambda p: negation(_non_positive(p))),
    "ge": _comparison(lambda d: d >= 0, lambda p: negation(_negative(p))),
    "eq": _comparison(lambda d: d == 0, is_zero),
    "ne": _comparison(lambda d: d != 0, lambda p: negation(is_zero(p))),
}  # fmt: skip
