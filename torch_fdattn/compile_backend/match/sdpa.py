"""Calls of `torch.nn.functional.scaled_dot_product_attention`, in all forms that Dynamo writes them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from torch_fdattn.compile_backend.graph.nodes import (
    arguments,
    is_tensor,
    op_name,
    statically_true,
    tensor,
)
from torch_fdattn.compile_backend.masks.recovery import MaskRecovery, top_left
from torch_fdattn.compile_backend.masks.terms import MaskTerm
from torch_fdattn.compile_backend.match.attention import MatchedAttention, score_sizes
from torch_fdattn.compile_backend.match.operands import H, operand_of
from torch_fdattn.compile_backend.report import Unsupported

FORM = "scaled_dot_product_attention"


def match(node: Node, masks: MaskRecovery) -> MatchedAttention | None:
    """The attention that a node is; None where it is none; raises `Unsupported`."""
    if op_name(node) != FORM:
        return None
    q, k, v, attn_mask, dropout_p, is_causal, scale, gqa = arguments(
        node, query=None, key=None, value=None, attn_mask=None, dropout_p=0.0, is_causal=False,
        scale=None, enable_gqa=False,
    )  # fmt: skip
    tensor(node)
    given = [operand_of(x) for x in (q, k, v)]
    if len({tensor(x.node).dim() for x in given}) > 1:
        raise Unsupported("rank", "q, k and v have different ranks")
    # The call drops out whenever p > 0: it knows no training mode.
    if not isinstance(dropout_p, (int, float)) or dropout_p != 0:
        raise Unsupported("dropout", f"dropout_p is {dropout_p}")
    if not isinstance(is_causal, bool) or not isinstance(gqa, bool):
        raise Unsupported("metadata", "is_causal or enable_gqa is not known")
    if scale is not None and not isinstance(scale, (int, float)):
        raise Unsupported("scale", "the scale is not known before the call")
    attention = MatchedAttention(FORM, node, *given, scale=scale, masked=attn_mask is not None)
    attention.out_dims = tuple(i for i, dim in enumerate(attention.q.dims) if dim is not None)
    terms = []
    if attn_mask is not None:
        if not is_tensor(attn_mask):
            raise Unsupported("mask", "attn_mask is no tensor")
        if is_causal:
            raise Unsupported("mask", "both attn_mask and is_causal are given")
        # A bool mask is True where a key is seen; any other is added.
        kind = "visible" if tensor(attn_mask).dtype == torch.bool else "added"
        dims = ("b", "h", "q", "k") if tensor(q).dim() == 4 else ("b", "q", "k")
        terms = [MaskTerm(attn_mask, kind, fill=float("-inf"), dims=dims)]
    attention.mask = top_left(score_sizes(*given[:2])) if is_causal else masks.recover(
        terms, score_sizes(*given[:2]), tensor(q).dtype, node, safe=True
    )  # fmt: skip
    if terms:
        attention.notes.append(f"mask: {attention.mask.name}")
    with_copies = replace(attention, between=[], notes=[*attention.notes])
    attention.k, attention.v = (attention.unrepeated(x) for x in (attention.k, attention.v))
    # Where only one of them was repeated, the copy is what makes their heads equally many.
    return attention if statically_true(attention.k.size(H) == attention.v.size(H)) else with_copies
