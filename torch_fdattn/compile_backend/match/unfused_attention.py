"""Unfused attention: a product, softmax over its keys, a product; between them scalings, casts, masks.

The softmax is where a match begins. Upwards it follows the scores to `q kᵀ`, downwards the weights to the
product with V. Any other operation on the way is named in the report, and nothing is changed.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch.fx import Node

from torch_fdattn.compile_backend.graph.functional import TWIN
from torch_fdattn.compile_backend.graph.mutations import writes
from torch_fdattn.compile_backend.graph.nodes import (
    arguments,
    asks_for_shape,
    described,
    op_name,
    tensor,
)
from torch_fdattn.compile_backend.masks.recovery import MaskRecovery, sinks_of
from torch_fdattn.compile_backend.match import scores as scores_of
from torch_fdattn.compile_backend.match import weights as weights_of
from torch_fdattn.compile_backend.match.attention import MatchedAttention
from torch_fdattn.compile_backend.match.frame import Frame
from torch_fdattn.compile_backend.match.roles import attention_of
from torch_fdattn.compile_backend.report import Unsupported

FORM = "matmul, softmax, matmul"
#: The second gives zeros where -inf hides all, as SDPA does.
SOFTMAX = ("softmax", "_safe_softmax")


def match(node: Node, masks: MaskRecovery) -> MatchedAttention | None:
    """The attention whose softmax a node is; None where it is none's; raises `Unsupported`."""
    if op_name(node) not in SOFTMAX:
        return None
    source, dim = _softmax(node)
    frame = Frame.of(node, dim)
    if frame is None:
        return None
    scores, above = _or_unsupported(scores_of.below_softmax, source, frame)
    weights, below = _or_unsupported(weights_of.follow, node, frame)
    moved = weights is not None and weights.labels != frame.softmax
    if scores is None and (weights is None or moved):
        return None  # a classifier's or a router's softmax, or in no form of ours (`unmatched.py`)
    if above or below:
        raise above or below
    attention = attention_of(FORM, scores, weights, frame)
    between = [*scores.path, scores.product.node, node, *weights.path]
    if attention.result is not weights.product.node:
        between.append(weights.product.node)
    _check_unused_elsewhere(between, attention.result)
    attention.between += between
    attention.masked = bool(scores.masks)
    dtype, result = tensor(scores.product.node).dtype, attention.result
    if dtype != tensor(result).dtype:
        raise Unsupported("dtype", f"the scores are {dtype}, the result is {tensor(result).dtype}")
    attention.mask = masks.recover(
        scores.masks, attention.sizes, dtype, result, safe=op_name(node) == "_safe_softmax",
        sinks=scores.sinks is not None, groups=attention.groups, floor=scores.floor,
    )  # fmt: skip
    if (scores.sinks is None) == weights.without_last:
        raise Unsupported(
            "scores-unknown", "a column beside the scores that is not cut off, or no sink's"
        )
    if scores.sinks is not None:
        column, joined = scores.sinks
        if attention.softmax_dims != ("b", "h", "q", "k"):
            raise Unsupported(
                "scores-unknown", "sinks beside scores in another order of dimensions"
            )
        attention.sinks = sinks_of(column, attention.sizes), joined
        attention.mask.empty = "zero"  # where all keys are hidden the sink has all the weight
        attention.notes.append("sinks")
    if attention.softcap:
        attention.notes.append(f"softcap {attention.softcap:g}")
    if scores.masks:
        attention.notes.append(f"mask: {attention.mask.name}")
    return attention


def _or_unsupported(follow, node, frame):
    try:
        return follow(node, frame), None
    except Unsupported as unsupported:
        return None, unsupported


def _softmax(node: Node) -> tuple[object, object]:
    """(input, dim)."""
    if node.target is F.softmax:
        source, dim, _, _ = arguments(node, input=None, dim=None, _stacklevel=3, dtype=None)
    else:
        source, dim, _ = arguments(node, input=None, dim=None, dtype=None)
    return source, dim


def _check_unused_elsewhere(between: list[Node], result: Node) -> None:
    inside = {*between, result}
    for node in between:
        for user in node.users:
            if user not in inside and not asks_for_shape(user, node):
                if writes(user) or TWIN in user.meta:
                    raise Unsupported(
                        "in-place", f"{described(user)} writes into scores or weights"
                    )
                raise Unsupported(
                    "scores-used", f"scores or weights also go into {described(user)}"
                )
