"""From a mask's node to the expression of its entry: a graph read backwards, from an index to where it leads.

`Reader.entry(node, index)` asks what the tensor holds there. A view asks its source at another index, `arange`
answers with the index, arithmetic combines what its operands answer. What has no rule is a `Lookup`: some number
that only the call knows. So every answer is true; at worst it says nothing.

Arithmetic is that of real numbers, but that constants are rounded to the dtype they are in: min + min is -inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import sympy
import torch
from torch._functorch import predispatch as vmap
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from torch_fdattn.compile_backend.graph.nodes import (
    arguments,
    is_tensor,
    op_name,
    statically_true,
    value,
)
from torch_fdattn.compile_backend.masks.expressions import (
    FALSE,
    TRUE,
    Axis,
    Condition,
    Holds,
    Lookup,
    Magnitude,
    Poly,
    Quotient,
    Select,
    as_number,
    at_least_zero,
    both,
    choice,
    either,
    is_zero,
    negation,
    number,
    select,
)
from torch_fdattn.compile_backend.report import Unsupported

Entry = Poly | Condition
Index = tuple[Poly, ...]

_INTEGERS = (torch.int32, torch.int64)
_NARROW = (torch.float16, torch.bfloat16)
_WIDE = (torch.float32, torch.float64)
#: A mask takes some tens of steps; what takes more is a model.
MAX_STEPS = 1000


class _Unknown(Exception):
    """There is no rule for this: the entry is a lookup."""


class _TooLong(Exception):
    pass


def axis(name: str) -> Poly:
    return Poly.atom(Axis(name))


class Reader:
    """Reads one tensor; `visited` are the nodes that were looked into."""

    def __init__(self) -> None:
        self.visited: set[Node] = set()
        self._known: dict[tuple, Entry] = {}
        #: Indices into the batches of the vmaps that a node stands in, by level.
        self.levels: dict[int, Poly] = {}

    def read(self, node: Node, axes: tuple[str, ...]) -> Entry:
        """The entry of a mask that is broadcast to scores with these axes."""
        index = tuple(map(axis, axes))
        try:
            return self.operand(node, index)
        except _TooLong:
            self.visited.clear()
            return _looked_up(node, _broadcast(node, index))

    def operand(self, x: object, index: Index) -> Entry:
        """An argument's entry, where it is broadcast to a tensor with this index."""
        if isinstance(x, bool):
            return TRUE if x else FALSE
        if not is_tensor(x):
            return number(scalar(x))
        return self.entry(x, _broadcast(x, index))

    def entry(self, node: Node, index: Index) -> Entry:
        key = node, index, frozenset(self.levels.items())
        if key not in self._known:
            if len(self._known) >= MAX_STEPS:
                raise _TooLong
            before = set(self.visited)
            try:
                rule = _VMAP.get(node.target) or _RULES.get(op_name(node))
                if rule is None:
                    raise _Unknown
                found = _in_dtype(rule(self, node, index), value(node).dtype)
                self.visited.add(node)
            except (_Unknown, Unsupported, TypeError, ValueError, LookupError, OverflowError):
                self.visited = before
                if type(value(node)) is not FakeTensor:
                    raise _Unknown from None  # inside of vmap there are entries, but no tensors
                found = _looked_up(node, index)
            self._known[key] = found
        return self._known[key]

    def numeric(self, x: object, index: Index) -> Poly:
        found = self.operand(x, index)
        return found if isinstance(found, Poly) else as_number(found)

    def condition(self, x: object, index: Index) -> Condition:
        found = self.operand(x, index)
        return _nonzero(found, x) if isinstance(found, Poly) else found


def scalar(x: object):
    """A number that a graph holds or computes from sizes, as a coefficient."""
    if isinstance(x, Node):
        x = value(x)
    if isinstance(x, torch.SymInt):
        return x.node.expr
    if isinstance(x, (int, float)):
        return x
    raise _Unknown


