"""q, k and v as the graph has them: a node, and where each of (batch, head, sequence, head dim) lies in it.

`trace_operand` walks from a matmul's operand up to what the kernels read themselves: through transposes,
scalings, and the copies of K and V that stand in for grouped heads.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.fx import Node

from torch_fdattn.compile_backend.graph.constants import number
from torch_fdattn.compile_backend.graph.dims import permutation
from torch_fdattn.compile_backend.graph.nodes import (
    arguments,
    equal_sizes,
    is_tensor,
    op_name,
    statically_true,
    tensor,
    value,
)
from torch_fdattn.compile_backend.report import Unsupported

B, H, S, D = range(4)
#: Dims that a result may have in place of some: heads of a group, where H are the groups; batch and heads in one.
INNER, BOTH = 4, 5


class Operand(NamedTuple):
    node: Node
    #: of (B, H, S, D) in the node; None: a head dim of one, to be inserted
    dims: tuple[int | None, ...]
    scale: float = 1.0  #: what was multiplied into it on the way
    repeats: bool = False  #: whether the node's consumer had copies of its heads
    inner: int | None = None  #: the dim of heads of a group, where H are the groups
    both: tuple | None = None  #: (batch, heads), where dim B holds both

    def size(self, which: int) -> int | torch.SymInt:
        if self.both is not None and which in (B, H):
            return self.both[which]
        dim = self.dims[which]
        size = 1 if dim is None else tensor(self.node).shape[dim]
        return size * self.size_of_group if which == H else size

    @property
    def size_of_group(self) -> int | torch.SymInt:
        return 1 if self.inner is None else tensor(self.node).shape[self.inner]

    def moved(self, node: Node, to: Callable[[int], int]) -> Operand:
        """The operand as another node has it, in which each dim lies elsewhere."""
        dims = tuple(None if dim is None else to(dim) for dim in self.dims)
        inner = None if self.inner is None else to(self.inner)
        return self._replace(node=node, dims=dims, inner=inner)


def operand_of(node: object) -> Operand:
    """A tensor in SDPA's order, (B, H, S, D) or (B, S, D)."""
    rank = tensor(node).dim()
    if rank not in (3, 4):
        raise Unsupported("rank", f"a tensor has {rank} dimensions")
    return Operand(node, (0, 1, 2, 3) if rank == 4 else (0, None, 1, 2))


def trace_operand(operand: Operand, path: list[Node], scalings: bool) -> Operand:
    """The operand's source; `path` receives the nodes between, whose results are then not needed."""
    while True:
        node = operand.node
        step = _transposed(operand) or _taken_apart(operand) or _of_one_group(operand)
        step = step or _repeated(operand, path) or _copied(operand)
        step = step or (_scaled(operand) if scalings else None)
        if step is None:
            return operand
        path.append(node)
        operand = step


def _transposed(operand: Operand) -> Operand | None:
    order = permutation(operand.node)
    if order is None:
        return None
    return operand.moved(operand.node.args[0], order.__getitem__)


def _taken_apart(operand: Operand) -> Operand | None:
    """What has its batch and heads in two dims, where the node has them in one."""
    node, at = operand.node, operand.dims[B]
    if operand.both is None or op_name(node) not in ("reshape", "view", "flatten"):
        return None
    source = node.args[0]
    if not is_tensor(source) or value(source).dtype != value(node).dtype:
        return None
    shape = list(value(node).shape)
    if not equal_sizes(value(source).shape, [*shape[:at], *operand.both, *shape[at + 1 :]]):
        return None
    found = operand.moved(source, lambda dim: dim + (dim > at))
    return found._replace(dims=(at, at + 1, *found.dims[S:]), both=None)


def _of_one_group(operand: Operand) -> Operand | None:
    """K or V without the dim of one, expanded or not, that stands for all heads of a group."""
    node, inner = operand.node, operand.inner
    if inner is None or not is_tensor(node):
        return None
    expanded = op_name(node) in ("expand", "expand_as", "broadcast_to") and is_tensor(node.args[0])
    source = node.args[0] if expanded else node
    shape = value(source).shape
    if expanded:
        wide = value(node).shape
        others = [dim for dim in range(len(wide)) if dim != inner]
        if len(shape) != len(wide) or not statically_true(*(shape[d] == wide[d] for d in others)):
            return None
        return (
            operand._replace(node=source, repeats=True)
            if statically_true(shape[inner] == 1)
            else None
        )
    source = _inserted_at(node, inner)
    if source is None:
        return None
    return operand.moved(source, lambda dim: dim - (dim > inner))._replace(inner=None)


def _scaled(operand: Operand) -> Operand | None:
    scaled = scaling(operand.node)
    if scaled is None or value(scaled[0]).dtype != value(operand.node).dtype:
        return None
    return operand._replace(node=scaled[0], scale=operand.scale * scaled[1])


