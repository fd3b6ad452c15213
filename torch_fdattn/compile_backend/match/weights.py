"""From a softmax down to the product with V: casts, copies, other orders of dims, and dropout that does nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node

from torch_fdattn.compile_backend.graph.nodes import described, op_name, tensor
from torch_fdattn.compile_backend.match.frame import Frame, Labels
from torch_fdattn.compile_backend.match.products import Product, product
from torch_fdattn.compile_backend.match.scores import cast_of
from torch_fdattn.compile_backend.report import Unsupported


@dataclass
class MatchedWeights:
    product: Product
    labels: Labels  #: of the dims of the weights that go into the product
    is_left: bool  #: whether they are its left factor
    #: from the softmax, excluded, to the product, excluded
    path: list[Node] = field(default_factory=list)
    without_last: bool = False  #: whether the last column, a sink's, is cut off


def follow(softmax: Node, frame: Frame) -> MatchedWeights:
    path: list[Node] = []
    node, cut, labels = softmax, None, frame.softmax
    while True:
        users = list(node.users)
        if len(users) != 1:
            what = "are used elsewhere" if users else "have no use"
            raise Unsupported("scores-used", f"the weights {what}")
        below = users[0]
        second = product(below)
        if second is not None:
            return MatchedWeights(second, labels, _is_left(second, node), path, cut is not None)
        moved = frame.below(below, node, labels)
        if moved is not None:
            labels = moved
        elif cut is None and _is_without_last(below) and frame.is_over_keys(labels, -1):
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


def _is_left(second: Product, weights: Node) -> bool:
    """Whether weights are the left factor of the product with v, or the right one."""
    if not second.is_plain:
        raise Unsupported("product", "the product with v is scaled, or something is added to it")
    if second.left is second.right:
        raise Unsupported("product", "the weights are multiplied by themselves")
    return second.left is weights


def _check_idle(node: Node) -> None:
    if node.op == "call_method":
        raise Unsupported("weights-unknown", "a method named dropout")
    # torch.dropout calls its training flag `train`.
    given = dict(zip(("input", "p", "training"), node.args, strict=False)) | node.kwargs
    p, training = given.get("p", 0.5), given.get("training", given.get("train", True))
    if not (p == 0 or training is False):
        raise Unsupported("dropout", f"dropout with p = {p} in training")