def _looked_up(node: Node, index: Index) -> Entry:
    found = Lookup(node, index)
    return Holds(found) if value(node).dtype == torch.bool else Poly.atom(found)


def _broadcast(node: Node, index: Index) -> Index:
    shape = value(node).shape
    if len(shape) > len(index):
        raise _Unknown
    last = index[len(index) - len(shape) :]
    return tuple(
        number(0) if statically_true(n == 1) else i for n, i in zip(shape, last, strict=True)
    )


def _in_dtype(found: Entry, dtype: torch.dtype) -> Entry:
    if dtype == torch.bool:
        if isinstance(found, Poly):
            raise _Unknown
        return found
    found = found if isinstance(found, Poly) else as_number(found)
    if dtype in _INTEGERS:
        if not all(isinstance(c, sympy.Expr) or float(c).is_integer() for _, c in found.terms):
            raise _Unknown  # torch.full((n,), 2.5, dtype=torch.int64) holds 2
        return found
    if dtype not in (*_NARROW, *_WIDE):
        raise _Unknown
    return _rounded(found, dtype)


def _rounded(found: Poly, dtype: torch.dtype) -> Poly:
    constant = found.constant
    if isinstance(constant, (int, float)):
        constant = torch.tensor(float(constant), dtype=dtype).item()
        if math.isnan(constant):
            raise _Unknown
        return number(constant)
    single = found.single
    if single is not None and isinstance(single[0], Select) and single[2].constant is not None:
        atom, factor, rest = single
        branches = (branch * number(factor) + rest for branch in (atom.yes, atom.no))
        return choice(atom.condition, *(_rounded(branch, dtype) for branch in branches))
    # 1001 is 1000 in bfloat16. A position times a slope is a number like any other, which may be rounded.
    if dtype in _NARROW and not any(isinstance(atom, (Lookup, Select)) for atom in found.atoms):
        raise _Unknown
    return found


def _is_integral(x: object) -> bool:
    if is_tensor(x):
        return value(x).dtype in (*_INTEGERS, torch.bool)
    found = scalar(x)
    return not isinstance(found, float) or found.is_integer()


def _nonzero(found: Poly, x: object) -> Condition:
    return negation(is_zero(found)) if _is_integral(x) else _decided(found, lambda c: c != 0)


def _decided(found: Poly, test: Callable[[float], bool]) -> Condition:
    """A test of floats, which are constants each or chosen among them."""
    constant = found.constant
    if isinstance(constant, (int, float)):
        return TRUE if test(constant) else FALSE
    single = found.single
    if single is None or not isinstance(single[0], Select):
        raise _Unknown
    atom, factor, rest = single
    return select(atom, lambda branch: _decided(branch * number(factor) + rest, test))


# Views: the same entries under another index.


def _same(reader: Reader, node: Node, index: Index) -> Entry:
    """Copies and casts."""
    source = node.args[0]
    found, dtype = reader.entry(source, index), value(node).dtype
    if dtype == torch.bool:
        return _nonzero(found, source) if isinstance(found, Poly) else found
    if value(source).is_floating_point() and not dtype.is_floating_point:
        raise _Unknown
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
        raise _Unknown
    return reader.operand(source, index)


def _unsqueeze(reader: Reader, node: Node, index: Index) -> Entry:
    source, dim = arguments(node, input=None, dim=None)
    dim %= len(index)
    return reader.entry(source, index[:dim] + index[dim + 1 :])


def _reshape(reader: Reader, node: Node, index: Index) -> Entry:
    """Where only dimensions of one come or go."""
    source = node.args[0]
    if value(source).dtype != value(node).dtype:
        raise _Unknown  # a view of the bits
    old, new = value(source).shape, value(node).shape
    kept = [(n, i) for n, i in zip(new, index, strict=True) if not statically_true(n == 1)]
    dims = [d for d, n in enumerate(old) if not statically_true(n == 1)]
    if len(dims) != len(kept) or not all(
        statically_true(old[d] == n) for d, (n, _) in zip(dims, kept, strict=True)
    ):
        raise _Unknown
    found = dict(zip(dims, (i for _, i in kept), strict=True))
    return reader.entry(source, tuple(found.get(d, number(0)) for d in range(len(old))))


