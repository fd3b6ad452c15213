"""From a softmax down to the product with V: casts, and dropout that does nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node

from torch_fdattn.compile_backend.graph.nodes import described, op_name, tensor
from torch_fdattn.compile_backend.match.products import Product, product
from torch_fdattn.compile_backend.match.scores import cast_of
from torch_fdattn.compile_backend.report import Unsupported


@dataclass
class MatchedWeights:
    product: Product
    value: Node  #: V as the product has it
    labels: tuple[str, str]  #: of the weights and of V in the product
    #: from the softmax, excluded, to the product, excluded
    path: list[Node] = field(default_factory=list)
    without_last: bool = False  #: whether the last column, a sink's, is cut off


def follow(softmax: Node) -> MatchedWeights:
    path: list[Node] = []
    node, cut = softmax, None
    while True:
        users = list(node.users)
        if len(users) != 1:
            what = "are used elsewhere" if users else "have no use"
            raise Unsupported("scores-used", f"the weights {what}")
        below = users[0]
        second = product(below)
        if second is not None:
            weights = _with_weights(second, node, path)
            weights.without_last = cut is not None
            return weights
        if cut is None and _is_without_last(below):
            cut = below
        elif op_name(below) == "dropout":
            _check_idle(below)
        elif cast_of(below) is not node:
            name = described(below)
            raise Unsupported(
                "scores-used" if below.op == "output" else "weights-unknown", _used_by(name)
            )
        path.append(below)
        node = below


def _is_without_last(node: Node) -> bool:
    """x[..., :-1]"""
    if op_name(node) != "getitem":
        return False
    indices = node.args[1] if isinstance(node.args[1], tuple) else ()
    *others, last = indices or (None,)
    rank = tensor(node).dim()
    everything = [Ellipsis] if Ellipsis in others else [slice(None)] * (rank - 1)
    return last == slice(None, -1) and others == everything


def _used_by(name: str) -> str:
    return f"the weights go into {name}, not into a product with v"


def _with_weights(second: Product, weights: Node, path: list[Node]) -> MatchedWeights:
    left, right, _out = second.labels
    if second.factor != 1:
        raise Unsupported("product", "the product with v is scaled")
    if second.left is weights and second.right is not weights:
        return MatchedWeights(second, second.right, (left, right), path)
    # `bkhd,bhqk->bqhd`: einsum alone names what is summed; elsewhere weights on the right are another product.
    if second.right is weights and second.left is not weights and op_name(second.node) == "einsum":
        return MatchedWeights(second, second.left, (right, left), path)
    raise Unsupported("product", "the weights are not the left factor of the product with v")


def _check_idle(node: Node) -> None:
    if node.op == "call_method":
        raise Unsupported("weights-unknown", "a method named dropout")
    # torch.dropout calls its training flag `train`.
    given = dict(zip(("input", "p", "training"), node.args, strict=False)) | node.kwargs
    p, training = given.get("p", 0.5), given.get("training", given.get("train", True))
    if not (p == 0 or training is False):
        raise Unsupported("dropout", f"dropout with p = {p} in training")
