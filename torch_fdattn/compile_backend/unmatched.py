"""A softmax between two products: attention, whatever stands between, so that no form's ignorance hides it.

From the softmax, data is followed up to the products that it comes from and down to those that it goes into, through
any operations and through writes in place. A product with what is made of parameters alone (a projection, a router,
a table of vectors) ends the way and does not count: both products must be of activations, as far as the graph says
which these are. A weight that is no `nn.Parameter` looks like an activation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

import torch
from torch.fx import Graph, Node

from torch_fdattn.compile_backend import scores
from torch_fdattn.compile_backend.mutations import storages, writes
from torch_fdattn.compile_backend.nodes import described, op_name, value
from torch_fdattn.compile_backend.report import Left, where

#: All that is a softmax, beside those that forms know.
OTHER_SOFTMAXES = ("_softmax", "_log_softmax", "gumbel_softmax", "log_softmax", "softmin")
FORM = "product, softmax, product"

_PRODUCTS = {
    "addbmm", "addmm", "baddbmm", "bmm", "einsum", "inner", "matmul", "mm", "mv", "tensordot",
}  # fmt: skip
#: Beyond them begins another layer.
_ENDS = {
    "conv1d", "conv2d", "conv3d", "embedding", "linear", "multi_head_attention_forward",
    "scaled_dot_product_attention",
}  # fmt: skip
#: What forms know to stand there: a report names what they do not.
_ORDINARY = {
    "_safe_softmax", "add", "bfloat16", "contiguous", "div", "double", "dropout", "float", "getitem",
    "half", "masked_fill", "mul", "reshape", "softmax", "sub", "tanh", "to", "type", "type_as", "view",
    "where",
}  # fmt: skip


class Unmatched:
    """Finds the softmaxes of one graph that stand between products."""

    FORM = FORM

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def match(self, softmax: Node, masks: object = None) -> None:
        """Raises `Left`, with the first operation that no form has, where this is attention."""
        above = self._way(softmax, self._sources)
        below = above and self._way(softmax, self._users)
        if not above or not below:
            return
        between = [*reversed(above[1:]), softmax, *below[1:]]
        for node in between:
            if op_name(node) not in _ORDINARY:
                raise Left("unknown-op", f"{described(node)} ({where(node)})")
        scores.below_softmax(softmax.all_input_nodes[0])  # which says what it does not know of them
        raise Left("weights-unknown", "operations of attention in an order that no form has")

    def _way(self, start: Node, neighbours: Callable[[Node], Iterable[Node]]) -> list[Node]:
        """The nodes from one to the nearest product of activations, without it; empty where none is reached."""
        came_from: dict[Node, Node | None] = {start: None}
        for node in (waiting := [start]):
            for other in neighbours(node):
                if other in came_from:
                    continue
                came_from[other] = node
                if op_name(other) in _PRODUCTS:
                    if self._is_of_activations(other):
                        return _back(came_from, node)
                elif op_name(other) not in _ENDS:
                    waiting.append(other)
        return []

    def _sources(self, node: Node) -> list[Node]:
        """What a node's data comes from: its inputs, and what wrote into it."""
        if node.op in ("placeholder", "get_attr"):
            return []
        own = storages([node]) if self._writers else set()
        return [*node.all_input_nodes, *(x for x, into in self._writers.items() if own & into)]

    def _users(self, node: Node) -> list[Node]:
        """What a node's data goes into: its users, and those of what they wrote it into."""
        found = list(node.users)
        for user in node.users:
            if user in self._writers:
                found += user.all_input_nodes
        return found

    @cached_property
    def _writers(self) -> dict[Node, set]:
        """Nodes that write in place, with the storages that they may write into."""
        return {x: storages(x.all_input_nodes[:1]) for x in self.graph.nodes if writes(x)}

    def _is_of_activations(self, product: Node) -> bool:
        factors = product.all_input_nodes
        return sum(not self._is_made_of_parameters(x) for x in factors) > 1 or (
            # A tensor times itself.
            len(factors) == 1 and not self._is_made_of_parameters(factors[0])
        )

    def _is_made_of_parameters(self, node: Node) -> bool:
        """Whether no input of the graph but parameters reaches it."""
        seen = {node}
        waiting = [node]
        while waiting:
            last = waiting.pop()
            is_input = last.op in ("placeholder", "get_attr")
            if is_input and not isinstance(value(last), torch.nn.Parameter):
                return False
            for source in self._sources(last):
                if source not in seen:
                    seen.add(source)
                    waiting.append(source)
        return True


def _back(came_from: dict[Node, Node | None], node: Node | None) -> list[Node]:
    way = []
    while node is not None:
        way.append(node)
        node = came_from[node]
    return way[::-1]