def _permute(reader: Reader, node: Node, index: Index) -> Entry:
    rank, name = len(index), op_name(node)
    order = list(range(rank))
    if name == "permute":
        given = node.kwargs.get("dims", node.args[1:])
        given = given[0] if given and isinstance(given[0], (tuple, list)) else given
        order = [dim % rank for dim in given]
    elif name == "T" and rank > 2:
        raise _Unknown
    else:
        a, b = (-2, -1) if name in ("mT", "T") else (*node.args[1:], *node.kwargs.values())
        order[a], order[b] = order[b], order[a]
    found = dict(zip(order, index, strict=True))
    return reader.entry(node.args[0], tuple(found[dim] for dim in range(rank)))


def _getitem(reader: Reader, node: Node, index: Index) -> Entry:
    source, items = node.args
    if not is_tensor(source):
        raise _Unknown
    items = list(items) if isinstance(items, tuple) else [items]
    shape = value(source).shape
    taken = sum(x is not None and x is not Ellipsis for x in items)
    dots = [i for i, x in enumerate(items) if x is Ellipsis]
    at = dots[0] if dots else len(items)
    items[at : at + 1] = [slice(None)] * (len(shape) - taken)
    tensors = [i for i, x in enumerate(items) if is_tensor(x)]
    if tensors:
        return _gathered(reader, source, items, tensors, index)
    remaining, found = iter(index), []
    for item in items:
        if item is None:
            next(remaining)
            continue
        size = shape[len(found)]
        if isinstance(item, slice):
            found.append(_sliced(item, size, next(remaining)))
        else:
            found.append(number(_from_front(item, size)))
    return reader.entry(source, tuple(found))


def _sliced(item: slice, size: object, index: Poly) -> Poly:
    step = 1 if item.step is None else item.step
    if not isinstance(step, int) or step < 1:
        raise _Unknown
    start = 0 if item.start is None else _from_front(item.start, size)
    return index * number(step) + number(start)


def _from_front(item: object, size: object):
    if isinstance(item, bool):
        raise _Unknown
    given = value(item) if isinstance(item, Node) else item
    if statically_true(given >= 0):
        if not statically_true(given <= size):
            raise _Unknown
        return scalar(item)
    if statically_true(given < 0) and statically_true(given + size >= 0):
        return scalar(item) + scalar(size)
    raise _Unknown


def _gathered(reader: Reader, source: Node, items: list, tensors: list[int], index: Index) -> Entry:
    """x[batch_indices, key_indices]: an index in each dimension of the source."""
    if len(tensors) != len(items) or any(value(x).dtype not in _INTEGERS for x in items):
        raise _Unknown
    found = []
    for item in items:
        at = reader.numeric(item, index)
        # A negative index counts from the end.
        if not at.is_made_of_indices or not all(c >= 0 for _, c in at.terms):
            raise _Unknown
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


# Tensors from nothing.


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
        raise _Unknown
    found = reader.numeric(node.args[0], ())
    return negation(is_zero(found)) if value(node).dtype == torch.bool else found


def _eye(reader: Reader, node: Node, index: Index) -> Entry:
    return is_zero(index[0] - index[1])


# Arithmetic.


def _plain(node: Node, count: int) -> tuple:
    """The operands of a call with nothing but operands."""
    if len(node.args) != count or node.kwargs:
        raise _Unknown
    return node.args


def _sum(sign: int) -> Callable:
    def rule(reader: Reader, node: Node, index: Index) -> Entry:
        a, b = (reader.numeric(x, index) for x in _plain(node, 2))
        return a + b * number(sign)

    return rule


