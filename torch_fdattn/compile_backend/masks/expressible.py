"""Which expressions can be made into nodes: without symbolic numbers, and with lookups that are views."""

from __future__ import annotations

from torch_fdattn.compile_backend.graph.nodes import statically_true, value
from torch_fdattn.compile_backend.masks.expressions import (
    Axis,
    Both,
    Condition,
    Either,
    Lookup,
    Poly,
    Select,
)
from torch_fdattn.compile_backend.masks.structure import MaskSizes

AXES = ("b", "h", "q", "k")


def is_expressible(expression: Poly | Condition, sizes: MaskSizes) -> bool:
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
        return view_of(x, size) is not None
    if isinstance(x, Select):
        return all(_expressible(part, size) for part in (x.condition, x.yes, x.no))
    return _expressible(x.of, size)


def view_of(lookup: Lookup, size: dict) -> tuple[tuple, list[str]] | None:
    """(how the tensor is to be indexed, the axes it then has); None where it is not so simple."""
    indices, names = [], []
    for length, index in zip(value(lookup.node).shape, lookup.index, strict=True):
        if isinstance(index.constant, int):
            indices.append(index.constant)
            continue
        axes = [atom for atom in index.atoms if isinstance(atom, Axis)]
        if len(axes) != 1 or len(index.atoms) != 1 or index.coefficient(axes[0]) != 1:
            return None
        (axis,) = axes
        start, count = index.without(axis).constant, size[axis.name]
        if start == 0 and statically_true(length == count):
            indices.append(slice(None))
        elif isinstance(start, int) and isinstance(count, int) and start >= 0:
            indices.append(slice(start, start + count))
        else:
            return None
        names.append(axis.name)
    return (tuple(indices), names) if len({*names}) == len(names) else None
