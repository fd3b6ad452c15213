"""From a softmax's input up to the product `q kᵀ`: scalings, casts, masks and other orders of dims on the way.

The walk upwards reaches last what was computed first: a scaling that it reaches before a mask multiplies what the mask wrote.
"""

from __future__ import annotations

import math
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
from torch_fdattn.compile_backend.masks.terms import Floor, MaskTerm
from torch_fdattn.compile_backend.masks.values import hides
from torch_fdattn.compile_backend.match.attention import Temperature
from torch_fdattn.compile_backend.match.frame import Frame, Labels
from torch_fdattn.compile_backend.match.operands import scaling
from torch_fdattn.compile_backend.match.products import Product, product
from torch_fdattn.compile_backend.report import Unsupported

_CASTS = (
    "bfloat16", "clone", "contiguous", "double", "float", "half", "to", "type", "type_as",
)  # fmt: skip


@dataclass
class MatchedScores:
    product: Product
    labels: Labels  #: of the product's dims
    factor: float = 1.0  #: of the product
    softcap: float = 0.0
    masks: list[MaskTerm] = field(default_factory=list)
    temperatures: list[Temperature] = field(default_factory=list)
    floor: Floor | None = None
    path: list[Node] = field(default_factory=list)  #: the nodes between
    sinks: tuple[Node, Node] | None = (
        None  #: a last column that is concatenated to the scores, and the concatenation
    )


def below_softmax(node: object, frame: Frame) -> MatchedScores:
    """The scores that go into a softmax, with or without sinks; subtracting their maximum changes nothing."""
    tensor(node)
    unshifted = _shifted_by_maximum(node, frame)
    if unshifted is not None:
        source, between = unshifted
        found = below_softmax(source, frame)
        found.path += [*between, node]
        return found
    walk, labels = _Walk(frame), frame.softmax
    if op_name(node) != "cat":
        return walk.follow(node, labels)
    parts, dim = arguments(node, tensors=None, dim=0)
    last = value(node).dim() - 1
    if (
        dim not in (-1, last)
        or frame.dim != last
        or len(parts) != 2
        or not statically_true(value(parts[1]).shape[last] == 1)
    ):
        raise Unsupported(
            "scores-unknown", "a concatenation of scores with something that is no sink"
        )
    found = walk.follow(parts[0], labels)
    found.sinks = parts[1], node
    found.path.append(node)
    return found


def _shifted_by_maximum(node: Node, frame: Frame) -> tuple[Node, list[Node]] | None:
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
    if x is not source or not frame.is_over_keys(frame.softmax, dim) or keepdim is not True:
        return None
    return source, between


