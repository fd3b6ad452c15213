"""In-place operations as their out-of-place twins, while a graph is matched.

`s.div_(8)` is `s / 8` if nothing reads s, or another view of its memory, as it was before: not an input, not a view of
something that is read later. Where a twin is not part of what is rewritten, the graph is given back as it was written.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.multiprocessing.reductions import StorageWeakRef

from torch_fdattn.compile_backend.graph.adder import Adder
from torch_fdattn.compile_backend.graph.mutations import storages
from torch_fdattn.compile_backend.graph.nodes import (
    equal_sizes,
    is_tensor,
    op_name,
    statically_true,
    value,
)

_FUNCTIONS = {
    operator.iadd: operator.add, operator.imul: operator.mul, operator.isub: operator.sub,
    operator.itruediv: operator.truediv, torch.clamp_: torch.clamp, torch.clamp_min_: torch.clamp_min,
    torch.dropout_: torch.dropout, torch.tanh_: torch.tanh,
}  # fmt: skip
_METHODS = {
    f"{name}_": name
    for name in ("add", "clamp", "clamp_min", "div", "divide", "masked_fill", "mul", "multiply", "sub",
                 "subtract", "tanh", "true_divide")
}  # fmt: skip


#: In the metadata of a node that is to be written in place again.
TWIN = "fdattn_twin"
#: Above them scores end.
_ENDS = {
    "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "einsum", "embedding", "linear", "matmul", "mm",
    "scaled_dot_product_attention",
}  # fmt: skip
#: From a softmax down.
_ON_WEIGHTS = {
    "bfloat16", "clone", "contiguous", "dropout", "float", "half", "permute", "reshape", "to", "transpose",
    "type_as", "view",
}  # fmt: skip
_SOFTMAXES = {"_safe_softmax", "softmax"}


class _Twin(NamedTuple):
    """What an operation was."""

    node: Node
    aliases: list[Node]  #: what shares memory with its target, which is among them
    target: object
    users: list[Node]  #: which were given its target, and not itself
    inplace: tuple[tuple, dict] = ((), {})  #: arguments that it has in place alone


class Functionalized:
    """A graph in which operations on scores and weights are out of place, until `restore`."""

    def __init__(self, gm: GraphModule) -> None:
        self._twins: list[_Twin] = []
        nodes = list(gm.graph.nodes)
        candidates = [node for node in nodes if _is_in_place(node)]
        if not candidates:
            return
        scores = _scores(nodes)
        position = {node: i for i, node in enumerate(nodes)}
        sharing: dict[StorageWeakRef, list[Node]] = {}
        for node in nodes:
            for storage in storages([node]):
                sharing.setdefault(storage, []).append(node)
        for node in candidates:
            before = [
                other
                for storage in storages(node.args[:1])
                for other in sharing[storage]
                if position[other] < position[node]
            ]
            of_attention = node.args[0] in scores or _are_weights(node)
            if of_attention and _is_fresh(node, before, position) and _yields_the_same(node):
                self._replace(node, before, position)
                if node.args[0] in scores:
                    scores.add(node)

    def restore(self) -> None:
        """Writes in place again what is left of the twins: into a copy, where something new reads what was there before."""
        for twin in reversed(self._twins):
            node = twin.node
            if node._erased:
                continue
            del node.meta[TWIN]
            copy = None
            if _is_read_behind(node, twin.aliases):
                copy = Adder(node)("clone", node.args[0])
                node.args = (copy, *node.args[1:])
            args, kwargs = twin.inplace
            node.target, node.args = twin.target, (*node.args, *args)
            node.kwargs = {**node.kwargs, **kwargs}
            for user in twin.users:
                if not user._erased and node.args[0] is not copy:
                    user.replace_input_with(node, node.args[0])

    def _replace(self, node: Node, before: list[Node], position: dict[Node, int]) -> None:
        target = node.args[0]
        was, found = (node.args, node.kwargs), _out_of_place(node)
        inplace = was[0][len(found[1]) :], {x: y for x, y in was[1].items() if x not in found[2]}
        twin = _Twin(node, before, node.target, [], inplace)
        node.target, node.args, node.kwargs = found
        node.meta[TWIN] = True
        for user in [x for x in target.users if position[x] > position[node]]:
            if node not in user.all_input_nodes:
                twin.users.append(user)
            user.replace_input_with(target, node)
        self._twins.append(twin)


def _scores(nodes: list[Node]) -> set[Node]:
    """What has as many numbers as a softmax whose input is made of it, up to a product."""
    found: set[Node] = set()
    for softmax in nodes:
        if op_name(softmax) not in _SOFTMAXES or not is_tensor(softmax):
            continue
        waiting, size = (
            [x for x in softmax.all_input_nodes if is_tensor(x)][:1],
            value(softmax).numel(),
        )
        while waiting:
            node = waiting.pop()
            if node in found:
                continue
            found.add(node)
            if op_name(node) not in _ENDS:
                waiting += [
                    x
                    for x in node.all_input_nodes
                    if is_tensor(x)
                    and (op_name(node) == "cat" or statically_true(value(x).numel() == size))
                ]
    return found


def _are_weights(dropout: Node) -> bool:
    """Whether dropout is that of a softmax."""
    node = dropout
    while op_name(node) in _ON_WEIGHTS and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    return op_name(dropout) == "dropout" and op_name(node) in _SOFTMAXES


def _is_in_place(node: Node) -> bool:
    if not node.args or not isinstance(node.args[0], Node):
        return False
    if node.op == "call_method":
        return node.target in _METHODS
    if node.op != "call_function":
        return False
    # (A function may be one that cannot be hashed.)
    return any(node.target is x for x in _FUNCTIONS) or (
        node.target is F.dropout and _inplace_of(node) is True
    )


def _inplace_of(dropout: Node) -> object:
    return dropout.args[3] if len(dropout.args) > 3 else dropout.kwargs.get("inplace")


def _out_of_place(node: Node) -> tuple:
    """(target, args, kwargs)"""
    if node.op == "call_method":
        return _METHODS[node.target], node.args, node.kwargs
    if node.target is F.dropout:
        kwargs = {name: x for name, x in node.kwargs.items() if name != "inplace"}
        return F.dropout, node.args[:3], kwargs
    return _FUNCTIONS[node.target], node.args, node.kwargs


def _is_fresh(node: Node, before: list[Node], position: dict[Node, int]) -> bool:
    """Whether the graph made what is written to, and reads its memory later by this node alone."""
    target = node.args[0]
    if target not in before or any(x.op in ("placeholder", "get_attr") for x in before):
        return False
    if any(_sets_grad_mode(x) for x in _between(before[0], node)):
        return False  # a write under no_grad() leaves the gradient as it was
    return not any(
        position[user] >= position[node]
        for other in before
        if other is not target
        for user in other.users
    )


def _sets_grad_mode(node: Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return node.target is torch._C._set_grad_enabled or name in (
        "_enter_inference_mode", "_exit_inference_mode",
    )  # fmt: skip


def _between(first: Node, last: Node):
    while first is not last:
        yield first
        first = first.next


def _yields_the_same(node: Node) -> bool:
    """Whether the twin's result has the dtype and the shape of what is written to, whose copy has its strides."""
    written = value(node.args[0])
    if type(written) is not FakeTensor or not written.dtype.is_floating_point:
        return False
    target, args, kwargs = _out_of_place(node)
    function = getattr(torch.Tensor, target) if isinstance(target, str) else target
    with written.fake_mode, torch.no_grad(), torch.autocast(written.device.type, enabled=False):
        try:
            found = function(*map_arg(args, value), **map_arg(kwargs, value))
            copy = written.clone()
        except (RuntimeError, TypeError, ValueError):
            return False
    return (
        found.dtype == written.dtype
        and equal_sizes(found.shape, written.shape)
        and equal_sizes(copy.stride(), written.stride())
    )


def _is_read_behind(node: Node, aliases: list[Node]) -> bool:
    """Whether anything behind a twin reads what would be written to."""
    readers = {user for x in aliases if not x._erased for user in x.users} - {node}
    while readers and (node := node.next).op != "root":
        if node in readers:
            return True
    return False
