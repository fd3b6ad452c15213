"""What an ATen graph does to rows, and doing the same to others.

A matmul's rows can be arranged anew before it or after it: (P x) W = P (x W), for whatever P reshapes, splits, joins,
drops or repeats rows and leaves the last dimension alone. Gathers and scatters over another dimension than the first
put such a P between the collective and the matmul.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch.fx import Node
from torch.utils._pytree import tree_map

from torch_fdattn.compile_backend.graph.nodes import equal_sizes, statically_true

_ATEN = torch.ops.aten
RESHAPES = (_ATEN.reshape.default, _ATEN.view.default, _ATEN._unsafe_view.default)
#: With a dimension, 0 where none is given, that must not be the last.
_ALONG = (
    _ATEN.slice.Tensor, _ATEN.select.int, _ATEN.split.Tensor, _ATEN.split_with_sizes.default, _ATEN.unbind.int,
    _ATEN.squeeze.dim, _ATEN.cat.default,
)  # fmt: skip
_WHERE = {_ATEN.split.Tensor: 2, _ATEN.split_with_sizes.default: 2}


def sources(node: Node) -> list[Node] | None:
    """The tensors whose rows are this node's, arranged anew; None: it does something else."""
    if node.op != "call_function" or not node.args:
        return None
    target, first = node.target, node.args[0]
    if target is operator.getitem:
        return [first] if sources(first) else None
    if target is _ATEN.clone.default:
        return [first]
    given = list(first) if isinstance(first, (list, tuple)) else [first]
    if not all(isinstance(x, Node) and isinstance(value(x), torch.Tensor) for x in given):
        return None
    dims = value(given[0]).dim()
    if target in RESHAPES:
        keeps_width = value(node).dim() and statically_true(width(node) == width(first))
        return given if keeps_width else None
    if target is _ATEN.permute.default:
        return given if node.args[1][-1] % dims == dims - 1 else None
    if target is _ATEN.transpose.int:
        return given if all(dim % dims != dims - 1 for dim in node.args[1:3]) else None
    if target is _ATEN.unsqueeze.default:
        return given if node.args[1] % (dims + 1) < dims else None
    if target in _ALONG:
        return given if _dim(node, _WHERE.get(target, 1)) != dims - 1 else None
    return None


def _dim(node: Node, at: int) -> int:
    """The dimension that a node works along, its argument of this number, or else 0."""
    dim = node.args[at] if len(node.args) > at else node.kwargs.get("dim", 0)
    first = node.args[0]
    return dim % value(first[0] if isinstance(first, (list, tuple)) else first).dim()


def replay(node: Node, of: dict[Node, Node], build: Builder) -> Node:
    """`node` with other tensors in place of those it is made from; `of` has them, and remembers what was made.

    They have as many rows; only the width, their last dimension, may be another.
    """
    if node in of:
        return of[node]
    if node.target is _ATEN.add.Tensor:  # of which one side is replaced
        side = next(x for x in node.args if _is_part(x, of))
        of[node] = replay(side, of, build)
        return of[node]
    args = tree_map(lambda x: replay(x, of, build) if _is_part(x, of) else x, list(node.args))
    if node.target in RESHAPES:
        of[node] = build.reshape(args[0], [*args[1][:-1], build.size(args[0], -1)])
    else:
        of[node] = build(node.target, *args, **node.kwargs)
        joined = _cut_and_joined(of[node])
        if joined is not None:
            of[node] = build.reshape(
                joined, [build.size(of[node], d) for d in range(value(node).dim())]
            )
    return of[node]


def _cut_and_joined(node: Node) -> Node | None:
    """What the parts of a cat were split from, where their rows end up in the order that they had."""
    if node.target is not _ATEN.cat.default:
        return None
    parts = node.args[0]
    cut = parts[0].args[0] if parts[0].target is operator.getitem else None
    if cut is None or cut.target is not _ATEN.split.Tensor:
        return None
    if [x.args for x in parts] != [(cut, i) for i in range(len(value(cut)))]:
        return None
    joined = cut.args[0]
    before = [*value(joined).shape[: _dim(cut, 2)], *value(parts[0]).shape[: _dim(node, 1)]]
    return joined if statically_true(*(size == 1 for size in before)) else None


def _is_part(x: object, of: dict[Node, Node]) -> bool:
    """Whether rows of those to be replaced are among x's."""
    if not isinstance(x, Node):
        return False
    if x.target is _ATEN.add.Tensor:
        return any(_is_part(y, of) for y in x.args)
    return x in of or any(_is_part(y, of) for y in sources(x) or ())


def value(node: Node) -> object:
    """The fake value; None where the graph does not say."""
    return node.meta.get("val")


def width(node: Node) -> int | torch.SymInt:
    return value(node).shape[-1]


class Builder:
    """Adds nodes before one of a graph, with fake values and the place in the source of `like`."""

    def __init__(self, before: Node, like: Node) -> None:
        self.before = before
        self.made: dict[Node, None] = {}
        self.meta = {
            key: like.meta[key] for key in ("stack_trace", "nn_module_stack") if key in like.meta
        }

    def __call__(self, target, *args, **kwargs) -> Node:
        with self.before.graph.inserting_before(self.before):
            node = self.before.graph.call_function(target, tuple(args), kwargs)
        fakes = tree_map(lambda x: value(x) if isinstance(x, Node) else x, (node.args, node.kwargs))
        node.meta.update(self.meta, val=target(*fakes[0], **fakes[1]))
        self.made[node] = None
        return node

    def size(self, node: Node, dim: int) -> int | Node:
        """A number, or a node of one where it is dynamic."""
        size = value(node).shape[dim]
        if isinstance(size, int):
            return size
        return self(_ATEN.sym_size.int, node, dim % value(node).dim())

    def reshape(self, node: Node, shape: list[int | Node]) -> Node:
        """Nothing where it has the shape; what was reshaped here before is reshaped once."""
        while node in self.made and node.target is _ATEN.reshape.default:
            node = node.args[0]
        reshaped = self(_ATEN.reshape.default, node, shape)
        return node if equal_sizes(value(reshaped).shape, value(node).shape) else reshaped

    def rows(self, node: Node) -> Node:
        """As (rows, width)."""
        return self.reshape(node, [-1, self.size(node, -1)])

    def transposed(self, node: Node) -> Node:
        """Of two dimensions; what was transposed already, as it was before."""
        if (
            node.target is _ATEN.t.default
            or (node.target is _ATEN.permute.default and [d % 2 for d in node.args[1]] == [1, 0])
            or (node.target is _ATEN.transpose.int and {d % 2 for d in node.args[1:3]} == {0, 1})
        ):
            return node.args[0]
        return self(_ATEN.permute.default, node, [1, 0])

    def clear(self) -> None:
        """Erases what was made and is not used."""
        erase(reversed(self.made))


def erase(nodes: Iterable[Node]) -> None:
    """Those that nothing uses, in this order."""
    for node in nodes:
        if not node.users:
            node.graph.erase_node(node)