class _Walk:
    """Follows scores upwards; `labels` name the dims of the node, `factor` is multiplied to it afterwards."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame

    def follow(self, node: object, labels: Labels, factor: float = 1.0) -> MatchedScores:
        """The scores that a node is."""
        tensor(node)
        found = product(node)
        if found is None:
            scores = self._behind(node, labels, factor)
            scores.path.append(node)
            return scores
        scores = MatchedScores(found, labels, factor * found.factor)
        if found.added is not None:
            added, beta = found.added
            dtype = value(node).dtype
            scores.masks.append(
                MaskTerm(added, "added", factor=factor * beta, dtype=dtype, dims=labels)
            )
        return scores

    def _behind(self, node: Node, labels: Labels, factor: float) -> MatchedScores:
        """The scores that an operation is given, with what it does to them."""
        below = cast_of(node)
        if below is not None:
            found = self.follow(below, labels, factor)
            dtype = value(node).dtype
            found.masks = [_narrowed(mask, dtype) for mask in found.masks]
            if found.floor and torch.finfo(dtype).max < torch.finfo(found.floor.dtype).max:
                raise Unsupported(
                    "mask-value", f"scores are limited to {found.floor.number:g}, then {dtype}"
                )
            return found
        scaled = scaling(node)
        if scaled is not None:
            return self.follow(scaled[0], labels, factor * scaled[1])
        moved = self.frame.above(node, labels)
        if moved is not None:
            return self.follow(*moved, factor)
        name = op_name(node)
        if name == "tanh":
            return self._capped(node, labels, factor)
        if name in ("add", "sub"):
            return self._added(node, labels, name, factor)
        if name in ("masked_fill", "where"):
            return self._filled(node, labels, name, factor)
        if name in ("mul", "div"):
            return self._at_temperature(node, labels, name, factor)
        if name in ("clamp", "clamp_min", "max", "maximum"):
            return self._floored(node, labels, name, factor)
        raise Unsupported("scores-unknown", f"the scores come from {described(node)}")

    def _capped(self, node: Node, labels: Labels, cap: float) -> MatchedScores:
        """cap · tanh(factor · product), which is the product times cap · factor under that cap."""
        (source,) = arguments(node, input=None)
        found = self.follow(source, labels)
        if found.masks or found.softcap or found.floor:
            raise Unsupported("scores-unknown", "tanh of scores that are masked or capped already")
        if not 1e-37 <= cap <= 1e37:
            raise Unsupported("scores-unknown", f"a cap of {cap:g}, not a positive number")
        found.factor *= cap
        found.softcap = cap
        return found

    def _added(self, node: Node, labels: Labels, name: str, factor: float) -> MatchedScores:
        """scores + mask, in either order, or scores - mask; the scores are what comes from a product."""
        if len(node.args) != 2 or node.kwargs:
            raise Unsupported("scores-unknown", f"{name} with alpha")
        reason = None
        orders = (node.args, node.args[::-1]) if name == "add" else (node.args,)
        for scores, mask in orders:
            if not is_tensor(scores) or not is_tensor(mask) or not _keeps_shape(scores, node):
                continue
            try:
                found = self.follow(scores, labels, factor)
            except Unsupported as unsupported:
                reason = reason or unsupported
                continue
            factor = factor if name == "add" else -factor
            return _masked(found, MaskTerm(mask, "added", factor=factor, dtype=value(node).dtype, dims=labels))  # fmt: skip
        raise reason or Unsupported(
            "scores-unknown", "something that is no mask is added to the scores"
        )

    def _filled(self, node: Node, labels: Labels, name: str, factor: float) -> MatchedScores:
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
            raise Unsupported(
                "mask", f"{name} of the scores with something that is no known number"
            )
        if not _keeps_shape(scores, node):
            raise Unsupported("mask", "a mask that has more entries than the scores")
        found = self.follow(scores, labels, factor)
        return _masked(found, MaskTerm(mask, kind, fill, factor, value(node).dtype, labels))

    def _at_temperature(
        self, node: Node, labels: Labels, name: str, factor: float
    ) -> MatchedScores:
        """The scores times, or over, a number that the call knows, which is multiplied into q."""
        if len(node.args) != 2 or node.kwargs:
            raise Unsupported("scores-unknown", f"{name} with other arguments")
        reason = None
        orders = (node.args, node.args[::-1]) if name == "mul" else (node.args,)
        for scores, by in orders:
            if not is_tensor(scores) or not _keeps_shape(scores, node):
                continue
            if not self._is_temperature(by, labels):
                continue
            try:
                found = self.follow(scores, labels, factor)
            except Unsupported as unsupported:
                reason = reason or unsupported
                continue
            if found.masks or found.softcap or found.floor:
                raise Unsupported(
                    "scores-unknown", "a temperature from data behind a mask or a softcap"
                )
            found.temperatures.append(Temperature(by, name, labels))
            return found
        raise reason or Unsupported(
            "scores-unknown",
            f"{name} of the scores with something that is not the same for all keys",
        )

    def _is_temperature(self, by: object, labels: Labels) -> bool:
        """Whether it is one number, or one of each query, head or sequence."""
        if isinstance(by, Node) and isinstance(value(by), (torch.SymInt, torch.SymFloat)):
            return True
        if not is_tensor(by) or not tensor(by).is_floating_point():
            return False
        shape = tensor(by).shape
        sizes = zip(labels[len(labels) - len(shape) :], shape, strict=True)
        return all(
            statically_true(n == 1) for label, n in sizes if self.frame.is_over_keys((label,), 0)
        )

    def _floored(self, node: Node, labels: Labels, name: str, factor: float) -> MatchedScores:
        """The scores, or a number so low that it hides, where they are lower."""
        if name == "clamp":
            scores, floor, ceiling = arguments(node, input=None, min=None, max=None)
        else:
            (scores, floor), ceiling = [*node.args, *node.kwargs.values()][:2], None
            if len(node.args) + len(node.kwargs) != 2:
                scores = None
        if name in ("max", "maximum") and number(scores) is not None:
            scores, floor = floor, scores
        floor = number(floor)
        if floor is None or ceiling is not None or not is_tensor(scores):
            raise Unsupported("scores-unknown", f"{name} of the scores with no known number")
        dtype = value(node).dtype
        if not _keeps_shape(scores, node) or value(scores).dtype != dtype or factor != 1:
            raise Unsupported(
                "scores-unknown", f"{name} of scores that are cast or scaled by it, or behind it"
            )
        if not hides(floor, dtype):
            raise Unsupported(
                "mask-value",
                f"scores are limited to {floor:g}, which does not hide them for certain",
            )
        found = self.follow(scores, labels)
        if floor == -math.inf:  # which limits nothing
            return found
        if found.floor:
            raise Unsupported("scores-unknown", "scores that are limited twice")
        found.floor = Floor(floor, dtype, halves_ties=name in ("max", "maximum"))
        return found


def _masked(found: MatchedScores, mask: MaskTerm) -> MatchedScores:
    if found.floor:
        raise Unsupported("scores-unknown", "a mask behind a limit of the scores")
    found.masks.append(mask)
    return found


def cast_of(node: Node) -> Node | None:
    """x, where a node is x in another dtype, or a copy of x."""
    name = op_name(node)
    if name in _CASTS:
        source = node.args[0]
        if is_tensor(source) and is_tensor(node) and value(source).device == value(node).device:
            return source if value(node).is_floating_point() else None
    return None


def _narrowed(mask: MaskTerm, dtype: torch.dtype) -> MaskTerm:
    return replace(mask, dtype=min(mask.dtype, dtype, key=lambda x: torch.finfo(x).max))


def _keeps_shape(scores: Node, node: Node) -> bool:
    return equal_sizes(value(scores).shape, value(node).shape)