def _copied(operand: Operand) -> Operand | None:
    """Kernels read any strides."""
    node = operand.node
    if op_name(node) == "contiguous" and is_tensor(node.args[0]):
        return operand._replace(node=node.args[0])
    return None


def scaling(node: Node) -> tuple[Node, float] | None:
    """(x, factor) where a node is x times or over a number that the graph holds."""
    name = op_name(node)
    if name not in ("mul", "div") or len(node.args) != 2 or node.kwargs:
        return None
    x, factor = node.args
    if name == "mul" and not (is_tensor(x) and number(factor) is not None):
        x, factor = factor, x
    factor = number(factor)
    if not is_tensor(x) or not is_tensor(node) or factor is None or (name == "div" and factor == 0):
        return None
    if not equal_sizes(value(x).shape, value(node).shape):
        return None
    return x, factor if name == "mul" else 1 / factor


def _repeated(operand: Operand, path: list[Node]) -> Operand | None:
    """K or V without the copies of its heads: head h of the copy is head h // n of the source.

    Kernels of grouped heads read the same; `k.repeat(1, n, 1, 1)`, where it is head h % H_kv, is another thing.
    """
    head = operand.dims[H]
    if head is None or operand.inner is not None or not is_tensor(operand.node):
        return None
    source = _interleaved(operand.node, head) or _expanded_and_merged(operand.node, head, path)
    source = source or _expanded_from_one(operand.node, head)
    if source is None:
        return None
    # All but the heads stays as it is, and these divide.
    few, many = value(source), value(operand.node)
    others = [dim for dim in range(many.dim()) if dim != head]
    if few.dim() != many.dim() or not all(
        statically_true(few.shape[d] == many.shape[d]) for d in others
    ):
        return None
    if not statically_true(few.shape[head] > 0) or not statically_true(
        many.shape[head] % few.shape[head] == 0
    ):
        return None
    return operand._replace(node=source, repeats=True)


def _interleaved(node: Node, head: int) -> Node | None:
    if op_name(node) != "repeat_interleave":
        return None
    source, repeats, dim, _size = arguments(
        node, input=None, repeats=None, dim=None, output_size=None
    )
    if not is_tensor(source) or not isinstance(repeats, int) or not isinstance(dim, int):
        return None
    return source if dim % value(source).dim() == head else None


def _expanded_and_merged(node: Node, head: int, path: list[Node]) -> Node | None:
    """x[:, :, None].expand(B, H_kv, n, S, D).reshape(B, H_kv · n, S, D), for the heads wherever they stand."""
    if op_name(node) not in ("reshape", "view", "flatten"):
        return None
    between = [node.args[0]]
    if op_name(between[-1]) in ("contiguous", "clone"):
        between.append(between[-1].args[0])
    expanded = between[-1]
    if op_name(expanded) != "expand":
        return None
    inserted = expanded.args[0]
    source = _inserted_at(inserted, head + 1)
    if source is None or not is_tensor(expanded) or not is_tensor(inserted):
        return None
    wide, merged = value(expanded), value(node)
    if wide.dim() != merged.dim() + 1 or wide.dim() != value(inserted).dim():
        return None
    # Only the inserted dim is expanded, and it is merged with the heads before it.
    narrow = value(inserted)
    for dim in range(wide.dim()):
        if dim != head + 1 and not statically_true(wide.shape[dim] == narrow.shape[dim]):
            return None
    expected = [
        *wide.shape[:head],
        wide.shape[head] * wide.shape[head + 1],
        *wide.shape[head + 2 :],
    ]
    if not equal_sizes(merged.shape, expected):
        return None
    path += [*between, inserted]
    return source


def _inserted_at(node: object, dim: int) -> Node | None:
    """x, where a node is x with a dimension of one inserted there."""
    if not isinstance(node, Node) or not node.args or not is_tensor(node.args[0]):
        return None
    source = node.args[0]
    rank = value(source).dim()
    if op_name(node) == "unsqueeze":
        (at,) = (*node.args[1:], *node.kwargs.values())
        return source if isinstance(at, int) and at % (rank + 1) == dim else None
    if node.target is not operator.getitem or not isinstance(node.args[1], tuple):
        return None
    index = list(node.args[1])
    everything = slice(None, None, None)
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index[at : at + 1] = [everything] * (rank - sum(x not in (None, Ellipsis) for x in index))
    plain = [everything] * dim + [None] + [everything] * (rank - dim)
    return source if index == plain[: len(index)] and None in index else None


def _expanded_from_one(node: Node, head: int) -> Node | None:
    """MQA: one head, expanded."""
    if op_name(node) not in ("expand", "expand_as", "broadcast_to") or not is_tensor(node.args[0]):
        return None
    source = node.args[0]
    fake = value(source)
    return source if fake.dim() > head and statically_true(fake.shape[head] == 1) else None
