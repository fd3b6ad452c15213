"""From a mask's node to the expression of its entry: a graph read backwards, from an index to where it leads.

`Reader.entry(node, index)` asks what the tensor holds there. A view asks its source at another index, `arange`
answers with the index, arithmetic combines what its operands answer. What has no rule is a `Lookup`: some number
that only the call knows. So every answer is true; at worst it says nothing.

Arithmetic is that of real numbers, but that constants are rounded to the dtype they are in: min + min is -inf.
"""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from torch_fdattn.compile_backend.graph.nodes import is_tensor, op_name, value
from torch_fdattn.compile_backend.masks import arithmetic, conditions, views
from torch_fdattn.compile_backend.masks.entries import (
    Entry,
    Index,
    Rule,
    Unknown,
    broadcast_index,
    in_dtype,
    looked_up,
    nonzero,
    scalar,
)
from torch_fdattn.compile_backend.masks.expressions import (
    FALSE,
    TRUE,
    Condition,
    Poly,
    as_number,
    number,
)
from torch_fdattn.compile_backend.report import Unsupported

#: A mask takes some tens of steps; what takes more is a model.
MAX_STEPS = 1000

_RULES: dict[str, Rule] = {**views.RULES, **arithmetic.RULES, **conditions.RULES}


class _TooLong(Exception):
    pass


class Reader:
    """Reads one tensor; `visited` are the nodes that were looked into."""

    def __init__(self) -> None:
        self.visited: set[Node] = set()
        self._entries: dict[tuple, Entry] = {}
        #: Indices into the batches of the vmaps that a node stands in, by level.
        self.levels: dict[int, Poly] = {}

    def read(self, node: Node, index: Index) -> Entry:
        """The entry of a mask that is broadcast to scores, at an index of theirs."""
        try:
            return self.operand(node, index)
        except _TooLong:
            self.visited.clear()
            return looked_up(node, broadcast_index(node, index))

    def operand(self, x: object, index: Index) -> Entry:
        """An argument's entry, where it is broadcast to a tensor with this index."""
        if isinstance(x, bool):
            return TRUE if x else FALSE
        if not is_tensor(x):
            return number(scalar(x))
        return self.entry(x, broadcast_index(x, index))

    def entry(self, node: Node, index: Index) -> Entry:
        key = node, index, frozenset(self.levels.items())
        if key not in self._entries:
            if len(self._entries) >= MAX_STEPS:
                raise _TooLong
            before = set(self.visited)
            try:
                rule = views.VMAP_RULES.get(node.target) or _RULES.get(op_name(node))
                if rule is None:
                    raise Unknown
                found = in_dtype(rule(self, node, index), value(node).dtype)
                self.visited.add(node)
            except (Unknown, Unsupported, TypeError, ValueError, LookupError, OverflowError):
                self.visited = before
                if type(value(node)) is not FakeTensor:
                    raise Unknown from None  # inside of vmap there are entries, but no tensors
                found = looked_up(node, index)
            self._entries[key] = found
        return self._entries[key]

    def numeric(self, x: object, index: Index) -> Poly:
        found = self.operand(x, index)
        return found if isinstance(found, Poly) else as_number(found)

    def condition(self, x: object, index: Index) -> Condition:
        found = self.operand(x, index)
        return nonzero(found, x) if isinstance(found, Poly) else found
