"""The output of queries that see no key, where our ops give zeros and the original gave NaN or the mean of all values."""

from __future__ import annotations

import math
import operator

import torch
from torch.fx import Node

from torch_fdattn.compile_backend.emit.mask_arguments import MaskArguments
from torch_fdattn.compile_backend.graph.adder import Adder
from torch_fdattn.compile_backend.graph.nodes import statically_true, value
from torch_fdattn.compile_backend.match.attention import MatchedAttention
from torch_fdattn.compile_backend.match.operands import D
from torch_fdattn.compile_backend.report import Unsupported


def with_empty_rows(
    add: Adder, attention: MatchedAttention, masks: MaskArguments, pair: Node, out: Node,
    qkv: tuple[Node, Node, Node],
) -> Node:  # fmt: skip
    """`out` with what eager gives such queries; `pair` are the op's (out, lse)."""
    empty, needs_gradient = attention.mask.empty, value(attention.result).requires_grad
    hidden = add(operator.eq, add(operator.getitem, pair, 1), -math.inf)
    hidden = add("unsqueeze", hidden, -1)
    if empty == "nan" and not needs_gradient:
        return add("masked_fill", out, hidden, math.nan)
    mean = _mean_of_values(add, attention, *qkv)
    if empty == "mean":
        return add(torch.where, hidden, mean, out)
    # NaN for the gradients too: of no row that sees a key, since 0 · mean has none.
    zeros = add(torch.zeros_like, add("detach", mean))
    factor = add(torch.where, hidden, math.nan, zeros)
    reached = [mean, *_pair_terms(add, attention, masks, hidden, *qkv[:2])]
    reached += _learned_terms(add, attention, masks, hidden)
    for each in reached:
        out = add(operator.add, out, add(operator.mul, factor, each))
    return out


def _pair_terms(
    add: Adder, attention: MatchedAttention, masks: MaskArguments, hidden: Node, q: Node, k: Node
) -> list[Node]:
    """Numbers through which NaN reaches q and k, but for pairs of them that are filled."""
    fills = attention.mask.nans.fills
    if not fills:
        return []
    summed = masks.visible(fills)
    rows = add(operator.and_, hidden, add("any", summed, -1, keepdim=True))
    keys = add("unsqueeze", add("any", add(operator.and_, hidden, summed), -2), -1)
    queries = add("sum", add(torch.where, rows, q, 0.0), -1, keepdim=True)
    used = add(torch.where, keys, _with_heads(add, k, value(q).shape[1]), 0.0)
    # Zero where no row is hidden, so that 0 · it is no infinity's.
    return [queries, add("sum", used, (-1, -2), keepdim=True)]


def _learned_terms(
    add: Adder, attention: MatchedAttention, masks: MaskArguments, hidden: Node
) -> list[Node]:
    """Numbers through which NaN reaches what is learned and added, where no fill comes behind."""
    reached = []
    for kept, fills in attention.mask.nans.learned:
        where = add(operator.and_, hidden, masks.visible(fills)) if fills else hidden
        used = add(torch.where, where, masks.of(kept), 0.0)
        reached.append(add("sum", used, -1, keepdim=True))
    return reached


def _with_heads(add: Adder, x: Node, heads: object) -> Node:
    """K, or what is made of K or V, with a head for each of q."""
    kv_heads = value(x).shape[1]
    if statically_true(kv_heads == 1) or statically_true(heads == kv_heads):
        return x
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        raise Unsupported("heads", f"a mean of {kv_heads} heads of v for {heads} of q")
    return add("repeat_interleave", x, heads // kv_heads, 1)


def _mean_of_values(add: Adder, attention: MatchedAttention, q: Node, k: Node, v: Node) -> Node:
    """Of all keys; where gradients reach their scores, with those of equal weights, and no value, of q and k.

    With weights of 1 / N: out = mean + Σ (s - s₀) (v - mean) / N, which is mean + (q - q₀) · C, C = scale · kᵀ (v - mean) / N.
    """
    heads = value(q).shape[1]
    mean = add("mean", v, 2, keepdim=True)
    if not attention.mask.flows:
        return _with_heads(add, mean, heads)
    scale = attention.scale if attention.scale is not None else attention.q.size(D) ** -0.5
    count = add.size(k, 2)
    centred = add(operator.sub, add("detach", v), add("detach", mean))
    centred = add(operator.mul, add(operator.truediv, centred, count), scale)
    moved = _with_heads(add, add(torch.matmul, add("transpose", k, 2, 3), centred), heads)
    moved = add(torch.matmul, q, moved)
    moved = add(operator.sub, moved, add("detach", moved))
    return add(operator.add, _with_heads(add, mean, heads), moved)
