"""What is broadcast to scores, as what is broadcast to (B, H, S, N): heads merged, taken apart, and moved."""

from __future__ import annotations

from torch.fx import Node

from torch_fdattn.compile_backend.graph.adder import Adder
from torch_fdattn.compile_backend.graph.nodes import statically_true, value
from torch_fdattn.compile_backend.match.attention import MatchedAttention
from torch_fdattn.compile_backend.report import Unsupported

_ORDER = ("b", "bh", "g", "n", "h", "q", "k")
_FOUR = ("b", "h", "q", "k")


def taken_apart(add: Adder, node: Node, dim: int, heads: object) -> Node:
    """Batch and heads in two dims, where one has both."""
    if not isinstance(heads, int):
        raise Unsupported("heads", f"{heads} heads, merged with the batch")
    return add("unflatten", node, dim, (-1, heads))


def in_four_dims(
    add: Adder, node: Node, names: tuple[str, ...], attention: MatchedAttention
) -> Node:
    """names: what the dims are that the node is broadcast to."""
    own = list(names[len(names) - value(node).dim() :])
    order = sorted(range(len(own)), key=lambda i: _ORDER.index(own[i]))
    if order != sorted(order):
        node, own = add("permute", node, *order), [own[i] for i in order]
    if "bh" in own:
        at = own.index("bh")
        if statically_true(value(node).shape[at] == 1):
            own[at] = "b"
        else:
            node = taken_apart(add, node, at, attention.q.size(1))
            own[at : at + 1] = ["b", "h"]
    if "n" in own or "g" in own:
        node, own = _with_heads(add, node, own, attention.groups)
    behind = _FOUR[_FOUR.index(own[0]) :] if own else ()
    for at, name in enumerate(behind):  # what is broadcast in front of its first dim needs none
        if name not in own:
            node = add("unsqueeze", node, at)
            own.insert(at, name)
    return node


def _with_heads(
    add: Adder, node: Node, own: list[str], groups: tuple[int, int]
) -> tuple[Node, list[str]]:
    """Heads in place of groups and heads of a group."""
    if "n" not in own:
        at = own.index("g") + 1
        node, own = add("unsqueeze", node, at), [*own[:at], "n", *own[at:]]
    at = own.index("n")
    if "g" not in own:
        node, own = add("unsqueeze", node, at), [*own[:at], "g", *own[at:]]
        at += 1
    shape = value(node).shape
    if not statically_true(shape[at - 1] == 1, shape[at] == 1):
        node = add(
            "expand",
            node,
            *[groups[i - at + 1] if i in (at - 1, at) else -1 for i in range(len(own))],
        )
    return add("flatten", node, at - 1, at), [*own[: at - 1], "h", *own[at + 1 :]]
