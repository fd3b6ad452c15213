"""A softmax between two products: attention, whatever stands between, so that no form's ignorance hides it.

From the softmax, data is followed up to the product that it comes from and down to that which it goes into, through
any operations, writes in place and called graphs. Both must be of activations, as far as the graph says which these
are (a weight that is no `nn.Parameter` looks like one, also to `linear`), but for two things that parameters do to attention:

    learned queries: parameters that stand on the left, that were projected, or that have a batch or heads as the keys
    do, and a softmax over the keys. Over what the parameters bring it is a router's or a classifier's;
    talking heads: a projection over dims that both products have in common.

Any other projection ends the way: beyond it begins another layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch.fx import Node

from torch_fdattn.compile_backend.graph.data_flow import DataFlow
from torch_fdattn.compile_backend.graph.dims import Factors, across, factors
from torch_fdattn.compile_backend.graph.nodes import (
    described,
    is_tensor,
    op_name,
    statically_true,
    value,
)
from torch_fdattn.compile_backend.match import scores
from torch_fdattn.compile_backend.match.frame import Frame
from torch_fdattn.compile_backend.match.written_softmax import POWERS, dim_of_sum
from torch_fdattn.compile_backend.report import Unsupported, where

#: All softmaxes but those that forms match; powers where they are divided by their sum.
OTHER_SOFTMAXES = (
    "_softmax", "_log_softmax", "_masked_softmax", "gumbel_softmax", "log_softmax", "masked_log_softmax",
    "masked_softmax", "masked_softmin", "softmin", *POWERS,
)  # fmt: skip
FORM = "product, softmax, product"

_PRODUCTS = {
    "addbmm", "addmm", "baddbmm", "bmm", "chain_matmul", "einsum", "imatmul", "inner", "matmul", "mm",
    "multi_dot", "mv", "rmatmul", "sparse_mm", "tensordot",
}  # fmt: skip
#: Products that no form has, which a report names.
_UNKNOWN_PRODUCTS = {"linear", "sparse_mm"}
#: By the dim that they project.
_PROJECTIONS = {"conv1d": 1, "conv2d": 1, "conv3d": 1, "linear": -1}
#: Beyond them begins another layer.
_ENDS = {"embedding", "multi_head_attention_forward", "scaled_dot_product_attention"}
#: What forms know to stand there: a report names what they do not.
_ORDINARY = {
    "_safe_softmax", "add", "bfloat16", "contiguous", "div", "double", "dropout", "float", "getitem",
    "half", "masked_fill", "mul", "reshape", "softmax", "sub", "tanh", "to", "type", "type_as", "view",
    "where",
}  # fmt: skip
#: What no report of a softmax that is written out names: it is the power that no form has.
_ORDINARY_OF_POWERS = _ORDINARY | {
    "add_", "div_", "divide_", "iadd", "imul", "isub", "itruediv", "masked_fill_", "mul_", "sub_",
    "subtract_", "true_divide_",
}  # fmt: skip


class _Step(NamedTuple):
    """A node on the path, with what its dims are."""

    node: Node
    keys: int | None  #: that softmax is over
    projected: frozenset[int | None]  #: that parameters have mixed


class Unmatched:
    """Finds the softmaxes of a graph, and of those that it calls, that stand between products."""

    FORM = FORM

    def __init__(self, flow: DataFlow) -> None:
        self.flow = flow

    def match(self, softmax: Node, masks: object = None) -> None:
        """Raises `Unsupported`, with the first operation that no form has, where this is attention."""
        if op_name(softmax) in POWERS and dim_of_sum(softmax) is None:
            return
        first, above, _ = self._path(softmax, up=True)
        last, below, _ = self._path(softmax, up=False) if above else (None, [], False)
        if first is None or last is None:
            return
        ordinary = _ORDINARY_OF_POWERS if op_name(softmax) in POWERS else _ORDINARY
        between = [x for x in (*reversed(above[1:]), softmax, *below[1:]) if x.op != "placeholder"]
        products = [x for x in (first, last) if op_name(x) in _UNKNOWN_PRODUCTS]
        for node in (*between, *products):
            if op_name(node) not in ordinary:
                raise Unsupported("unknown-op", f"{described(node)} ({where(node)})")
        frame = Frame.of(softmax, _dim(softmax))
        if frame is not None:  # says what is not known of the scores
            scores.below_softmax(softmax.all_input_nodes[0], frame)
        raise Unsupported("weights-unknown", "operations of attention in an order that no form has")

    def is_router(self, softmax: Node) -> bool:
        """Whether a softmax is over what parameters bring, and of no queries and keys."""
        found, _, is_over_them = self._path(softmax, up=True)
        return is_over_them and found is None

    def _path(self, softmax: Node, up: bool) -> tuple[Node | None, list[Node], bool]:
        """(the nearest product of attention, the nodes from a softmax to it, whether it is a router's softmax)."""
        step: Callable = self.flow.sources if up else self.flow.users
        start = _Step(softmax, _dim(softmax), frozenset())
        came_from: dict[_Step, _Step | None] = {start: None}
        is_routers = False
        for at in (waiting := [start]):
            for neighbour in (neighbours := [_arrived(x, at, up) for x in step(at.node)]):
                if self._may_be_reached(neighbour.node, at.node, up) and self._is_of_attention(
                    neighbour, at, up
                ):
                    return neighbour.node, _back(came_from, at), is_routers
                is_routers |= up and self._brings_keys(neighbour)
                for beyond in self._beyond(neighbour, at, up):
                    if beyond.node is not neighbour.node:
                        neighbours.append(beyond)  # what was projected, and may be a product
                    elif beyond not in came_from:
                        came_from[beyond] = at
                        waiting.append(beyond)
        return None, [], is_routers

    def _may_be_reached(self, product: Node, at: Node, up: bool) -> bool:
        """Whether a neighbour is a product; downwards none that was written into, whose data is another now."""
        written_into = not up and product in at.all_input_nodes
        return self._is_product(product) and not written_into

    def _is_product(self, node: Node) -> bool:
        """`linear` is one of activations, or else a projection."""
        if op_name(node) in _PRODUCTS:
            return True
        parts = factors(node) if op_name(node) == "linear" else None
        return parts is not None and not self.flow.is_made_of_parameters(parts.nodes[1])

    def _brings_keys(self, neighbour: _Step) -> bool:
        """Whether parameters make the dim that softmax is over, or are what tokens are scored by."""
        (other, keys, _), name = neighbour, op_name(neighbour.node)
        if keys is None:
            return False
        if name in _PROJECTIONS:
            return keys == _PROJECTIONS[name] % value(other).dim()
        product = factors(other) if name in _PRODUCTS else None
        return product is not None and any(
            (i or product.out[keys] in product.labels[i]) and self.flow.is_made_of_parameters(x)
            for i, x in enumerate(product.nodes)
        )

    def _beyond(self, neighbour: _Step, at: _Step, up: bool) -> Iterator[_Step]:
        """Where the path continues behind a neighbour: there, or above it where it is a projection."""
        other, name = neighbour.node, op_name(neighbour.node)
        if name in _ENDS:
            return
        if name in _PROJECTIONS and is_tensor(other):
            dim = _PROJECTIONS[name] % value(other).dim()
            if up:
                yield from _projected(other.args[0], neighbour, neighbour, dim)
            elif other.args[0] is at.node:
                yield from _projected(other, at, neighbour, dim)
        elif name not in _PRODUCTS:
            yield neighbour
        elif (product := factors(other)) is not None:
            yield from self._through(other, product, at, neighbour, up)

    def _through(
        self, node: Node, product: Factors, at: _Step, neighbour: _Step, up: bool
    ) -> Iterator[_Step]:
        """Through a product with parameters, which is a projection."""
        for i in (0, 1):
            data, weight = product.nodes[i], product.nodes[1 - i]
            labels, of_weight = product.labels[i], product.labels[1 - i]
            given = data if up else at.node
            if given is not data or not self.flow.is_made_of_parameters(weight):
                continue
            came, goes = (product.out, labels) if up else (labels, product.out)
            named = _labelled(neighbour if up else at, came)
            if named is None:
                continue
            keys, mixed = named
            contracted = {*labels} & {*of_weight} - {*product.out}
            brought = {*of_weight} & {*product.out} - {*labels}
            gone, new = (brought, contracted) if up else (contracted, brought)
            if keys in of_weight or mixed & {*of_weight} or not gone or not new:
                continue
            if not {keys, *mixed, *new} <= {*goes}:
                continue
            moved = frozenset(goes.index(x) for x in mixed | new)
            yield _Step(data if up else node, goes.index(keys), moved)

    def _is_of_attention(self, neighbour: _Step, at: _Step, up: bool) -> bool:
        """Whether a product is that of queries and keys (up), or that of weights and values."""
        node, product = neighbour.node, factors(neighbour.node)
        if neighbour.projected and not _are_common(product, neighbour if up else at, at.node, up):
            return False
        inputs = node.all_input_nodes if product is None else [*dict.fromkeys(product.nodes)]
        data = [x for x in inputs if not self.flow.is_made_of_parameters(x)]
        if len(data) > 1 or len(inputs) == len(data) == 1:
            return True
        return bool(
            up and data and product and self._has_learned_queries(product, neighbour, data[0])
        )

    def _has_learned_queries(self, product: Factors, at: _Step, keys: Node) -> bool:
        i = product.nodes.index(keys)
        queries, of_keys = product.nodes[1 - i], product.labels[i]
        of_queries = product.labels[1 - i]
        if at.keys is None or product.out[at.keys] in of_queries:
            return False
        shared = {*of_keys} & {*of_queries} & {*product.out}
        sizes = dict(zip(of_queries, value(queries).shape, strict=True))
        if i == 1 or any(statically_true(sizes[x] != 1) for x in shared):
            return True
        made = (op_name(x) for x in self.flow.all_sources(queries))
        return any(x in _PRODUCTS or x in _PROJECTIONS for x in made)


def _arrived(other: Node, at: _Step, up: bool) -> _Step:
    """A neighbour, with where the dims lie in it."""
    pair = (at.node, other) if up else (other, at.node)
    return _Step(
        other,
        across(*pair, at.keys, up),
        frozenset(across(*pair, x, up) for x in at.projected),
    )


def _projected(node: object, at: _Step, neighbour: _Step, dim: int) -> Iterator[_Step]:
    """Beyond a projection of one dim, which is no keys' and was not projected before."""
    taken = {neighbour.keys, at.keys, *neighbour.projected, *at.projected}
    if None not in taken and dim not in taken and isinstance(node, Node):
        yield _Step(node, neighbour.keys, neighbour.projected | {dim})


def _labelled(at: _Step, labels: str) -> tuple[str, set[str]] | None:
    if at.keys is None or None in at.projected:
        return None
    return labels[at.keys], {labels[x] for x in at.projected}


def _are_common(product: Factors | None, at: _Step, came: Node, up: bool) -> bool:
    """Whether what was projected are batch dims of a product."""
    if product is None or not (up or came in product.nodes):
        return False
    labels = product.out if up else product.labels[product.nodes.index(came)]
    named = _labelled(at, labels)
    common = {*product.out}.intersection(*product.labels)
    return named is not None and named[1] <= common


def _dim(softmax: Node) -> int | None:
    """That a softmax is over."""
    name, args = op_name(softmax), softmax.args
    position = {"gumbel_softmax": 4, "_masked_softmax": 2}.get(name, 1)
    default = -1 if name == "gumbel_softmax" else None
    dim = softmax.kwargs.get("dim", args[position] if len(args) > position else default)
    dim = dim_of_sum(softmax) if name in POWERS else dim
    return dim % value(softmax).dim() if isinstance(dim, int) and is_tensor(softmax) else None


def _back(came_from: dict[_Step, _Step | None], at: _Step | None) -> list[Node]:
    way = []
    while at is not None:
        way.append(at.node)
        at = came_from[at]
    return way[::-1]