def _mul(reader: Reader, node: Node, index: Index) -> Entry:
    given = _plain(node, 2)
    if value(node).dtype == torch.bool:
        return both(*(reader.condition(x, index) for x in given))
    a, b = (reader.numeric(x, index) for x in given)
    for x, y in ((a, b), (b, a)):
        if isinstance(x.constant, float) and math.isinf(x.constant) and y.constant is None:
            raise _Unknown  # 0 · inf is NaN
    return a * b


def _div(reader: Reader, node: Node, index: Index) -> Entry:
    if node.kwargs.get("rounding_mode") == "floor":
        return _quotient(reader, node.args, index)
    a, b = (reader.numeric(x, index) for x in _plain(node, 2))
    if not isinstance(b.constant, (int, float)) or not b.constant or math.isinf(b.constant):
        raise _Unknown
    return a * number(1 / b.constant)


def _floordiv(reader: Reader, node: Node, index: Index) -> Entry:
    return _quotient(reader, _plain(node, 2), index)


def _quotient(reader: Reader, given: tuple, index: Index) -> Entry:
    a, b = given
    by = scalar(b)
    if not _is_integral(a) or not isinstance(by, int) or by < 1:
        raise _Unknown
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
    if not _is_integral(node.args[0]) and any(isinstance(x, (Lookup, Select)) for x in found.atoms):
        raise _Unknown
    return Poly.atom(Magnitude(found))


def _diff(reader: Reader, node: Node, index: Index) -> Entry:
    """x[i] - x[i - 1] along the last dimension, where it is the same for all i: that of positions is 1."""
    source, n, dim, prepend, append = arguments(
        node, input=None, n=1, dim=-1, prepend=None, append=None
    )
    if n != 1 or dim not in (-1, len(index) - 1) or append is not None or prepend is None:
        raise _Unknown
    if not statically_true(value(prepend).shape[-1] == 1):
        raise _Unknown
    *others, last = index
    here, before = (reader.numeric(source, (*others, i)) for i in (last, last - number(1)))
    first = reader.numeric(source, (*others, number(0))) - reader.numeric(prepend, index)
    if here - before != first:
        raise _Unknown
    return first


def _cumsum(reader: Reader, node: Node, index: Index) -> Entry:
    """A sum of nothing but zeros."""
    source = node.args[0]
    if reader.numeric(source, index) != number(0):
        raise _Unknown
    return number(0)


# Conditions.


def _comparison(of_floats: Callable[[float], bool], of_integers: Callable) -> Callable:
    """a ? b by what a - b is."""

    def rule(reader: Reader, node: Node, index: Index) -> Entry:
        given = _plain(node, 2)
        a, b = (reader.numeric(x, index) for x in given)
        if all(_is_integral(x) for x in given):
            return of_integers(a - b)
        # Torch compares in one dtype: float32's -1e30 is another number than Python's, and equals it.
        dtype = torch.result_type(*(value(x) if isinstance(x, Node) else x for x in given))
        a, b = (_in_dtype(x, dtype) for x in (a, b))
        if any(isinstance(x.constant, float) and math.isinf(x.constant) for x in (a, b)):
            return _against_infinity(a, b, of_floats)
        return _decided(a - b, of_floats)

    return rule


def _against_infinity(a: Poly, b: Poly, test: Callable[[float], bool]) -> Condition:
    """inf - inf is no number, but inf == inf."""
    limit, other, sign = (b.constant, a, 1) if b.constant is not None else (a.constant, b, -1)
    return _decided(other, lambda x: test(0.0 if x == limit else sign * (x - limit)))


def _less(poly: Poly) -> Condition:
    return at_least_zero(number(-1) - poly)


def _at_most(poly: Poly) -> Condition:
    return at_least_zero(poly * number(-1))


def _logical(join: Callable) -> Callable:
    def rule(reader: Reader, node: Node, index: Index) -> Entry:
        given = _plain(node, 2)
        if value(node).dtype != torch.bool:
            raise _Unknown
        return join(*(reader.condition(x, index) for x in given))

    return rule


