"""Writes in place: a rewrite reads tensors later than the original did, which they may forbid.

Fake tensors share storages as the real ones will, so that views are found whatever made them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef

from torch_fdattn.compile_backend.graph.nodes import value

_OPERATORS = {"setitem", "delitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow",
              "imatmul", "iand", "ior", "ixor", "ilshift", "irshift"}  # fmt: skip
#: Where functions are named as torch names them.
_TORCH = ("torch", "_operator", "builtins", "math")


def storages(nodes: Iterable[object]) -> set[StorageWeakRef]:
    found = set()
    for node in nodes:
        fake = value(node) if isinstance(node, Node) else None
        for leaf in fake if isinstance(fake, (tuple, list)) else (fake,):
            while isinstance(leaf, Tensor) and is_functorch_wrapped_tensor(leaf):  # inside of vmap
                leaf = get_unwrapped(leaf)
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested:
                found.add(StorageWeakRef(leaf.untyped_storage()))
    return found


def writes(node: Node) -> bool:
    """Whether a node may write into one of its arguments."""
    if node.op == "call_method":
        return _is_named_in_place(node.target) or node.target.strip("_") in _OPERATORS
    if node.op != "call_function":
        return node.op == "call_module"
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    if isinstance(node.target, torch._ops.OpOverloadPacket) and "out" not in node.kwargs:
        overloads = (getattr(node.target, x) for x in node.target.overloads() if "out" not in x)
        return any(overload._schema.is_mutable for overload in overloads)
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True  # its graphs may write
    module = getattr(node.target, "__module__", None) or "torch"
    if module.partition(".")[0] not in _TORCH:
        return True  # a function that torch knows nothing of (`allow_in_graph`)
    name = getattr(node.target, "__name__", "")
    if name in _OPERATORS or "out" in node.kwargs or node.kwargs.get("inplace"):
        return True
    if getattr(node.target, "__module__", "") == "torch.nn.functional":
        parameters = list(inspect.signature(node.target).parameters)
        return "inplace" in parameters[: len(node.args)] and bool(
            node.args[parameters.index("inplace")]
        )
    # operator.and_ and operator.or_ are named so for Python's keywords.
    return _is_named_in_place(name) and name not in ("and_", "or_", "not_")


def _is_named_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def written_after(nodes: list[Node], last: Node) -> Node | None:
    """A node before `last` that may write into what one of `nodes` has read or yields, once it has."""
    remaining, watched = {*nodes}, set()
    node = last
    while remaining:
        node = node.prev
        remaining.discard(node)
    while node is not last:
        if node in nodes:
            watched |= storages(_flat(node))
        if writes(node) and watched & storages(_flat(node)):
            return node
        node = node.next
    return None


def readers_behind(node: Node, memory: set[StorageWeakRef]) -> list[Node]:
    """What stands behind a node in its graph and is given a tensor in this memory, by whatever name."""
    found = []
    while (node := node.next).op != "root":
        if memory & storages(node.all_input_nodes):
            found.append(node)
    return found


def written_between(first: Node, last: Node, nodes: Iterable[Node]) -> Node | None:
    """A node between these two that may write into what any of `nodes` yields."""
    watched = storages(nodes)
    node = first
    while node is not last:
        if writes(node) and watched & storages(_flat(node)):
            return node
        node = node.next
    return None


def _flat(node: Node) -> list[Node]:
    return [*node.all_input_nodes, node]
