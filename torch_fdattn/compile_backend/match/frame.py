"""Names for the dims of scores and weights, wherever they lie in a node: transposed, merged or taken apart.

The softmax's dims are named by a letter each. A node's dims are named by strings of letters: a dim of merged batch
and heads has the two of them. A letter that a view takes apart stands for its parts from then on (`expanded`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch.fx import Node

from torch_fdattn.compile_backend.graph.dims import permutation
from torch_fdattn.compile_backend.graph.nodes import (
    equal_sizes,
    is_tensor,
    op_name,
    statically_true,
    tensor,
    value,
)

Labels = tuple[str, ...]

#: How a name begins of a dim that scores do not have.
OF_NO_SCORE = "#"

RESHAPES = ("flatten", "reshape", "unflatten", "view")


class Frame:
    """The names of one softmax's dims."""

    @staticmethod
    def of(softmax: Node, dim: object) -> Frame | None:
        """None for what is no softmax over a dim of 3 to 5."""
        rank = tensor(softmax).dim()
        fits = 3 <= rank <= 5 and isinstance(dim, int) and -rank <= dim < rank
        return Frame(softmax, dim) if fits else None

    def __init__(self, softmax: Node, dim: int) -> None:
        rank = tensor(softmax).dim()
        self._letters = iter("fghijklmnopqrstuvwxyz")
        self._parts: dict[str, str] = {}
        self.softmax = tuple("abcde"[:rank])
        #: that softmax is over, as the call has it and as its place
        self.given, self.dim = dim, dim % rank
        self.sizes = dict(zip(self.softmax, tensor(softmax).shape, strict=True))

    @property
    def keys(self) -> str:
        return self.expanded(self.softmax[self.dim])

    @property
    def others(self) -> str:
        """All but the keys, in the order that the softmax has them."""
        rest = (x for i, x in enumerate(self.softmax) if i != self.dim)
        return "".join(map(self.expanded, rest))

    def expanded(self, label: str) -> str:
        if label.startswith(OF_NO_SCORE):
            return label
        return "".join(self.expanded(self._parts[x]) if x in self._parts else x for x in label)

    def is_over_keys(self, labels: Labels, dim: object) -> bool:
        """Whether a dim of a node is the one that softmax is over."""
        return isinstance(dim, int) and labels[dim] == self.softmax[self.dim]

    def above(self, node: Node, labels: Labels) -> tuple[Node, Labels] | None:
        """(x, the names of its dims), where a node is x with other dims."""
        order = permutation(node)
        if order is not None:
            moved = dict(zip(order, labels, strict=True))
            return node.args[0], tuple(moved[i] for i in range(len(order)))
        source = self._reshaped(node)
        found = source and self._regrouped(labels, value(node).shape, value(source).shape)
        return (source, found) if found else None

    def below(self, node: Node, source: Node, labels: Labels) -> Labels | None:
        """The names of a node's dims, where it is x with other dims."""
        order = permutation(node)
        if order is not None:
            return tuple(labels[i] for i in order) if node.args[0] is source else None
        if self._reshaped(node) is not source:
            return None
        return self._regrouped(labels, value(source).shape, value(node).shape)

    @staticmethod
    def _reshaped(node: Node) -> Node | None:
        if op_name(node) not in RESHAPES or not is_tensor(node) or not is_tensor(node.args[0]):
            return None
        source = node.args[0]
        return source if value(source).dtype == value(node).dtype else None

    def _regrouped(self, labels: Labels, shape: Sequence, other: Sequence) -> Labels | None:
        """The names of the dims of another shape: dims before the last two are merged or taken apart."""
        labels = tuple(map(self.expanded, labels))
        if len(other) < 3 or not equal_sizes(shape[-2:], other[-2:]):
            return None
        before, after, named = shape[:-2], other[:-2], labels[:-2]
        equal = 0
        while equal < min(len(before), len(after)) - 1 and statically_true(
            before[equal] == after[equal]
        ):
            equal += 1
        before, after, head, named = before[equal:], after[equal:], named[:equal], named[equal:]
        if not statically_true(prod(before) == prod(after)):
            return None
        if len(after) == 1:
            found = ("".join(named),)
        elif len(before) == 1:
            found = self._taken_apart(named[0], after)
        else:
            return None
        return found and (*head, *found, *labels[-2:])

    def _taken_apart(self, label: str, sizes: Sequence) -> Labels | None:
        if len(label) > 1 and not label.startswith(OF_NO_SCORE):
            fits = equal_sizes([self.sizes[x] for x in label], sizes)
            return tuple(label) if fits else None
        if label not in self.sizes:
            return None
        parts = "".join(next(self._letters) for _ in sizes)
        self._parts[label] = parts
        self.sizes |= dict(zip(parts, sizes, strict=True))
        return tuple(parts)
