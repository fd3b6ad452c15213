"""From a softmax's input up to the product `q kᵀ`: scalings, casts and masks on the way.

The walk upwards reaches last what was computed first: a scaling that it reaches before a mask multiplies what the mask wrote.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from torch_fdattn.compile_backend.graph.constants import number
from torch_fdattn.compile_backend.graph.nodes import (
    arguments,
    described,
    equal_sizes,
    is_tensor,
    op_name,
    statically_true,
    tensor,
    value,
    where_arguments,
)
from torch_fdattn.compile_backend.masks.terms import MaskTerm
from torch_fdattn.compile_backend.match.operands import scaling
from torch_fdattn.compile_backend.match.products import Product, product
from torch_fdattn.compile_backend.report import Unsupported

_CASTS = ("to", "type", "type_as", "float", "half", "bfloat16", "double")


@dataclass
class MatchedScores:
    product: Product
    factor: float = 1.0  #: of the product
    softcap: float = 0.0
    masks: list[MaskTerm] = field(default_factory=list)
    path: list[Node] = field(default_factory=list)  #: the nodes between
    sinks: tuple[Node, Node] | None = (
        None  #: a last column that is concatenated to the scores, and the concatenation
    )


def below_softmax(node: object) -> MatchedScores:
    """The scores that go into a softmax, with or without sinks; subtracting their maximum changes nothing."""
    tensor(node)
    unshifted = _shifted_by_maximum(node)
    if unshifted is not None:
        source, between = unshifted
        found = below_softmax(source)
        found.path += [*between, node]
        return found
    if op_name(node) != "cat":
        return follow(node)
    parts, dim = arguments(node, tensors=None, dim=0)
    last = value(node).dim() - 1
    if (
        dim not in (-1, last)
        or len(parts) != 2
        or not statically_true(value(parts[1]).shape[last] == 1)
    ):
        raise Unsupported(
            "scores-unknown", "a concatenation of scores with something that is no sink"
        )
    found = follow(parts[0])
    found.sinks = parts[1], node
    found.path.append(node)
    return found


def _shifted_by_maximum(node: Node) -> tuple[Node, list[Node]] | None:
    """(x, the nodes of the maximum) where a node is x - x.max(-1, keepdim=True).values."""
    if op_name(node) != "sub" or len(node.args) != 2 or node.kwargs:
        return None
    source, maximum = node.args
    between = [maximum]
    if (op_name(maximum) == "getitem" and maximum.args[1] == 0) or (
        getattr(maximum, "target", None) is getattr and maximum.args[1] == "values"
    ):
        between.append(maximum.args[0])
    if op_name(between[-1]) not in (("max",) if len(between) > 1 else ("amax",)):
        return None
    x, dim, keepdim = arguments(between[-1], input=None, dim=None, keepdim=False)
    if x is not source or dim not in (-1, value(x).dim() - 1) or keepdim is not True:
        return None
    return source, between


def follow(node: object, factor: float = 1.0) -> MatchedScores:
    """The scores that a node is, where `factor` is multiplied to it afterwards."""
    tensor(node)
    found = product(node)
    if found is not None:
        return MatchedScores(found, factor * found.factor)
    scores = _behind(node, factor)
    scores.path.append(node)
    return scores


def _behind(node: Node, factor: float) -> MatchedScores:
    """The scores that an operation is given, with what it does to them."""
    below = cast_of(node)
    if below is not None:
        found = follow(below, factor)
        found.masks = [_narrowed(mask, value(node).dtype) for mask in found.masks]
        return found
    scaled = scaling(node)
    if scaled is not None:
        return follow(scaled[0], factor * scaled[1])
    name = op_name(node)
    if name == "tanh":
        return _capped(node, factor)
    if name in ("add", "sub"):
        return _added(node, name, factor)
    if name in ("masked_fill", "where"):
        return _filled(node, name, factor)
    raise Unsupported("scores-unknown", f"the scores come from {described(node)}")


def cast_of(node: Node) -> Node | None:
    """x, where a node is x in another dtype, or x itself (`contiguous`)."""
    name = op_name(node)
    if name == "contiguous" or name in _CASTS:
        source = node.args[0]
        if is_tensor(source) and is_tensor(node) and value(source).device == value(node).device:
            return source if value(node).is_floating_point() else None
    return None


def _narrowed(mask: MaskTerm, dtype: torch.dtype) -> MaskTerm:
    return replace(mask, dtype=min(mask.dtype, dtype, key=lambda x: torch.finfo(x).max))


def _capped(node: Node, cap: float) -> MatchedScores:
    """cap · tanh(factor · product), which is the product times cap · factor under that cap."""
    (source,) = arguments(node, input=None)
    found = follow(source)
    if found.masks or found.softcap:
        raise Unsupported("scores-unknown", "tanh of scores that are masked or capped already")
    if not 1e-37 <= cap <= 1e37:
        raise Unsupported("scores-unknown", f"a cap of {cap:g}, not a positive number")
    found.factor *= cap
    found.softcap = cap
    return found


def _added(node: Node, name: str, factor: float) -> MatchedScores:
    """scores + mask, in either order, or scores - mask; the scores are what comes from a product."""
    if len(node.args) != 2 or node.kwargs:
        raise Unsupported("scores-unknown", f"{name} with alpha")
    reason = None
    orders = (node.args, node.args[::-1]) if name == "add" else (node.args,)
    for scores, mask in orders:
        if not is_tensor(scores) or not is_tensor(mask) or not _keeps_shape(scores, node):
            continue
        try:
            found = follow(scores, factor)
        except Unsupported as unsupported:
            reason = reason or unsupported
            continue
        factor = factor if name == "add" else -factor
        found.masks.append(MaskTerm(mask, "added", factor=factor, dtype=value(node).dtype))
        return found
    raise reason or Unsupported(
        "scores-unknown", "something that is no mask is added to the scores"
    )


def _filled(node: Node, name: str, factor: float) -> MatchedScores:
    kind = "hidden"
    if name == "masked_fill":
        scores, mask, fill = arguments(node, input=None, mask=None, value=None)
    else:
        mask, scores, fill = where_arguments(node)
        kind = "visible"
        if number(scores) is not None:
            kind, scores, fill = "hidden", fill, scores
    fill = number(fill)
    if fill is None or not is_tensor(mask) or not is_tensor(scores):
        raise Unsupported("mask", f"{name} of the scores with something that is no known number")
    if not _keeps_shape(scores, node):
        raise Unsupported("mask", "a mask that has more entries than the scores")
    found = follow(scores, factor)
    found.masks.append(MaskTerm(mask, kind, fill, factor, value(node).dtype))
    return found


def _keeps_shape(scores: Node, node: Node) -> bool:
    return equal_sizes(value(scores).shape, value(node).shape)
