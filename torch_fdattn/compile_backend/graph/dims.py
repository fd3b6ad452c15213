"""Where a dim of scores lies in what they are made of, and in what is made of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.fx import Node

from torch_fdattn.compile_backend.graph.nodes import is_tensor, op_name, statically_true, value

_RESHAPES = {"flatten", "reshape", "squeeze", "unflatten", "unsqueeze", "view"}
_MOVES = {"H", "T", "mH", "mT", "permute", "t", "transpose"}


def across(node: Node, source: Node, dim: int | None, up: bool) -> int | None:
    """The dim of a source that a node's dim is (up), or the other way; None where that is not known."""
    if dim is None or not is_tensor(node) or not is_tensor(source):
        return None
    order = permutation(node)
    if order is not None and source is node.args[0]:
        return order[dim] if up else order.index(dim)
    here, there = (value(node), value(source)) if up else (value(source), value(node))
    if op_name(node) in _RESHAPES:
        return _with_as_many_behind(here, there, dim)
    found = dim - here.dim() + there.dim()  # as broadcasting has it
    same = 0 <= found < there.dim() and statically_true(there.shape[found] == here.shape[dim])
    return found if same else None


def permutation(node: Node) -> list[int] | None:
    """order[i]: the source's dim that dim i of a node is; None where it does more, or less, than move dims."""
    name = op_name(node)
    if name not in _MOVES or not is_tensor(node.args[0]):
        return None
    rank = value(node.args[0]).dim()
    order = list(range(rank))
    if name == "permute":
        dims = node.kwargs.get("dims", node.args[1:])
        order = list(dims[0] if dims and isinstance(dims[0], (tuple, list)) else dims)
    elif name in ("T", "H") and rank != 2:
        order = order[::-1]
    else:
        a, b = (*node.args[1:], *node.kwargs.values()) if name == "transpose" else (-2, -1)
        if not isinstance(a, int) or not isinstance(b, int):
            return None
        order[a], order[b] = order[b], order[a]
    return [dim % rank for dim in order] if all(isinstance(dim, int) for dim in order) else None


def _with_as_many_behind(here: Tensor, there: Tensor, dim: int) -> int | None:
    behind = _count(here.shape[dim + 1 :])
    for i, size in enumerate(there.shape):
        if statically_true(size == here.shape[dim]) and statically_true(
            _count(there.shape[i + 1 :]) == behind
        ):
            return i
    return None


def _count(sizes: Sequence) -> object:
    count = 1
    for size in sizes:
        count = count * size
    return count


class Factors(NamedTuple):
    """A product's two tensors and the labels of their dims and of its own."""

    nodes: tuple[Node, Node]
    labels: tuple[str, str]
    out: str


def factors(node: Node) -> Factors | None:
    """None where a product is of a kind whose dims have no labels here."""
    name, args = op_name(node), [*node.args, *node.kwargs.values()]
    if name == "einsum":
        return _of_einsum(node)
    if name in ("addmm", "baddbmm"):
        args = args[1:]
    if len(args) < 2 or not all(map(is_tensor, args[:2])):
        return None
    left, right = args[:2]
    ranks = value(left).dim(), value(right).dim()
    if name == "linear" and ranks[0] > 1 and ranks[1] == 2:
        batch = "abcdefgh"[: ranks[0] - 1]
        return Factors((left, right), (f"{batch}x", "nx"), f"{batch}n")
    if name not in ("addmm", "baddbmm", "bmm", "matmul", "mm") or min(ranks) < 2:
        return None
    count = max(ranks) - 2
    batch = "abcdefgh"[:count]
    a, b = (batch[count - rank + 2 :] for rank in ranks)
    return Factors((left, right), (f"{a}mx", f"{b}xn"), f"{batch}mn")


def _of_einsum(node: Node) -> Factors | None:
    parsed = einsum_labels(node)
    if parsed is None:
        return None
    operands, labels = parsed
    return Factors(operands, (labels[0], labels[1]), labels[2])


def einsum_labels(node: Node) -> tuple[tuple[Node, Node], tuple[str, str, str]] | None:
    """(the operands, their labels and the result's) of an einsum of two tensors; digits stand for an ellipsis."""
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    found = re.fullmatch(
        r"([a-zA-Z.]+),([a-zA-Z.]+)(?:->([a-zA-Z.]+))?", str(equation).replace(" ", "")
    )
    if found is None or len(operands) != 2 or not all(map(is_tensor, (*operands, node))):
        return None
    left, right, out = found.groups()
    if out is None:  # what stands once, behind the dims of an ellipsis
        once = (x for x in left + right if x != "." and (left + right).count(x) == 1)
        out = "..." * ("..." in left + right) + "".join(sorted(once))
    # An ellipsis stands for dims that are counted from the last.
    labels = []
    for part, x in zip((left, right, out), (*operands, node), strict=True):
        rank = value(x).dim()
        rest = "0123456789"[10 - max(0, rank - len(part) + 3) :]
        labels.append(part.replace("...", rest))
        if len(labels[-1]) != rank or "." in labels[-1]:
            return None
    return (operands[0], operands[1]), tuple(labels)