def _not(reader: Reader, node: Node, index: Index) -> Entry:
    if value(node).dtype != torch.bool:
        raise _Unknown
    return negation(reader.condition(node.args[0], index))


def _exclusive(a: Condition, b: Condition) -> Condition:
    return either(both(a, negation(b)), both(negation(a), b))


def _where(reader: Reader, node: Node, index: Index) -> Entry:
    if node.op == "call_method":
        yes, condition, no = arguments(node, input=None, condition=None, other=None)
    else:
        condition, yes, no = arguments(node, condition=None, input=None, other=None)
    return _chosen(reader, node, index, reader.condition(condition, index), yes, no)


def _masked_fill(reader: Reader, node: Node, index: Index) -> Entry:
    source, mask, fill = arguments(node, input=None, mask=None, value=None)
    return _chosen(reader, node, index, reader.condition(mask, index), fill, source)


def _chosen(reader, node: Node, index: Index, condition: Condition, yes, no) -> Entry:
    if value(node).dtype == torch.bool:
        yes, no = (reader.condition(x, index) for x in (yes, no))
        return either(both(condition, yes), both(negation(condition), no))
    yes, no = (_rounded_as(node, reader.numeric(x, index)) for x in (yes, no))
    return choice(condition, yes, no)


def _rounded_as(node: Node, found: Poly) -> Poly:
    return _in_dtype(found, value(node).dtype)


def _triangle(upper: bool) -> Callable:
    def rule(reader: Reader, node: Node, index: Index) -> Entry:
        source, diagonal = arguments(node, input=None, diagonal=0)
        offset = index[-2] - index[-1] + number(scalar(diagonal))
        inside = at_least_zero(offset * number(-1) if upper else offset)
        found = reader.entry(source, index)
        if isinstance(found, Poly):
            return choice(inside, found, number(0))
        return both(inside, found)

    return rule


_VMAP = {vmap._add_batch_dim: _add_batch_dim, vmap._remove_batch_dim: _remove_batch_dim}
_RULES: dict[str, Callable[[Reader, Node, Index], Entry]] = {
    **dict.fromkeys(
        ("to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "bool",
         "contiguous", "clone", "detach"), _same),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    **dict.fromkeys(("reshape", "view", "flatten", "unflatten", "squeeze"), _reshape),
    **dict.fromkeys(("permute", "transpose", "mT", "T"), _permute),
    **dict.fromkeys(("ones", "new_ones", "ones_like"), _filled_with(None, 1)),
    **dict.fromkeys(("zeros", "new_zeros", "zeros_like"), _filled_with(None, 0)),
    **dict.fromkeys(("full", "full_like"), _filled_with(1)),
    **dict.fromkeys(("bitwise_and", "logical_and"), _logical(both)),
    **dict.fromkeys(("bitwise_or", "logical_or"), _logical(either)),
    **dict.fromkeys(("bitwise_xor", "logical_xor"), _logical(_exclusive)),
    **dict.fromkeys(("bitwise_not", "logical_not"), _not),
    "new_full": _filled_with(2), "unsqueeze": _unsqueeze, "repeat": _repeat, "getitem": _getitem, "arange": _arange,
    "tensor": _tensor, "eye": _eye, "add": _sum(1), "sub": _sum(-1), "mul": _mul, "div": _div,
    "floordiv": _floordiv, "neg": _neg, "abs": _abs, "diff": _diff, "cumsum": _cumsum, "where": _where,
    "masked_fill": _masked_fill, "tril": _triangle(False), "triu": _triangle(True),
    "lt": _comparison(lambda d: d < 0, _less),
    "le": _comparison(lambda d: d <= 0, _at_most),
    "gt": _comparison(lambda d: d > 0, lambda p: negation(_at_most(p))),
    "ge": _comparison(lambda d: d >= 0, lambda p: negation(_less(p))),
    "eq": _comparison(lambda d: d == 0, is_zero),
    "ne": _comparison(lambda d: d != 0, lambda p: negation(is_zero(p))),
}  # fmt: skip
