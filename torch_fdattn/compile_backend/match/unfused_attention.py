"""Unfused attention: a product, softmax over its last dim, a product; between them scalings, casts, masks.

The softmax is where a match begins. Upwards it follows the scores to `q kᵀ`, downwards the weights to the
product with V. Any other operation on the way is named in the report, and nothing is changed.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch.fx import Node

from torch_fdattn.compile_backend.graph.mutations import writes
from torch_fdattn.compile_backend.graph.nodes import (
    arguments,
    asks_for_shape,
    described,
    equal_sizes,
    op_name,
    tensor,
)
from torch_fdattn.compile_backend.masks.recovery import MaskRecovery, sinks_of
from torch_fdattn.compile_backend.match import scores as scores_of
from torch_fdattn.compile_backend.match import weights as weights_of
from torch_fdattn.compile_backend.match.attention import MatchedAttention
from torch_fdattn.compile_backend.match.operands import B, H, Operand, trace_operand
from torch_fdattn.compile_backend.match.products import Product
from torch_fdattn.compile_backend.match.scores import MatchedScores
from torch_fdattn.compile_backend.match.weights import MatchedWeights
from torch_fdattn.compile_backend.report import Unsupported

FORM = "matmul, softmax, matmul"
#: The second gives zeros where -inf hides all, as SDPA does.
SOFTMAX = ("softmax", "_safe_softmax")


def match(node: Node, masks: MaskRecovery) -> MatchedAttention | None:
    """The attention whose softmax a node is; None where it is none's; raises `Unsupported`."""
    if op_name(node) not in SOFTMAX:
        return None
    source, dim = _softmax(node)
    scores, above = _or_unsupported(scores_of.below_softmax, source)
    weights, below = _or_unsupported(weights_of.follow, node)
    if scores is None and weights is None:
        return None  # a classifier's or a router's softmax, or in no form of ours (`unmatched.py`)
    if above or below:
        raise above or below
    last = tensor(node).dim() - 1
    if dim not in (-1, last):
        raise Unsupported("softmax-dim", f"the softmax is over dimension {dim} of {last + 1}")
    between = [*scores.path, scores.product.node, node, *weights.path]
    _check_unused_elsewhere(between, weights.product.node)
    attention = _operands(scores, weights)
    attention.between += between
    attention.masked = bool(scores.masks)
    dtype, result = tensor(scores.product.node).dtype, weights.product.node
    if dtype != tensor(result).dtype:
        raise Unsupported("dtype", f"the scores are {dtype}, the result is {tensor(result).dtype}")
    attention.mask = masks.recover(
        scores.masks, attention.sizes, tensor(scores.product.node).dim(), dtype, result,
        safe=op_name(node) == "_safe_softmax", sinks=scores.sinks is not None,
    )  # fmt: skip
    if (scores.sinks is None) == weights.without_last:
        raise Unsupported(
            "scores-unknown", "a column beside the scores that is not cut off, or no sink's"
        )
    if scores.sinks is not None:
        column, joined = scores.sinks
        attention.sinks = sinks_of(column, attention.sizes), joined
        attention.mask.empty = "zero"  # where all keys are hidden the sink has all the weight
        attention.notes.append("sinks")
    if attention.softcap:
        attention.notes.append(f"softcap {attention.softcap:g}")
    if scores.masks:
        attention.notes.append(f"mask: {attention.mask.name}")
    return attention


def _or_unsupported(follow, node):
    try:
        return follow(node), None
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
                if writes(user):
                    raise Unsupported(
                        "in-place", f"{described(user)} writes into scores or weights"
                    )
                raise Unsupported(
                    "scores-used", f"scores or weights also go into {described(user)}"
                )


def _operands(scores: MatchedScores, weights: MatchedWeights) -> MatchedAttention:
    """q, k and v with where their dims lie, from the labels of both products."""
    q, k, out = _roles(scores.product)
    p_labels, v_labels = weights.labels
    result_labels = weights.product.labels[2]
    if len(out) != len(p_labels):
        raise Unsupported("rank")
    # The scores are (batch, head, query, key); so the weights, whose labels name them in the second product.
    contracted = ({*q[1]} & {*k[1]}) - {*out}
    summed = p_labels[-1]
    dim_of_v = {*v_labels} - {*p_labels}
    leading = {*p_labels[:-1]}
    if (
        len(contracted) != 1
        or len(dim_of_v) != 1
        or summed not in v_labels
        or {*result_labels} != leading | dim_of_v
        or {*v_labels} != {*p_labels[:-2], summed} | dim_of_v
    ):
        raise Unsupported("product", "the product of the weights is not one with v")
    (depth,), (v_depth,) = contracted, dim_of_v
    batch = out[:-2]
    head = batch[1] if len(batch) == 2 else ""
    p_head = p_labels[1] if len(batch) == 2 else ""
    q_operand = _placed(*q, [batch[0], head, out[-2], depth])
    k_operand = _placed(*k, [batch[0], head, out[-1], depth])
    v_operand = _placed(weights.value, v_labels, [p_labels[0], p_head, summed, v_depth])
    between: list[Node] = []
    q_operand = trace_operand(q_operand, between, scalings=True)
    k_operand = trace_operand(k_operand, between, scalings=True)
    roles = [p_labels[0], p_head, p_labels[-2], v_depth]
    attention = MatchedAttention(
        FORM, weights.product.node, q_operand, k_operand, v_operand,
        out_dims=tuple(roles.index(label) for label in result_labels),
        scale=scores.factor * q_operand.scale * k_operand.scale, softcap=scores.softcap,
        between=between,
    )  # fmt: skip
    if k_operand.repeats:
        attention.note_repeated_heads()
    attention.v = attention.unrepeated(v_operand)
    _check_broadcast(attention, scores.product)
    return attention


def _roles(product: Product) -> tuple[tuple[Node, str], tuple[Node, str], str]:
    """((q, its labels), (k, its labels), the labels of the scores): softmax is over the keys, the last dim."""
    left, right, out = product.labels
    a, b = (product.left, left), (product.right, right)
    if len(out) not in (3, 4) or len({len(left), len(right), len(out)}) != 1:
        raise Unsupported("rank", "a product of tensors of other than 3 or 4 dimensions")
    if out[-1] in left:
        a, b = b, a
    query_alone, key_alone = out[-2] not in b[1], out[-1] not in a[1]
    if not (query_alone and key_alone and {*out[:-1]} <= {*a[1]} and {*out[:-2]} <= {*b[1]}):
        raise Unsupported(
            "product", "the product before the softmax is not one of queries and keys"
        )
    return a, b, out


def _placed(node: Node, labels: str, order: list[str]) -> Operand:
    tensor(node)
    return Operand(node, tuple(labels.index(label) if label else None for label in order))


def _check_broadcast(attention: MatchedAttention, product: Product) -> None:
    """q's batch and heads are the scores': not broadcast from one."""
    out = tensor(product.node)
    sizes = [attention.q.size(B), *([attention.q.size(H)] if out.dim() == 4 else [])]
    if not equal_sizes(sizes, out.shape[: len(sizes)]):
        raise Unsupported("batch-broadcast", "q is broadcast over batches or heads")
